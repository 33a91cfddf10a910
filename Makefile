# Every target makes .venv itself when it is missing or older than pyproject.toml or constraints.txt.
PYTHON ?= python3
BIN := .venv/bin
READY := .venv/.installed
# Two test processes on two cores: one thread each, or they wait for one another.
ONE_THREAD := OMP_NUM_THREADS=1 MKL_NUM_THREADS=1
PYTEST := $(ONE_THREAD) $(BIN)/pytest -n 2 --dist worksteal --cov=grt

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help setup demo test test-all soak lint bench clean

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

clean: ## remove caches and build output; .venv, data and runs stay
	rm -rf .pytest_cache .ruff_cache .hypothesis .coverage .coverage.* htmlcov dist
	find grt tests -name __pycache__ -type d -prune -exec rm -rf {} +

# The stamp comes last, so an interrupted installation is taken up again.
$(READY): pyproject.toml constraints.txt
	@if [ ! -x $(BIN)/pip ]; then \
	  $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null \
	    || { echo "grt needs Python 3.11 or newer, and '$(PYTHON)' is not: try make $(or $(MAKECMDGOALS),setup) PYTHON=python3.12" >&2; exit 1; }; \
	  $(PYTHON) -m venv .venv; \
	fi
	$(BIN)/pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	@touch $@
