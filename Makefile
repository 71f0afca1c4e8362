# make demo: set up what running needs, and answer eight prompts at once. The first time takes some minutes.
# make test: the whole suite; about 15 minutes, and some more for installing the first time.
# make build: compile native/ again after a change, what changed only. A warning ends it.
# make sanitize: the native code's tests under AddressSanitizer and UndefinedBehaviorSanitizer (GCC).
# make bench WORKLOADS="file.json ...": what README.md says of measuring.
# Another interpreter: make demo PYTHON=python3.12

PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
# The build tools lie in .venv, and build/ is kept: what is compiled once is not compiled again.
INSTALL := $(PIP) install --no-build-isolation
STRICT := --config-settings=cmake.define.OCTAVO_STRICT=ON
NATIVE := $(wildcard native/CMakeLists.txt native/src/*)

.PHONY: demo test build sanitize bench clean
.DELETE_ON_ERROR:

demo: .venv/installed
	@$(BIN)/octavo demo

test: .venv/installed-test
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pytest

BUILD_TYPE := Release
build: | .venv/tools
	@$(INSTALL) --no-deps $(STRICT) --config-settings=cmake.build-type=$(BUILD_TYPE) --editable .

# A copy of the package whose module has the sanitizers in it. -S keeps the installed one away, and ASan must be there
# before the interpreter; which leaks on purpose. Whole engines and real models would take too long.
SANITIZED := build/sanitize
SITE = $$($(BIN)/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
PRELOAD = $$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)
SANITIZED_PYTHON = LD_PRELOAD="$(PRELOAD)" ASAN_OPTIONS=detect_leaks=0 PYTHONPATH="$(SANITIZED)/site:$(SITE)" $(BIN)/python -S
sanitize: .venv/installed-test
	@$(INSTALL) --no-deps $(STRICT) --upgrade --target $(SANITIZED)/site . --config-settings=build-dir=$(SANITIZED)/build \
	    --config-settings=cmake.build-type=Debug --config-settings=cmake.define.OCTAVO_SANITIZE=ON \
	    --config-settings=cmake.define.OCTAVO_TESTS=ON
	@PATH="$(CURDIR)/$(BIN):$$PATH" ctest --test-dir $(SANITIZED)/build --output-on-failure
	@$(SANITIZED_PYTHON) -c 'from octavo import _native; assert "sanitize" in _native.__file__, _native.__file__'
	@$(SANITIZED_PYTHON) -m pytest tests/native --ignore=tests/native/test_determinism.py -k "not smollm2"

# What these measure stands in README.md.
WORKLOADS ?= $(wildcard ../shared/workloads/single.json ../shared/workloads/batch32.json)
bench: .venv/installed
	@$(BIN)/python benchmarks/kv_alloc.py
	@$(BIN)/python benchmarks/scheduling.py
	@$(if $(WORKLOADS),$(BIN)/python benchmarks/run.py smollm2 $(WORKLOADS),echo "No workloads here; name some: make bench WORKLOADS=file.json")

# Each stamp is as old as the last installation, so that nothing is installed again until pyproject.toml or
# the native code changes.
.venv/installed: pyproject.toml $(NATIVE) | .venv/tools
	@echo "Compiling and installing Octavo, with its dependencies (some minutes, once) ..."
	@$(INSTALL) --editable '.[server]'
	@touch $@

.venv/installed-test: pyproject.toml $(NATIVE) | .venv/tools
	@echo "Compiling and installing Octavo, with its test dependencies, torch among them (some minutes, once) ..."
	@$(INSTALL) $(STRICT) --editable '.[test]'
	@touch $@ .venv/installed

.venv/tools: pyproject.toml | .venv/created
	@echo "Installing the build tools ..."
	@$(PIP) install --upgrade pip scikit-build-core
	@$(BIN)/python -m scikit_build_core.build requires --mode=editable | tr -d '[]", ' >.venv/build-requirements
	@$(PIP) install --requirement .venv/build-requirements
	@touch $@

.venv/created:
	@command -v $(PYTHON) >/dev/null || { echo "There is no $(PYTHON) here; apt-get install python3 python3-venv, or name another one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))' || { echo "Octavo needs Python 3.10 or newer and $(PYTHON) is $$($(PYTHON) --version 2>&1); name a newer one: make demo PYTHON=python3.12" >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { echo "$(PYTHON) cannot make a virtual environment yet; apt-get install $(notdir $(PYTHON))-venv, then run make again." >&2; exit 1; }
	@$(PYTHON) -c 'import os, sysconfig, sys; sys.exit(not os.path.exists(sysconfig.get_path("include") + "/Python.h"))' || { echo "$(PYTHON) has no headers (Python.h) to compile for; apt-get install $(notdir $(PYTHON))-dev, then run make again." >&2; exit 1; }
	@command -v $(firstword $(CXX)) >/dev/null || command -v c++ >/dev/null || { echo "There is no C++ compiler here; apt-get install g++, then run make again." >&2; exit 1; }
	@echo "Creating .venv ..."
	@$(PYTHON) -m venv .venv
	@touch $@

clean:
	rm -rf .venv build dist .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find src tests benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +
