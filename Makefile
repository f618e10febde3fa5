# What a new user runs. Everything lives in .venv; nothing outside it is touched.
PYTHON ?= python3.11
VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed

.PHONY: demo test browser lint bench format clean

$(STAMP): pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip
	$(BIN)/pip install --quiet --constraint constraints.txt --editable '.[dev]'
	touch $(STAMP)

demo: $(STAMP)  ## run the main job for a minute on this machine
	$(BIN)/tidegate demo

test: $(STAMP) browser  ## every test that this machine can run
	$(BIN)/python -m pytest

# Debian's Chromium, for the dashboard's test.
browser:
	@command -v chromium >/dev/null || (apt-get update -q && apt-get install -y -q --no-install-recommends chromium)

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: $(STAMP)  ## all benchmarks; run it with nothing else running
	$(BIN)/python -m benchmarks

clean:
	rm -rf $(VENV) build dist *.egg-info
