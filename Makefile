# demo, test, test-all, test-cuda and lint. Each first makes the environment in .venv, and makes it anew when pyproject.toml changes.

PYTHON ?= python3
# Installed first and by its exact version: pip takes the build for this machine that its configuration offers under it.
TORCH ?= torch==2.13.0

BIN := .venv/bin
STAMP := .venv/.installed
LINT := build/lint
SCRIPTS := $(patsubst %/,%,$(sort $(dir $(wildcard tests/*.py examples/*.py benchmarks/*.py))))

# One thread per process: the tests are processes, and start more of them.
export OMP_NUM_THREADS ?= 1

.PHONY: demo test test-all test-cuda lint coverage
.DELETE_ON_ERROR:

demo: $(STAMP)
	$(BIN)/python examples/demo.py

test: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile

test-all: $(STAMP)
	$(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not cuda"

# On a machine with a GPU, which all ranks share; needs a torch that was built for it.
test-cuda: $(STAMP)
	$(BIN)/python -m pytest -q -m cuda

# Tiny models of all families of transformers through all stages, into docs/coverage.md. What is there is kept.
coverage: $(STAMP)
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[coverage]"
	$(BIN)/python benchmarks/coverage.py --jobs 2 --limit-s 600 --missing

# mypy finds packages by their folders only, so it is shown the import package as it is installed: autopart/, with
# passes/ and runtime/ inside. It runs in that tree, where the folder autopart/ of the repository is out of its sight.
lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	@rm -rf $(LINT) && mkdir -p $(LINT)/autopart
	@ln -s $(CURDIR)/autopart/* $(CURDIR)/passes $(CURDIR)/runtime $(LINT)/autopart/
	@ln -s $(addprefix $(CURDIR)/,$(SCRIPTS)) $(LINT)/
	cd $(LINT) && $(CURDIR)/$(BIN)/mypy --config-file $(CURDIR)/pyproject.toml --cache-dir $(CURDIR)/.mypy_cache autopart $(SCRIPTS)

$(STAMP): pyproject.toml
	@$(PYTHON) -c 'import sys; sys.exit("autopart needs Python 3.11 or newer: make PYTHON=python3.11" if sys.version_info < (3, 11) else 0)'
	@echo "Installing into .venv"
	@test -x $(BIN)/python || $(PYTHON) -m venv .venv
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check "$(TORCH)"
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[dev]"
	@touch $@
