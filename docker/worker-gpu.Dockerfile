# A worker for NVIDIA's GPUs. The CUDA libraries are in the Python packages; the node brings the driver and its runtime.
#   docker build -f docker/worker-gpu.Dockerfile -t regraft/worker-gpu:0.1.0 .
FROM python:3.11.14-slim-bookworm AS build
WORKDIR /src
COPY constraints constraints
RUN python -m pip install --no-cache-dir -r constraints/uv.txt && python -m venv --without-pip /opt/regraft
RUN uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python -r constraints/gpu.txt \
    && uv pip install --no-cache --python /opt/regraft/bin/python --no-deps -r constraints/models.txt
COPY pyproject.toml README.md LICENSE hatch_build.py ./
COPY core core
COPY graders graders
COPY api api
COPY worker worker
COPY migrations migrations
# The service, and the packages that python graders run with: the same in every image.
RUN uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps . \
    && /opt/regraft/bin/regraft-server environments build

FROM python:3.11.14-slim-bookworm
# Triton, which torch and vLLM write kernels with, compiles a few lines of C when it starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp regraft && mkdir /data && chown regraft /data
COPY --from=build /opt/regraft /opt/regraft
ENV PATH=/opt/regraft/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=regraft REGRAFT_DATA_DIR=/data \
    NVIDIA_VISIBLE_DEVICES=all NVIDIA_DRIVER_CAPABILITIES=compute,utility
USER 10001:10001
WORKDIR /tmp
VOLUME /data
HEALTHCHECK --interval=20s --start-period=120s CMD ["python", "-ISc", "import os, sys, time; sys.exit(time.time() - os.stat('/data/worker.alive').st_mtime > 60)"]
CMD ["regraft-server", "worker"]
