# Each target sets itself up from nothing but a Python of at least 3.11:
#   make test      what must hold at every change, but for tests marked slow: over 1.5 s each
#   make test-all  the slow ones, too; what CI runs
#   make demo      trains a small language model and compares the policies on it
#   make bench     what the decorators and the reports cost in time
#   make lint      ruff and pyright alone

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin

.DELETE_ON_ERROR:
.PHONY: test test-all lint demo bench clean

# What a file's tests share, they share in one process.
PYTEST := JAX_PLATFORMS=cpu $(BIN)/python -m pytest -n 2 --dist loadfile --no-loadscope-reorder

test: lint
	$(PYTEST) -m "not slow"

test-all: lint
	$(PYTEST)

lint: $(VENV)/dev.stamp
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/pyright

demo: $(VENV)/experiments.stamp
	$(BIN)/python experiments/train_lm.py

bench: $(VENV)/dev.stamp
	JAX_PLATFORMS=cpu $(BIN)/python experiments/bench_core.py
	JAX_PLATFORMS=cpu $(BIN)/python experiments/bench_report.py

# One environment serves both; a stamp is younger than the last installation of its extra.  Most of
# what is installed is never imported, and need not be compiled in advance.
$(VENV)/%.stamp: pyproject.toml | $(BIN)/python
	$(BIN)/python -m pip install --quiet --no-compile --editable '.[$*]'
	touch $@

$(BIN)/python:
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "jaxmem needs Python 3.11 or newer, and $(PYTHON) is " + sys.version.split()[0] + "; pass PYTHON=...")'
	$(PYTHON) -m venv $(VENV)

clean:
	rm -rf $(VENV) runs
