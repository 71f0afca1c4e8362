# make demo: set up what running needs, and answer eight prompts at once. The first time takes about a minute.
# make test: the whole suite; about 12 minutes, and some more for installing the first time.
# make bench WORKLOADS="file.json ...": what README.md says of measuring.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test bench clean
.DELETE_ON_ERROR:

demo: .venv/installed
	@$(BIN)/octavo demo

test: .venv/installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest

# What these measure stands in README.md.
WORKLOADS ?= $(wildcard ../shared/workloads/single.json ../shared/workloads/batch32.json)
bench: .venv/installed
	@$(BIN)/python benchmarks/kv_alloc.py
	@$(BIN)/python benchmarks/scheduling.py
	@$(if $(WORKLOADS),$(BIN)/python benchmarks/run.py smollm2 $(WORKLOADS),echo "No workloads here; name some: make bench WORKLOADS=file.json")

# Each stamp is as old as the last installation, so that nothing is installed again until pyproject.toml changes.
.venv/installed: pyproject.toml | .venv/created
	@echo "Installing Octavo and its dependencies (about half a minute, once) ..."
	@$(PIP) install --editable .
	@touch $@

.venv/installed-test: pyproject.toml | .venv/created
	@echo "Installing Octavo and its test dependencies, torch among them (some minutes, once) ..."
	@$(PIP) install --editable '.[test]'
	@touch $@ .venv/installed

.venv/created:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here; apt-get install python3 python3-venv, or name another one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Octavo needs Python 3.10 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1); name a newer one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual environment yet; apt-get install $(notdir $(PYTHON))-venv, then run make again." >&2; exit 1; }
	@echo "Creating .venv ..."
	@$(PYTHON) -m venv .venv
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
