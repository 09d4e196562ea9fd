# The API, the migrations and every other command that needs no torch. Built from the repository's root:
#   docker build -f docker/api.Dockerfile -t regraft/api:0.1.0 .
# The base by digest, mirrors and credentials: docs/howto/kubernetes-images.md, Images behind a mirror.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG UV_INDEX
ARG UV_SYSTEM_CERTS
ARG NPM_CONFIG_REGISTRY
ARG NODE_EXTRA_CA_CERTS
WORKDIR /src
COPY constraints constraints
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    python -m pip install --no-cache-dir -r constraints/uv.txt -r constraints/node.txt && python -m venv --without-pip /opt/regraft
# Layers that rarely change come first, for the build cache.
COPY pyproject.toml ./
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python -c constraints/all.txt -r pyproject.toml --extra postgres --extra redis --extra otel
COPY README.md LICENSE hatch_build.py ./
COPY core core
COPY graders graders
COPY api api
COPY worker worker
COPY regraft_server regraft_server
COPY migrations migrations
COPY docs docs
COPY zensical.toml ./
COPY console console
# The service, and the packages that python graders run with: the same in every image.
RUN --mount=type=secret,id=netrc,target=/root/.netrc --mount=type=secret,id=npmrc,target=/root/.npmrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps -c constraints/all.txt . \
    && /opt/regraft/bin/regraft-server environments build

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp regraft && mkdir /data && chown regraft /data
COPY --from=build /opt/regraft /opt/regraft
ENV PATH=/opt/regraft/bin:$PATH PYTHONUNBUFFERED=1 REGRAFT_DATA_DIR=/data REGRAFT_HOST=0.0.0.0
USER 10001:10001
WORKDIR /tmp
VOLUME /data
EXPOSE 8000
HEALTHCHECK --interval=15s --start-period=120s CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/healthz', timeout=5)"]
CMD ["regraft-server", "api"]
# Last, because they differ in each build.
ARG BASE
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="regraft: API, migrations and commands" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
