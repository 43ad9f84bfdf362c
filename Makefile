# The two commands of a newcomer. Each makes its own virtual environment in .venv and installs the project into it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# CPU timing: keep large tensors in the heap, where they are reused, instead of mapping each afresh.
export MALLOC_MMAP_THRESHOLD_ := 4294967296
export MALLOC_TRIM_THRESHOLD_ := 68719476736
# Python compiles a module when it is first imported, and keeps it even where the environment says otherwise: the tests
# start many processes, each of which would compile for ten seconds. Most modules of the packages are never imported.
export PIP_COMPILE := 0
export PYTHONDONTWRITEBYTECODE :=

.PHONY: help demo test test-all test-exhaustive test-versions links lint docs gpu-kit

help:
	@echo "make demo       a packed, checked QLoRA fine-tune on a CPU, in two to three minutes"
	@echo "make test       what a change is likely to break, in minutes on two cores; test-all is the rest, too"
	@echo "make test-exhaustive  one more of each kind: every type of the tables, every fault in every dtype; hours"
	@echo "make test-versions  a battery under the oldest and the newest supported packages, in fresh environments"
	@echo "make lint       ruff and pyright"
	@echo "make docs       the documentation's site, in site/"
	@echo "make gpu-kit    what a GPU machine without network lacks, in .gpu/ (benchmarks/gpu/README.md)"

demo: $(VENV)/installed
	$(BIN)/trl-packfa demo

# Every folder but `whole`: what takes minutes a file, as every architecture, several processes and instruction sets do.
test: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 --ignore=tests/whole -m "not slow"

test-all: $(VENV)/installed
	$(BIN)/python -m pytest -n 2 -m "not exhaustive"

test-exhaustive: $(VENV)/installed
	IN_FULL=1 $(BIN)/python -m pytest -n 2 -m exhaustive

# The oldest and the newest packages that versions.py names, each in an environment of its own.
test-versions:
	$(PYTHON) tools/try_versions.py oldest newest

# Type checkers, editors and mkdocs do not read the mapping of pyproject.toml: links show them both folders.
links:
	ln -sfn ../patches trl_packfa/patches
	ln -sfn ../recipes trl_packfa/recipes

lint: $(VENV)/installed links
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python

docs: $(VENV)/installed links
	$(BIN)/pip install -q -e '.[docs]'
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

gpu-kit: $(VENV)/installed
	$(BIN)/python benchmarks/gpu/prepare.py

# torch first: its CPU build is a fraction of what a later requirement could pull in.
$(VENV)/installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install torch==2.13.0
	$(BIN)/pip install -e '.[tested,plots,dev]'
	touch $@
