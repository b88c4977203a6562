#!/bin/sh
# Regenerates tfps/protos from protos/tfps.proto.
#
# With an old protoc on purpose: its output runs on every protobuf from 3.20.3 (the oldest that TensorFlow allows) to 7.x,
# while a newer protoc's refuses to run on anything older than itself. In a throw-away venv, because that protoc needs an
# old protobuf. Then checks that the result imports on the oldest protobuf.
set -eu
cd "$(dirname "$0")/.."
venv=$(mktemp -d)
trap 'rm -rf "$venv"' EXIT
"${PYTHON:-python3}" -m venv "$venv"
"$venv/bin/pip" install --quiet "grpcio-tools==1.49.1" "protobuf==4.21.12" "setuptools<80"
"$venv/bin/python" -m grpc_tools.protoc --proto_path=protos --python_out=tfps/protos --pyi_out=tfps/protos protos/tfps.proto
"$venv/bin/pip" install --quiet --no-deps "protobuf==3.20.3"
PYTHONPATH=tfps/protos PYTHONDONTWRITEBYTECODE=1 "$venv/bin/python" -c "import tfps_pb2; tfps_pb2.JoinRequest(rank=-1).SerializeToString()"
echo "tfps/protos is up to date"
