# make demo: the main job; make test: the tests. Both set up .venv first, on any machine with Python 3.11 or later,
# a C++20 compiler and make.
PYTHON ?= python3
BIN := .venv/bin

.PHONY: help build demo test bench lint format clean
help:
	@echo "make build | demo | test | bench | lint | format | clean"

# torch first, and this release: the extension is compiled against what is installed, without build isolation.
.venv/ready: pyproject.toml setup.py
	$(PYTHON) -m venv .venv
	$(BIN)/pip install --quiet torch==2.13.0
	$(BIN)/pip install --quiet "setuptools>=77" "cmake>=3.24" ninja "pybind11>=3.0"
	$(BIN)/pip install --quiet --no-build-isolation --editable ".[serve,dev]"
	touch $@

# After the first time, only what changed.
build: .venv/ready
	$(BIN)/python setup.py --quiet build_ext --inplace

demo: build
	$(BIN)/python python/examples/demo.py

# The op tests once for each instruction set that this machine has; the rest once.
test: build
	set -e; for capability in $$($(BIN)/python -c \
	    "import pagedattn_ext; print(*pagedattn_ext.build_info()['cpu_capabilities'])"); do \
	  echo "tests/ops, PAGEDATTN_CPU_CAPABILITY=$$capability"; \
	  PAGEDATTN_CPU_CAPABILITY=$$capability $(BIN)/python -m pytest -q tests/ops; \
	done
	$(BIN)/python -m pytest -q --ignore=tests/ops

bench: build
	$(BIN)/python bench/attn.py --quick
	$(BIN)/python bench/elementwise.py --quick

SOURCES := $(shell find csrc -name '*.h' -o -name '*.cpp')
lint: .venv/ready
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/clang-format --dry-run -Werror $(SOURCES)

format: .venv/ready
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .
	$(BIN)/clang-format -i $(SOURCES)

clean:
	rm -rf .venv build dist *.egg-info src/pagedattn_ext/_C*.so .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +
