# Everything that a newcomer, a contributor and CI type. `make` alone lists it.
.DEFAULT_GOAL := help
SHELL := /bin/bash
PYTHON ?= python3
BIN := .venv/bin
NB ?=

# One thread a kernel: printed numbers do not depend on the number of cores, and two kernels share a machine well.
export OMP_NUM_THREADS := 1
export PYTHONHASHSEED := 0
export JUPYTER_PLATFORM_DIRS := 1
# The kernels of nbval: forks of one process that has imported torch; where a process can't fork, say KERNEL=python3.
KERNEL ?= forked
NBVAL := --nbval --nbval-kernel-name $(KERNEL) --nbval-sanitize-with nbs/_ext/sanitize.cfg -p no:cacheprovider
PARALLEL := -n 2 --dist loadfile

NOTEBOOKS := $(shell find nbs -name '*.ipynb' -not -path '*/.*')
BOOK_SOURCES := $(NOTEBOOKS) _toc.yml _config.yml $(wildcard nbs/*.bib nbs/*.toml nbs/_ext/*.py nbs/_static/* nbs/_templates/*)

.PHONY: help book test lab serve run export lint notebooks check bench gpu clean

help: ## list the targets
	@sed -n 's/^\([a-z]*\):.*## /\1\t/p' $(MAKEFILE_LIST) | while IFS=$$'\t' read -r target text; do printf '  make %-7s %s\n' "$$target" "$$text"; done

.venv/.done: constraints.txt pyproject.toml
	$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit(f"psgd_lit needs Python 3.11 or newer, and this is {sys.version.split()[0]}: say make PYTHON=python3.12")'
	$(PYTHON) -m venv .venv
	PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check uv
	UV_FIND_LINKS="$$PIP_FIND_LINKS" $(BIN)/uv pip install --quiet --python $(BIN)/python --constraint constraints.txt --editable '.[dev]' \
	    || { echo 'uv can not install it; pip, which may know other indexes, tries'; \
	         PIP_CONSTRAINT=constraints.txt $(BIN)/pip install --quiet --disable-pip-version-check --editable '.[dev]'; }
	$(BIN)/python -c 'import matplotlib.font_manager'  # builds its cache now, not in the middle of a chapter
	@touch $@

_build/html/.done: .venv/.done $(BOOK_SOURCES) $(wildcard psgd_lit/*.py psgd_lit/*/*.py)
	$(BIN)/jupyter-book build . --warningiserror --nitpick --keep-going --quiet
	$(BIN)/python nbs/_ext/single.py _build/html
	@touch $@

book: _build/html/.done ## build the book, with warnings as errors, and book.html, all of it on one page
	@echo "The book is ready: open file://$(CURDIR)/_build/html/index.html"

test: _build/html/.done ## run the tests but the slow ones, and under nbval each notebook that has changed
	$(BIN)/pytest $(NBVAL) --changed $(PARALLEL) --hypothesis-profile=few -m "not elsewhere and not slow" tests nbs

lab: .venv/.done export ## open the notebooks in JupyterLab, with the exhibits live
	$(BIN)/jupyter lab nbs

serve: book ## serve the built book on http://localhost:8000
	$(BIN)/python -m http.server --bind localhost --directory _build/html 8000

run: export ## run notebooks and store their outputs in the canonical form: all, or NB=nbs/criterion/01_hvp.ipynb
	$(BIN)/python nbs/_ext/writer.py $(NB)
	$(BIN)/nbdev_export

export: .venv/.done ## write the library psgd_lit/ from the notebooks
	$(BIN)/nbdev_export

lint: .venv/.done ## check style and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check tests nbs/_ext nbs/conftest.py
	$(BIN)/ruff format --check --line-length 96 $(NOTEBOOKS)
	$(BIN)/mypy

notebooks: .venv/.done ## run every notebook under strict nbval, as on another machine
	ATEN_CPU_CAPABILITY=default MKL_CBWR=COMPATIBLE $(BIN)/pytest $(NBVAL) $(PARALLEL) nbs

check: .venv/.done ## exactly what CI runs: style, types, the book, all notebooks as on another machine, all tests, and again here each notebook that doesn't stand as it was run
	$(MAKE) --jobs=3 lint book notebooks
	$(BIN)/pytest -n 2 --dist load tests

bench: .venv/.done export ## time a step of every method on every model, in half an hour
	$(BIN)/python -m psgd_lit.experiments bench

gpu: ## measure on a CUDA machine with the system's own python3 and torch
	$(PYTHON) tests/gpu.py

clean: ## remove what was built, but not .venv
	rm -rf _build build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
