# Two commands matter: `make demo` and `make test`. Both set up .venv the first time and are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Where the demo keeps its run; start it again and it goes on.
RUN ?= runs/demo
TEST_PROCESSES ?= 3
FULL_PROCESSES ?= 2
# Tests start hundreds of processes, which would each compile what is not kept compiled.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: demo docs test test-full fuzz check lock dist bench tables clean

# LOCK=locks/cpu.txt installs exactly those files, each compared with its hash (docs/security.md).
ifdef LOCK
REQUIREMENTS = --require-hashes -r $(LOCK)
PROJECT = --no-deps --no-build-isolation -e .
else
REQUIREMENTS = -c constraints.txt -e .
DEV_REQUIREMENTS = -c constraints.txt -e '.[dev]'
endif
PIP = $(BIN)/python -m pip install --quiet --disable-pip-version-check

$(BIN)/.base: pyproject.toml constraints.txt $(LOCK)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) $(REQUIREMENTS)
	$(if $(PROJECT),$(PIP) $(PROJECT))
	touch $@

$(BIN)/.dev: $(BIN)/.base
	$(if $(PROJECT),,$(PIP) $(DEV_REQUIREMENTS))
	touch $@

# 75 means: stopped by a signal with everything saved; the next `make demo` goes on.
demo: $(BIN)/.base
	@$(BIN)/unisono train --set run.dir=$(RUN) || { code=$$?; test $$code -eq 75 && echo "saved; 'make demo' again continues" || exit $$code; }

# A file of tests is run by one of the processes; each has warm workers of its own. Three keep two cores busy: tests also wait.
test: $(BIN)/.dev
	$(BIN)/python -m pytest -q -n $(TEST_PROCESSES) --dist loadfile -m "not full and not gpu and not peer"

# BUDGET_S=1200: starts nothing that cannot end within 1200 s, and says what it did not reach (tests/support/budget.py).
test-full: $(BIN)/.dev
	$(BIN)/python -m pytest -q -n $(FULL_PROCESSES) --dist load --maxschedchunk=1 -m "full or peer" $(if $(BUDGET_S),--budget-s '$(BUDGET_S)')

# Mutated files of the kinds in tests/support/fuzz.py, COUNT of each; the seeds are of the commit. The file of a failure is kept in KEEP.
COUNT ?= 1000
KEEP ?= fuzz-failures
SEED ?= $(shell printf '%d' 0x$$(git rev-parse --short=7 HEAD))
fuzz: $(BIN)/.dev
	$(BIN)/python tests/support/fuzz_run.py all $(SEED) $(COUNT) --keep '$(KEEP)'

check: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell --skip docs/_build src tests docs examples benchmarks README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/python tests/support/size.py
	$(BIN)/python tests/support/audit.py locks/cuda.txt

# The lock files of the newest releases that pyproject.toml and constraints.txt allow.
lock: $(BIN)/.dev
	$(BIN)/uv pip compile --quiet --upgrade pyproject.toml --extra dev --universal --python-version 3.11 --generate-hashes \
	  -c constraints.txt --custom-compile-command "make lock" -o locks/cuda.txt
	$(BIN)/python tests/support/locks.py

# The wheel and the source distribution, the same bytes each time, and the list of what the lock installs (CycloneDX).
dist: $(BIN)/.dev
	rm -rf dist
	$(BIN)/python -m build --no-isolation
	$(BIN)/cyclonedx-py requirements locks/cpu.txt --pyproject pyproject.toml --mc-type library --output-reproducible \
	  --of JSON -o dist/sbom.cdx.json

# the pages and the reference, all built anew (what sphinx keeps hides warnings); no network, every warning is an error
docs: $(BIN)/.dev
	$(BIN)/python -m sphinx -q -E -W --keep-going -b html docs docs/_build/html

bench: $(BIN)/.dev
	$(BIN)/python -m benchmarks.run

# The tables of README.md, benchmarks/README.md and docs/kvstore.md, from benchmarks/results.
tables: $(BIN)/.dev
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis
