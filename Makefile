# make env prepares .venv; every other target prepares it first if it is not there.
#
#   PYTHON=python3.12 make env          another interpreter
#   PIP_FLAGS="--extra-index-url ..."   where to look for a build of torch, say one without CUDA

PYTHON ?= python3
PIP_FLAGS ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready

.DEFAULT_GOAL := help
.PHONY: help env demo test check campaign bench docs format format-check lint types imports

help:
	@echo "make env        prepare .venv from pyproject.toml and constraints.txt"
	@echo "make demo       see a run crash and go on"
	@echo "make test       run the tests"
	@echo "make check      format, lint, types, imports and tests: what CI runs"
	@echo "make campaign   run the long randomised tests too"
	@echo "make bench      measure, against this machine's own limits"
	@echo "make docs       run the code blocks of the documentation"
	@echo "make format     rewrite the sources in the project's format"

env: $(READY)

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt torch==2.13.0 -e '.[test]'
	@touch $@

demo: $(READY)
	$(BIN)/python examples/demo.py

test: $(READY)
	$(BIN)/python -m pytest

check: format-check lint types imports test

campaign: $(READY)
	MILEPOST_CAMPAIGN=1 $(BIN)/python -m pytest -m "campaign or not campaign" --timeout=3600

bench: $(READY)
	$(BIN)/pip install --quiet $(PIP_FLAGS) -c constraints.txt torch==2.13.0 -e '.[bench]'
	$(BIN)/python benchmarks/run.py

docs: $(READY)
	$(BIN)/python -m pytest tests/repo/test_docs.py

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix --select I .

format-check: $(READY)
	$(BIN)/ruff format --check .

lint: $(READY)
	$(BIN)/ruff check .

types: $(READY)
	$(BIN)/mypy

imports: $(READY)
	$(BIN)/lint-imports
