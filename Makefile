PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
EXTRAS ?= dev,dagster,dask,eagle3,fast
# Processes of `make test`: one for each core that it may use, four at most; 0 is the one of pytest itself.
PYTEST_WORKERS ?= $(shell $(PYTHON) -c "import os; print(min(4, len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count()))")

# Without DAGSTER_HOME Dagster says that its history goes when it ends, which is not so: .dagster/ stays (dagster.yaml).
# Its recommendation of `dg`, at every call of the command line that people and CI use here, is the warning left out.
DAGSTER := DAGSTER_HOME="$(CURDIR)" PYTHONWARNINGS='ignore:Function `' $(BIN)/dagster

# What needs none of the marks of pyproject.toml.
UNMARKED := -m "not slow and not real_text and not browser and not faults"

.PHONY: run dev test quick check docs pictures bench oldest

run: $(VENV)/.installed  ## materialize every cache from the bundled sample through Dagster and print what was built
	NIELS_GPT_SOURCE_ROOT=sample NIELS_GPT_CACHE_DIR=cache $(DAGSTER) asset materialize -m pipelines.definitions --select '*' \
		--config-json '{"execution": {"config": {"in_process": true}}}'
	$(BIN)/niels-gpt list cache/sample
	test ! -e cache/sample/sft/oasst1 || $(BIN)/niels-gpt show cache/sample/sft/oasst1 --split val
	test ! -e cache/sample/eagle3/targets || $(BIN)/niels-gpt eagle3 stats cache/sample/eagle3/targets

dev: $(VENV)/.installed  ## Dagster's UI on http://127.0.0.1:3000
	$(DAGSTER) dev

test: $(VENV)/.installed  ## the test suite
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(UNMARKED)

quick: $(VENV)/.installed  ## the tests of a few milliseconds, in half a minute: before each commit
	$(BIN)/python -m pytest -n $(PYTEST_WORKERS) --dist worksteal $(UNMARKED) @tests/not_quick.txt

check: $(VENV)/.installed  ## lint, format, types, and the plan of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/structure.py
	$(BIN)/python tools/words.py

docs: $(VENV)/.docs  ## the site, strictly: open site/index.html
	$(BIN)/zensical build --clean --strict
	$(BIN)/python tools/check_site.py

pictures: $(VENV)/.installed  ## docs/images/ from real runs; dagster.png needs the extra browser and chromium
	$(BIN)/python -m tools.pictures

bench: $(VENV)/.installed  ## speed as ratios to a limit and a peer
	$(BIN)/python benchmarks/loaders.py
	$(BIN)/python benchmarks/packing.py
	$(BIN)/python benchmarks/build.py
	$(BIN)/python benchmarks/build_fast.py
	$(BIN)/python benchmarks/commands.py
	$(BIN)/python benchmarks/eagle3.py
	$(BIN)/python benchmarks/prefix_tree.py

# The oldest versions that pyproject.toml allows, the extras of Dagster aside. That torch brings CUDA's libraries: 6 GB.
OLDEST := .oldest
OLDEST_TESTS ?= $(addprefix tests/,display sampling storage) $(wildcard tests/test_*.py)
oldest:  ## the tests with the oldest dependencies that are allowed
	$(PYTHON) -m venv $(OLDEST)/uv
	$(OLDEST)/uv/bin/python -m pip install --quiet uv
	$(OLDEST)/uv/bin/uv venv --quiet --clear --python $(PYTHON) $(OLDEST)/env
	$(OLDEST)/uv/bin/uv pip compile --quiet --resolution lowest-direct --python $(OLDEST)/env --extra eagle3 --extra plot \
		--output-file $(OLDEST)/requirements.txt pyproject.toml
	$(OLDEST)/uv/bin/uv pip install --quiet --python $(OLDEST)/env --requirements $(OLDEST)/requirements.txt \
		hypothesis pytest pytest-xdist torchdata
	PYTHONPATH=$(CURDIR) $(OLDEST)/env/bin/python -m pytest -n $(PYTEST_WORKERS) -m "not slow and not real_text and not faults" $(OLDEST_TESTS)

# In compat mode the checkout's own folder is on the path. By default an import hook finds the packages, which type checkers
# do not run: they would see no types.
$(VENV)/.installed: pyproject.toml constraints.txt Makefile
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[$(EXTRAS)]'
	touch $@

$(VENV)/.docs: $(VENV)/.installed
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --config-settings editable_mode=compat --editable '.[$(EXTRAS),docs]'
	touch $@
