# make train   create the environment, install, and run the main job
# make test    lint, types and tests
# make test-long   the full counts of random and property tests
# make test-gpu    what a GPU alone can show
# make evidence   prove every kind of plan on this machine, one page into docs/evidence, in 15 minutes
# make test-mutations   plant every bug of tests/mutations and write docs/tables/mutations.md
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
NPROC ?= 2
# processes that run tests side by side, each with ranks of its own
JOBS ?= 2
# files of tests whose proofs run on a GPU too
PROOFS := $(wildcard $(addprefix tests/*/test_,$(addsuffix .py,modules parity domain sequence expert)))
PLAN ?= dp_shard=$(NPROC),zero=3

.PHONY: train test test-long test-gpu test-mutations evidence lint types tests docs coverage-table scripts-table clean

PIP := $(BIN)/pip install --quiet --disable-pip-version-check

# to run
$(VENV)/.ready: pyproject.toml constraints.txt
	@echo "installing torch and shardwise into $(VENV): once, some minutes"
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) "torch>=2.11,<2.14" $(TORCH_INDEX)
	$(PIP) --constraint constraints.txt --editable .
	touch $@

# to develop
$(VENV)/.installed: $(VENV)/.ready
	$(PIP) --constraint constraints.txt --editable ".[dev]"
	touch $@

train: $(VENV)/.ready
	$(BIN)/shardwise train examples/text.toml --plan "$(PLAN)" --nproc $(NPROC)

evidence: $(VENV)/.ready
	$(BIN)/shardwise evidence

test: lint types tests

lint: $(VENV)/.installed
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.installed
	$(BIN)/mypy

tests: $(VENV)/.installed
	$(BIN)/python -m pytest -m "not long" -n $(JOBS) --dist worksteal --durations=10

test-long: $(VENV)/.installed
	HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest -n $(JOBS) --dist worksteal --durations=10 --timeout=1800

# what a GPU alone can show; skipped where there is none
test-gpu: $(VENV)/.installed
	$(BIN)/python -m pytest -m gpu -n $(JOBS) --dist worksteal
	$(BIN)/python -m pytest --proofs-on cuda -m "not long" -n $(JOBS) --dist worksteal $(PROOFS)

test-mutations: $(VENV)/.installed
	$(BIN)/python tests/mutations/run.py --write
	$(BIN)/python tests/mutations/both.py --thorough

coverage-table: $(VENV)/.installed
	$(BIN)/python benchmarks/coverage.py --write

scripts-table: $(VENV)/.installed
	$(BIN)/python benchmarks/scripts_table.py --write

docs: $(VENV)/.installed
	$(BIN)/python docs/generate.py

clean:
	rm -rf $(VENV) build dist
