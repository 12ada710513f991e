# Two commands matter: `make demo` and `make test`. Both set up .venv the first time and are quick the second time.
PYTHON ?= python3
VENV ?= .venv
BIN = $(VENV)/bin
# Where the demo keeps its run; start it again and it goes on.
RUN ?= runs/demo

.PHONY: demo test test-full check bench tables clean

$(BIN)/.base: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e .
	touch $@

$(BIN)/.dev: $(BIN)/.base
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -e '.[dev]'
	touch $@

# 75 means: stopped by a signal with everything saved; the next `make demo` goes on.
demo: $(BIN)/.base
	@$(BIN)/unisono train --set run.dir=$(RUN) || { code=$$?; test $$code -eq 75 && echo "saved; 'make demo' again goes on" || exit $$code; }

test: $(BIN)/.dev
	$(BIN)/python -m pytest -q -m "not full and not gpu and not peer"

test-full: $(BIN)/.dev
	$(BIN)/python -m pytest -q -m "full or peer"

check: $(BIN)/.dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright --pythonpath $(BIN)/python
	$(BIN)/lint-imports
	$(BIN)/codespell src tests docs benchmarks README.md CONTRIBUTING.md CHANGELOG.md
	$(BIN)/python tests/support/size.py

bench: $(BIN)/.dev
	$(BIN)/python -m benchmarks.run

# The tables of README.md, benchmarks/README.md and docs/kvstore.md, from benchmarks/results.
tables: $(BIN)/.dev
	$(BIN)/python -m benchmarks.tables

clean:
	rm -rf $(VENV) build *.egg-info src/*.egg-info .pytest_cache .ruff_cache .hypothesis
