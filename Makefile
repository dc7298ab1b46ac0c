# Every target does all it needs, on a fresh machine with Python 3.11 or later and its venv module.
# `make help` lists them.

PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
STAMP  := $(VENV)/.installed
NATIVE := $(wildcard csrc/pyproject.toml csrc/CMakeLists.txt csrc/engine/* csrc/isa/*)
# Tests wait for servers a good part of their time. Each process begins at an end of its own and takes
# over from the other when it is through, so that files mostly stay together with their servers.
BESIDE := -n 2 --dist worksteal
# A .venv whose interpreter does not run any more, or that was made for another directory (its
# scripts name it), is made anew. The stamp says for which.
WRECKED := $(shell $(BIN)/python -c "" 2>/dev/null \
	&& { test ! -s $(STAMP) || test "$$(cat $(STAMP))" = "$(CURDIR)"; } || echo yes)
# A .venv that is a link belongs to somebody else: it is used as it is, and never installed into.
LINKED := $(shell test -L $(VENV) && echo yes)

.PHONY: again help install serve bench soak bench-peers test test-fast lint format clean

help:  ## list the targets
	@sed -nE 's/^([a-z-]+):.*  ## (.*)/\1\t\2/p' $(MAKEFILE_LIST) | expand -t 14

install: $(if $(LINKED),,$(STAMP))  ## build .venv with everything and fetch the default model

$(STAMP): pyproject.toml constraints.txt $(NATIVE) $(if $(WRECKED),again)
	@echo "Installing into $(VENV); the first time takes a few minutes."
	$(if $(WRECKED),$(PYTHON) -m venv --clear $(VENV))
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet -c constraints.txt -e '.[torch,dev,bench]'
	@echo "Building the native kernels (a minute or more)..."
	@$(BIN)/python -m pip install --quiet ./csrc >$(VENV)/native-build.log 2>&1 \
		&& echo "The native kernels are built." \
		|| { $(BIN)/python -m pip uninstall --quiet --yes turnstile-kernels; \
		echo "The native kernels could not be built (see $(VENV)/native-build.log; they need a C++20 compiler and Python's headers): the slower reference kernels will be used."; }
	$(BIN)/turnstile pull
	@echo "$(CURDIR)" >$(STAMP)

serve: install  ## a running server on http://127.0.0.1:8000; flags in ARGS="..."
	PYTHONPATH=src $(BIN)/python -m turnstile serve $(ARGS)

bench: install  ## W1 to W5 against a server started for it, and the roofline; flags in ARGS="..."
	PYTHONPATH=src $(BIN)/python -m turnstile bench suite $(ARGS)

soak: install  ## ten minutes of everything at once, three kill -9 among it; more in ARGS="--minutes 60"
	PYTHONPATH=src $(BIN)/python -m turnstile.bench.soak $(ARGS)

bench-peers: install  ## Turnstile and other servers in turns; first ARGS="--install"
	PYTHONPATH=src $(BIN)/python scripts/bench_peers.py --directory peers $(ARGS)

test: install  ## the whole suite, by two processes side by side; more in ARGS="-n 8"
	$(BIN)/python -m pytest -q $(BESIDE) $(ARGS)

test-fast: install  ## without the real model and without server processes
	$(BIN)/python -m pytest -q $(BESIDE) -m "not model and not e2e" $(ARGS)

lint: install  ## ruff, mypy, import contracts, documents
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	PYTHONPATH=src $(BIN)/lint-imports
	$(BIN)/python scripts/check_docs.py

format: install  ## let ruff mend what it can
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove what was built here; the models in the cache stay
	rm -rf $(if $(LINKED),,$(VENV)) build dist csrc/build .pytest_cache .mypy_cache .ruff_cache .hypothesis
