# `make run` and `make test` set up what they need; nothing has to be run before them.
.PHONY: setup run test test-all registries check bench lock clean
.DELETE_ON_ERROR:

BIN := .venv/bin
STAMP := .venv/.set-up
WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -n $(WORKERS) --dist worksteal

setup: $(STAMP)

# The stamp is as old as the oldest set-up that is still right; pip is not asked again until one of these changes.
$(STAMP): requirements.lock pyproject.toml .python-version tools/setup.sh
	@sh tools/setup.sh
	@touch $@

# One guarded attempt, told on one screen.
run: $(STAMP)
	@$(BIN)/python tools/demo.py

test: $(STAMP)
	@$(PYTEST) -m "not slow"

test-all: registries
	@$(PYTEST)

# Packages from the real registries, which the tests in their closed world do not reach.
registries: $(STAMP)
	@$(BIN)/python tools/registries.py

check: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy proxy sandbox tests
	$(BIN)/lint-imports

bench: $(STAMP)
	@$(BIN)/python -m benchmarks

lock: $(STAMP)
	@sh tools/lock.sh

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
