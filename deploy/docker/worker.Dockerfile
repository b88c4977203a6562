# A worker, and whatever else tfps has. In the root of the repository:
#   docker build -f deploy/docker/worker.Dockerfile -t tfps-worker .
# For GPUs add: --build-arg EXTRAS=tensorflow,metrics --build-arg 'MORE=tensorflow[and-cuda]'
# A training program is one more layer:
#   FROM tfps-worker
#   COPY train.py .
# Not slim: with a C compiler.
FROM python:3.12-bookworm AS build
ARG EXTRAS=cpu,metrics
ARG MORE=
WORKDIR /src
COPY setup.py pyproject.toml README.md constraints.txt ./
COPY tfps tfps
# $MORE may be several packages.
# hadolint ignore=SC2086
RUN python -m venv /opt/tfps \
 && /opt/tfps/bin/pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]" $MORE

FROM python:3.12-slim-bookworm
COPY --from=build /opt/tfps /opt/tfps
ENV PATH=/opt/tfps/bin:$PATH PYTHONUNBUFFERED=1 HOME=/home/tfps
# A home that the user of the pods owns: Keras writes its settings there.
RUN useradd --uid 10001 --create-home --home-dir /home/tfps tfps
WORKDIR /home/tfps
# By number: Kubernetes cannot tell whether a name is root.
USER 10001:10001
CMD ["python"]
