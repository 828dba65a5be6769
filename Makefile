# Two commands: `make demo` and `make test`. Each makes .venv where it is missing, installs and runs.
SHELL := /bin/bash
VENV := .venv
BIN := $(VENV)/bin
# The first interpreter of a supported version; override with `make PYTHON=/path/to/python3.12 …`.
PYTHON ?= $(shell for p in python3 python3.12 python3.11 python3.10; do \
	$$p -c 'import sys; sys.exit(not (3, 10) <= sys.version_info[:2] <= (3, 12))' 2>/dev/null && echo $$p && break; done)

.PHONY: help demo test lint format clean

help:
	@echo "make demo   train and serve a 4,096-token classifier; distil a student from a teacher's cache"
	@echo "make test   run the tests"
	@echo "make lint   check style; make format mends it"
	@echo "make clean  remove .venv and what the demo wrote"

$(BIN)/python:
	@test -n "$(PYTHON)" || { echo "No Python 3.10, 3.11 or 3.12 was found: install one, or run make PYTHON=/path/to/it"; exit 1; }
	$(PYTHON) -m venv $(VENV) || { echo "The venv module failed; on Debian: apt-get install python3-venv"; rm -rf $(VENV); exit 1; }

$(VENV)/installed-demo: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --editable .
	@touch $@

$(VENV)/installed-test: pyproject.toml setup.py | $(BIN)/python
	$(BIN)/python -m pip install --disable-pip-version-check --editable '.[test]'
	@touch $@ $(VENV)/installed-demo

demo: $(VENV)/installed-demo
	$(BIN)/python -m bigbird.classifier.demo
	$(BIN)/python -m bigbird.distillation.demo

test: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m pytest -n 2 --dist worksteal

lint: $(VENV)/installed-test
	$(BIN)/python -m ruff check .
	$(BIN)/python -m ruff format --check .

format: $(VENV)/installed-test
	$(BIN)/python -m ruff format .
	$(BIN)/python -m ruff check --fix .

clean:
	rm -rf $(VENV) runs
