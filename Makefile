# Two commands do everything on a fresh machine: `make demo` and `make test`. Each makes the
# environment it needs. PYTHON names the interpreter (3.11 or newer), VENV the environment's folder.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

.PHONY: demo test check unit sanitize test-oracle install clean help

help:
	@echo "make demo   answer three prompts through a bf16 and an FP8 KV cache and compare them"
	@echo "make test   every check CI runs: format, lint, types, import layers, tests"
	@echo "make check  the same without the tests;  make unit  the fast tests alone"
	@echo "make test-oracle  the .gguf tests against llama.cpp, which is compiled first (minutes)"

# The stamp is newer than the files that decide what is installed, so a second run installs nothing.
$(VENV)/.installed: pyproject.toml constraints.txt hatch_build.py csrc/build.py $(wildcard csrc/cpu/*)
	$(PYTHON) -m venv $(VENV)
	$(PIP) install --constraint constraints.txt --editable .
	touch $@

$(VENV)/.installed-dev: $(VENV)/.installed
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $@

install: $(VENV)/.installed

demo: $(VENV)/.installed
	$(BIN)/kv8 demo

check: $(VENV)/.installed-dev
	$(BIN)/ruff format --check src tests csrc benchmarks examples interop hatch_build.py
	$(BIN)/ruff check src tests csrc benchmarks examples interop hatch_build.py
	$(BIN)/mypy
	$(BIN)/lint-imports

# The kernels' tests on a build that stops at the first bad address or undefined operation. Leaks
# are not looked for: the kernels allocate nothing, and Python leaks on purpose.
SANITIZED := build/libkv8_cpu-sanitized.so
CXX ?= c++
sanitize: $(VENV)/.installed-dev
	$(BIN)/python csrc/build.py --sanitize --output $(SANITIZED)
	KV8_TEST_CPU_LIBRARY=$(SANITIZED) ASAN_OPTIONS=detect_leaks=0 UBSAN_OPTIONS=print_stacktrace=1 \
	LD_PRELOAD="$$($(CXX) -print-file-name=libasan.so) $$($(CXX) -print-file-name=libstdc++.so)" \
	  $(BIN)/python -m pytest tests/unit/attention tests/unit/kernels tests/property/test_attention.py \
	  -k "(cpu or kernels) and not triton"

unit: $(VENV)/.installed-dev
	$(BIN)/python -m pytest tests/unit tests/property

test: check
	$(BIN)/python -m pytest --numprocesses 2 --dist loadfile

test-oracle: $(VENV)/.installed-dev
	$(PIP) install --constraint constraints.txt --editable '.[dev,oracle]'
	$(BIN)/python -m pytest tests/unit/models tests/integration/test_builtin_models.py

clean:
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis
