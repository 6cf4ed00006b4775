# make demo       photographs and handwritten digits with holes; writes a report to open in a browser
# make test       lint, types, the core's tests, then all other tests and doctests (what CI runs)
# make test-gpu   the tests once more, on a GPU
# make test-browser   the page of `misconv app` in Chromium, which is installed first where that is possible
# make lint       ruff and mypy alone
# make bench      time what is meant to be fast, against what it replaces
# make fuzz       look for defects with random cases, for MINUTES (10 if not given)
# make docs       measure what the documents state and draw their pictures
# make site       build the site of the documents, with its tutorials run; open build/site/index.html
# Everything happens in .venv, which any target creates with the pinned versions of constraints.txt. With
# CONSTRAINTS=constraints-oldest.txt it happens in .venv-oldest, with the oldest torch that we support.

.DEFAULT_GOAL := test

PYTHON      ?= python3
CONSTRAINTS ?= constraints.txt
VENV        := .venv$(patsubst constraints%.txt,%,$(notdir $(CONSTRAINTS)))
BIN         := $(VENV)/bin

.PHONY: demo test test-gpu test-browser lint bench fuzz docs site clean
.DELETE_ON_ERROR:

$(VENV)/installed: pyproject.toml $(CONSTRAINTS)
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "misconv needs Python 3.11 or newer, this is " + sys.version)'
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[dev]'
	touch $@

lint: $(VENV)/installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# The quickest answers first; conftest.py says what the core is. Types are those of the newest torch alone.
test: $(if $(filter constraints.txt,$(CONSTRAINTS)),lint,$(VENV)/installed)
	$(BIN)/python -m pytest --numprocesses auto --quiet --part core
	$(BIN)/python -m pytest --numprocesses auto --dist worksteal --quiet --part rest

# Processes share the one GPU, so there are few of them.
test-gpu: $(VENV)/installed
	@$(BIN)/python -c 'import sys, torch; sys.exit(None if torch.cuda.is_available() else "test-gpu needs a GPU, and torch sees none here")'
	$(BIN)/python -m pytest --device cuda --numprocesses 4 --quiet tests

# `make test` runs these too wherever it finds a Chromium; here it is looked for first, and fetched by root on Debian.
test-browser: $(VENV)/installed
	@command -v chromium || command -v chromium-browser || command -v google-chrome || \
	{ [ "$$(id -u)" = 0 ] && command -v apt-get && apt-get update && apt-get install -y chromium; } || \
	{ echo "test-browser needs chromium, chromium-browser or google-chrome on PATH"; exit 1; }
	$(BIN)/python -m pytest --quiet tests/test_app.py tests/test_app_browser.py

demo: $(VENV)/installed
	$(BIN)/misconv demo --out misconv-demo --overwrite

# Results of the layer go by the device they were measured on: layer-cuda.json where there is a GPU, else layer-cpu.json.
bench: $(VENV)/installed
	device=$$($(BIN)/python -c 'import torch; print("cuda" if torch.cuda.is_available() else "cpu")') && \
	$(BIN)/misconv bench --device $$device --out results/bench/layer-$$device.json
	$(BIN)/python benchmarks/em.py
	$(BIN)/python benchmarks/knn.py

MINUTES ?= 10
DEVICE  ?= cpu
SEED    ?= $(shell date +%s)

# make fuzz MINUTES=30 KINDS="maths networks": new seeds every time; each failure comes with the line that repeats it.
fuzz: $(VENV)/installed
	$(BIN)/python -m tests.fuzz $(KINDS) --minutes $(MINUTES) --device $(DEVICE) --seed $(SEED)

docs: $(VENV)/installed
	$(BIN)/python tools/measure.py
	$(BIN)/python tools/objectives.py
	$(BIN)/python tools/calibration.py
	$(BIN)/python tools/pictures.py
	$(BIN)/python tools/architectures.py
	$(BIN)/python tools/speed.py
	$(BIN)/python tools/figures.py
	$(BIN)/python tools/results.py
	$(BIN)/python tools/trust.py

# Tests need no Sphinx, so it is installed here. A tutorial is run again when its code has changed.
$(VENV)/installed-docs: $(VENV)/installed
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint $(CONSTRAINTS) --editable '.[docs]'
	touch $@

site: $(VENV)/installed-docs
	PATH="$(CURDIR)/$(BIN):$$PATH" $(BIN)/python -m sphinx --fail-on-warning --keep-going --nitpicky --quiet docs build/site

clean:
	rm -rf .venv .venv-oldest build .mypy_cache .ruff_cache .pytest_cache .hypothesis
