# Every target sets up what it needs (.venv) first; that is quick when nothing changed. With NO_SETUP=1 PY=python3 they
# take a Python that has everything already, on a host without a network for example.
VENV ?= .venv
PY := $(VENV)/bin/python
# Bytecode of this package and its tests is kept, in __pycache__: without it, each of some hundred processes compiles anew.
PYTEST := env -u PYTHONDONTWRITEBYTECODE OMP_NUM_THREADS=1 $(PY) -m pytest
# Test processes, each with whole files; those that start Ray run in one of them. WORKERS=0: in one process (--pdb).
WORKERS ?= 2
PARALLEL = -n $(WORKERS) --dist loadscope --no-loadscope-reorder
PYTHON_CUDA ?= python3.12
# mkdocs and what it needs: apart, so that nothing of the tested stack changes.
DOCS_VENV ?= .venv-docs
export VENV

.DEFAULT_GOAL := help
.PHONY: help setup quickstart test test-minutes test-engines test-all twin bench-driver mutations test-gpu gpu-report twin-wheels twin-cuda lint format types docs clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | awk -F ':.*## ' '{printf "  make %-12s %s\n", $$1, $$2}'

setup: ## make the virtual environment (.venv) with everything in it; see scripts/setup_env.sh for its settings
	@$(if $(NO_SETUP),true,bash scripts/setup_env.sh)

quickstart: setup ## train a tiny model on additions with GRPO, no download: about 4 minutes on 2 cores
	@$(PY) recipes/quickstart/run.py $(ARGS)

test: setup ## the test suite: 20 to 25 minutes on 2 cores
	$(PYTEST) $(PARALLEL) -m "not slow and not gpu and not engines and not twin" $(ARGS)

test-minutes: setup ## the same, and tests/minutes.txt: minutes of CPU by folder (ARGS=tests/e2e: of that one)
	$(PYTEST) $(PARALLEL) -p tests.worlds.ledger -m "not slow and not gpu and not engines and not twin" $(ARGS)

test-engines: ## the tests of second engines (SGLang is installed for them), servers, further pools: 10 minutes on 2 quiet cores
	@$(if $(NO_SETUP),true,WITH_SGLANG=1 bash scripts/setup_env.sh)
	$(PYTEST) $(PARALLEL) -m "engines and not slow and not gpu and not twin" $(ARGS)

test-all: setup ## also the tests marked slow (kills, soaks, three seeds of the quickstart): an hour
	$(PYTEST) -m "not gpu" $(ARGS)

twin: setup ## whole steps on fake GPUs, at the sizes users train: 10 minutes on 2 quiet cores; needs a C++ compiler
	$(PYTEST) $(PARALLEL) -m twin tests/twin $(ARGS)

bench-driver: setup ## the driver's own work on a small batch: fails at twice the copies of it that were measured (300)
	OMP_NUM_THREADS=1 $(PY) -m verl_like.cli bench driver --prompts 128 --rounds 5 --most-copies 600

mutations: setup ## plant faults, one at a time, and show that the tests notice each: 10 minutes
	$(PY) tests/mutations.py

test-gpu: setup ## the tests that need a CUDA device
	$(PYTEST) -m gpu $(ARGS)

gpu-report: setup ## what only a CUDA device can tell (docs/gpu_checks.md), in pieces of at most 8 minutes; run again: goes on
	OMP_NUM_THREADS=1 $(PY) -m tests.gpu.report $(ARGS)

twin-wheels: setup ## look up what is used of vLLM, SGLang, FlashAttention, Liger in their GPU wheels: downloads 1.5 GB, keeps none
	$(PY) -m tests.twin.wheels $(ARGS)

twin-cuda: ## the twin on the versions for cards (Python 3.12, torch CUDA build, no device): 6 GB into .venv-cuda
	@test -x .venv-cuda/bin/python || $(PYTHON_CUDA) -m venv .venv-cuda
	.venv-cuda/bin/python -m pip install -q --disable-pip-version-check -c constraints/cuda.txt setuptools torchvision -e ".[dev,liger]"
	OMP_NUM_THREADS=1 .venv-cuda/bin/python -m pytest $(PARALLEL) tests/twin tests/unit/models/test_fused_triton.py $(ARGS)

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
