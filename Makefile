# Each target sets up .venv by itself; only Python 3.10+ and make are needed beforehand.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
WORKERS ?= 2

.DEFAULT_GOAL := help
.PHONY: help quickstart test test-all test-timm test-versions soak bench docs dist lint style clean

help:
	@echo "make quickstart   trains a small model on handwritten digits, about a minute"
	@echo "make test         lint and the fast tests"
	@echo "make test-all     every test, slow ones too"
	@echo "make test-timm    timm's own tests of models, downloaded, over our names; ARGS='-- -k tiny' for the small ones"
	@echo "make test-versions  ops, layers, models and linearize with the oldest, a middle and the newest supported versions; downloads gigabytes"
	@echo "make soak         tries to break the package thousands of times, about 15 minutes; PART=weights for one part"
	@echo "make bench        the operation against its peers on the CPU, under a minute"
	@echo "make docs         the site in build/site: every page of docs/, and the API from docstrings"
	@echo "make dist         the files of a release in dist/, checked"
	@echo "make lint         ruff and mypy"

$(STAMP): pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e ".[dev]"
	@touch $@

quickstart: $(STAMP)
	$(BIN)/inline train

style: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

lint: style
	$(BIN)/mypy

# The tests of a file stay on one worker, where they share fixtures.
# Compiled files are kept, whatever the environment says: many tests start processes.
# mypy takes a minute without its cache. It runs beside the tests, and its output follows theirs.
test: TESTS = not slow and not gpu
test-all: TESTS = not gpu
test test-all: style
	@mkdir -p build
	@$(BIN)/mypy > build/mypy.txt 2>&1 & mypy=$$!; \
	PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(WORKERS) --dist loadfile -m "$(TESTS)"; tests=$$?; \
	wait $$mypy; types=$$?; echo mypy; cat build/mypy.txt; exit $$((tests || types))

# An interrupted soak continues where it stopped. ARGS='--share 0.05' runs a short one; ARGS=--record writes the figures of docs/.
soak: $(STAMP)
	OMP_NUM_THREADS=1 PYTHONPATH=src:tests $(BIN)/python -m soak $(PART) $(ARGS)

# ARGS names the sets of versions and the folder of their environments: ARGS='oldest --folder /tmp/versions'.
test-versions: $(STAMP)
	$(BIN)/python tests/versions.py $(ARGS)

test-timm: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/python tests/timm_tests.py $(ARGS)

bench: $(STAMP)
	$(BIN)/inline bench op --device cpu --quick

# The variable silences a note about mkdocs' next major version, which constraints.txt keeps out.
docs: $(STAMP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict
	@echo "build/site/index.html opens in a browser; with search: $(BIN)/python -m http.server -d build/site"

# twine is needed here alone.
dist: $(STAMP)
	rm -rf dist
	$(BIN)/python -m pip install --quiet --disable-pip-version-check twine
	$(BIN)/python -m build
	$(BIN)/python -m twine check --strict dist/*

clean:
	rm -rf $(VENV) build dist runs .pytest_cache .mypy_cache .ruff_cache .hypothesis
