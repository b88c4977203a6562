# A pserver, without TensorFlow. In the root of the repository:
#   docker build -f deploy/docker/pserver.Dockerfile -t tfps-pserver .
# Not slim: with a C compiler.
FROM python:3.12-bookworm AS build
WORKDIR /src
COPY setup.py pyproject.toml README.md constraints.txt ./
COPY tfps tfps
RUN python -m venv /opt/tfps \
 && /opt/tfps/bin/pip install --no-cache-dir -c constraints.txt '.[metrics]'

FROM python:3.12-slim-bookworm
COPY --from=build /opt/tfps /opt/tfps
ENV PATH=/opt/tfps/bin:$PATH PYTHONUNBUFFERED=1
# By number: Kubernetes cannot tell whether a name is root.
USER 10001:10001
# gRPC, data connections (--data-port 7071) and metrics (--metrics-port 9100).
EXPOSE 7070 7071 9100
ENTRYPOINT ["tfps_pserver"]
