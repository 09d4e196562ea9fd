# A worker for NVIDIA's GPUs. The CUDA 13 libraries are in the Python packages; the node brings a driver of version 580 or
# later and NVIDIA's container runtime. `regraft-server doctor` checks the driver before a pod claims a job.
#   docker build -f docker/worker-gpu.Dockerfile -t regraft/worker-gpu:0.1.0 .
# The base by digest, mirrors and credentials: docs/howto/kubernetes-images.md, Images behind a mirror.
ARG BASE=docker.io/library/python:3.11.14-slim-bookworm
FROM ${BASE} AS build
ARG PIP_INDEX_URL
ARG PIP_CERT
ARG UV_DEFAULT_INDEX
ARG UV_INDEX
ARG UV_SYSTEM_CERTS
WORKDIR /src
COPY constraints constraints
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    python -m pip install --no-cache-dir -r constraints/uv.txt && python -m venv --without-pip /opt/regraft
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python -r constraints/gpu.txt \
    && uv pip install --no-cache --python /opt/regraft/bin/python --no-deps -r constraints/models.txt
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY core core
COPY graders graders
COPY api api
COPY worker worker
COPY regraft_server regraft_server
COPY migrations migrations
# The service, and the packages that python graders run with: the same in every image.
RUN --mount=type=secret,id=netrc,target=/root/.netrc \
    uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps . \
    && /opt/regraft/bin/regraft-server environments build

FROM ${BASE}
# Triton, which torch and vLLM write kernels with, compiles a few lines of C when it starts; torch's compiler, C++;
# FlashInfer, CUDA.
# APT_MIRROR serves Debian and its security updates in place of the server that the base names.
ARG APT_MIRROR
# hadolint ignore=DL3008
RUN --mount=type=secret,id=apt-auth,target=/etc/apt/auth.conf.d/mirror.conf \
    if [ -n "$APT_MIRROR" ]; then find /etc/apt/sources.list* -type f -exec sed -i "s|https\?://[^/ ]*|$APT_MIRROR|g" {} +; fi && apt-get update && apt-get install -y --no-install-recommends g++ gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp regraft && mkdir /data && chown regraft /data
COPY --from=build /opt/regraft /opt/regraft
# nvcc, its headers and libraries are of the Python packages. FlashInfer links with lib64/libcudart.so and
# lib64/stubs/libcuda.so, which the packages do not have; the driver brings the real libcuda.so.1.
ENV CUDA_HOME=/opt/regraft/lib/python3.11/site-packages/nvidia/cu13
RUN ln -s lib "$CUDA_HOME/lib64" && ln -s libcudart.so.13 "$CUDA_HOME/lib/libcudart.so" && mkdir "$CUDA_HOME/lib/stubs" \
    && gcc -shared -Wl,-soname,libcuda.so.1 -o "$CUDA_HOME/lib/stubs/libcuda.so" -x c /dev/null && "$CUDA_HOME/bin/nvcc" --version
ENV PATH=/opt/regraft/bin:$CUDA_HOME/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=regraft REGRAFT_DATA_DIR=/data \
    REGRAFT_COMPILE_CACHE=/data/compiled NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
VOLUME /data
HEALTHCHECK --interval=20s --start-period=120s CMD ["python", "-ISc", "import os, sys, time; sys.exit(time.time() - os.stat('/data/worker.alive').st_mtime > 60)"]
CMD ["regraft-server", "worker"]
# Last, because they differ in each build.
ARG BASE
ARG VERSION
ARG REVISION
LABEL org.opencontainers.image.title="regraft: worker for NVIDIA's GPUs" org.opencontainers.image.licenses="Apache-2.0" \
    org.opencontainers.image.version="${VERSION}" org.opencontainers.image.revision="${REVISION}" \
    org.opencontainers.image.base.name="${BASE}"
