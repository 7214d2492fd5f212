# `make demo` and `make test` each set up .venv by themselves; `make help` lists the rest.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: help setup demo test check bench clean

help: ## list the targets
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 12

setup: $(STAMP) ## make .venv with everything in it

# torch first and alone: its exact version keeps pip from choosing a newer build with gigabytes of libraries
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("gpudiag needs Python 3.10 or newer, found " + sys.version.split()[0] + "; set PYTHON=python3.x" if sys.version_info < (3, 10) else 0)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check "$$(grep -E '^torch==' constraints.txt)"
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[all,dev]'
	@touch $(STAMP)

demo: setup ## train a small transformer for a few seconds and look at its report
	$(BIN)/gpudiag demo

test: setup ## every test that this machine can run
	$(BIN)/python -m pytest -n auto

check: setup ## linters and types alone (part of the tests too)
	$(BIN)/ruff check . && $(BIN)/ruff format --check . && $(BIN)/mypy && $(BIN)/lint-imports

bench: setup ## reading and report time against a floor measured in the same run
	$(BIN)/python tests/benchmarks/bench_report.py

clean: ## remove .venv and caches
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
