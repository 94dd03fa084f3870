# Every target sets up what it needs (.venv) first; that is quick when nothing changed. With NO_SETUP=1 PY=python3 they
# take a Python that has everything already, on a host without a network for example.
VENV ?= .venv
PY := $(VENV)/bin/python
PYTEST := OMP_NUM_THREADS=1 $(PY) -m pytest
# Test processes, each with whole files; those that start Ray run in one of them. WORKERS=0: in one process (--pdb).
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadscope --no-loadscope-reorder
# mkdocs and what it needs: apart, so that nothing of the tested stack changes.
DOCS_VENV ?= .venv-docs
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-engines test-all twin bench-driver mutations test-gpu gpu-report lint format types docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## make the virtual environment (.venv) with everything in it; see scripts/setup_env.sh for its settings
	@$(if $(NO_SETUP),true,bash scripts/setup_env.sh)

quickstart: setup ## train a tiny model on additions with GRPO, no download: about 4 minutes on 2 cores
	@$(PY) recipes/quickstart/run.py $(ARGS)

test: setup ## the test suite: 15 minutes on 2 quiet cores
	$(PYTEST) $(PARALLEL) -m "not slow and not gpu and not engines and not twin" $(ARGS)

test-engines: ## the tests of second engines (SGLang is installed for them), servers, further pools: 10 minutes on 2 quiet cores
	@$(if $(NO_SETUP),true,WITH_SGLANG=1 bash scripts/setup_env.sh)
	$(PYTEST) $(PARALLEL) -m "engines and not slow and not gpu and not twin" $(ARGS)

test-all: setup ## also the tests marked slow (kills, soaks, three seeds of the quickstart): an hour
	$(PYTEST) -m "not gpu" $(ARGS)

twin: setup ## whole steps on fake GPUs, at the sizes users train: 10 minutes on 2 quiet cores; needs a C++ compiler
	$(PYTEST) $(PARALLEL) -m twin tests/twin $(ARGS)

bench-driver: setup ## the driver's own work on a small batch: fails at twice the copies of it that were measured (300)
	OMP_NUM_THREADS=1 $(PY) -m verl_like.cli bench driver --prompts 128 --rounds 5 --most-copies 600

mutations: setup ## plant faults, one at a time, and show that the tests notice each: 6 minutes
	$(PY) tests/mutations.py

test-gpu: setup ## the tests that need a CUDA device
	$(PYTEST) -m gpu $(ARGS)

gpu-report: setup ## everything on one CUDA device: its tests, then all benchmarks; tables in outputs/gpu
	@mkdir -p outputs/gpu
	-$(PYTEST) -m gpu -s tests/gpu > outputs/gpu/tests.txt 2>&1
	@tail -n 3 outputs/gpu/tests.txt
	-$(PY) -m verl_like.cli bench driver --json outputs/gpu/driver.json
	-$(PY) -m verl_like.cli bench memory --budget 16384 --json outputs/gpu/memory.json
	-$(PY) -m verl_like.cli bench agents --engine vllm --model 0.5b --json outputs/gpu/agents.json
	-$(PY) -m verl_like.cli bench sync --channel ipc --model 0.5b --json outputs/gpu/sync_ipc.json
	-$(PY) -m verl_like.cli bench sync --channel broadcast --model 0.5b --ranks 1 --json outputs/gpu/sync_broadcast.json
	-$(PY) -m verl_like.cli bench all --model 0.5b --workload w1 --out outputs/gpu/0.5b_w1 $(ARGS)
	$(PY) -m verl_like.cli bench all --model 1.5b --workload w1 --out outputs/gpu/1.5b_w1 $(ARGS)

lint: setup ## ruff: rules and formatting
	$(PY) -m ruff check .
	$(PY) -m ruff format --check .

format: setup ## let ruff repair and format
	$(PY) -m ruff check --fix .
	$(PY) -m ruff format .

types: setup ## pyright
	$(PY) -m pyright

docs: setup ## regenerate docs/configuration.md and coming_from_*.md; the documentation as a site with search: outputs/site/index.html
	$(PY) -m verl_like.kit.docs.configuration
	@cmp -s constraints/docs.txt $(DOCS_VENV)/installed.txt || { echo "[docs] installing mkdocs into $(DOCS_VENV)"; \
		$(PY) -m venv $(DOCS_VENV) && $(DOCS_VENV)/bin/python -m pip install -q --disable-pip-version-check --no-deps \
		-r constraints/docs.txt && cp constraints/docs.txt $(DOCS_VENV)/installed.txt; }
	NO_MKDOCS_2_WARNING=1 $(DOCS_VENV)/bin/python -m mkdocs build -q --strict
	@echo "open outputs/site/index.html"

clean: ## remove caches and outputs (the virtual environment stays)
	rm -rf build dist *.egg-info .pytest_cache .ruff_cache .hypothesis outputs
	find verl_like tests recipes -name __pycache__ -type d -prune -exec rm -rf {} +
