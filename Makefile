# `make serve` and `make test` do everything they need on a fresh machine with Python 3.11 or later.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed

.PHONY: install serve test test-fast lint format clean

install: $(STAMP)  ## build .venv with everything and fetch the default model

$(STAMP): pyproject.toml constraints.txt csrc/pyproject.toml $(wildcard csrc/src/*)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[dev,bench]'
	$(BIN)/python -m pip install --quiet ./csrc \
		|| echo "The native kernels could not be built (a C++20 compiler is needed); the slower reference kernels will serve."
	$(BIN)/turnstile pull
	touch $(STAMP)

serve: install  ## a running server on http://127.0.0.1:8000
	$(BIN)/turnstile serve

test: install  ## the whole suite
	$(BIN)/python -m pytest -q

test-fast: install  ## without the real model and without server processes
	$(BIN)/python -m pytest -q -m "not model and not e2e"

lint: install  ## ruff, mypy, import contracts, docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py

format: install
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
