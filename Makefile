# Two commands do everything on a bare CPU machine: `make demo` and `make test`.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
# Idle OpenMP threads that spin starve the other processes on few cores.
export OMP_WAIT_POLICY ?= passive

.PHONY: help setup demo test quality style bench-smoke

help:
	@echo "make demo         one chat answer with ForeSpark and one without (sets up first)"
	@echo "make test         the tests that need no GPU (sets up first)"
	@echo "make quality      lint, format and type checks"
	@echo "make style        format and fix"
	@echo "make bench-smoke  the benchmarks' quick self-check"
	@echo "make setup        only the environment, in $(VENV)"

setup:
	@$(PYTHON) forespark/demo/bootstrap.py $(VENV)

demo: setup
	@$(BIN)/forespark demo $(DEMO)

test: setup
	@$(BIN)/python -m pytest -q -m "not gpu" -n 2 tests/kernels
	@$(BIN)/python -m pytest -q -m "not gpu" -n 2 --timeout 900 tests/unit tests/property tests/integration $(PYTEST)

quality: setup
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

style: setup
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

bench-smoke: setup
	@$(BIN)/forespark bench host --repeats 20 --batches 1 --num-reqs 32
	@$(BIN)/forespark bench smoke
