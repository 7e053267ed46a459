PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,pipelines

.PHONY: run test check bench

run: $(VENV)/.installed  ## build every cache from the bundled sample and print what was built
	$(BIN)/python -m niels_gpt.cache.cli build-all --source-root sample --cache-dir cache --seed 42
	$(BIN)/python -m niels_gpt.cache.cli show cache/sample/sft/oasst1 --split val

test: $(VENV)/.installed  ## the test suite
	$(BIN)/python -m pytest -m "not real_text"

check: $(VENV)/.installed  ## lint, format and types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

bench: $(VENV)/.installed  ## speed as ratios to a limit and a peer
	$(BIN)/python benchmarks/readers.py

$(VENV)/.installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[$(EXTRAS)]'
	touch $@
