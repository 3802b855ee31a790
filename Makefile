# `make help` lists the targets. Variables, all optional:
#   PYTHON=python3.12   the interpreter that .venv is made from (3.11 or newer; remove .venv to change it)
#   TORCH=system        use the torch that PYTHON already has instead of installing one
#   ARGS="..."          passed on to the command of `train`, `bench` and the test targets
# The torch build (CPU or one of the CUDA versions) is the one pip finds under the pinned version.
# For another build point pip to it (PIP_EXTRA_INDEX_URL, PIP_FIND_LINKS), or install it yourself
# and use TORCH=system.

BIN := .venv/bin
SOURCES := ray_dynbs jobs tests
# The stamp's name and content keep how .venv was made, for the next time it has to be brought up to date.
ifneq ($(wildcard .venv/.installed-system),)
TORCH ?= system
endif
TORCH ?= pinned
PYTHON ?= $(or $(shell cat .venv/.installed-$(TORCH) 2>/dev/null),python3)
STAMP := .venv/.installed-$(TORCH)
OTHER_STAMPS = $(filter-out $(STAMP),$(wildcard .venv/.installed-*))

ifeq ($(filter $(TORCH),pinned system),)
$(error TORCH is "$(TORCH)"; allowed are "pinned" and "system")
endif

.DEFAULT_GOAL := help
.PHONY: help .venv train test unit test-slow test-gpu lint types imports format bench hooks clean

help: ## Show this list
	@awk -F ':[^#]*## ' '/^[.a-z-]+:.*## / {printf "  make %-12s %s\n", $$1, $$2}' Makefile

.venv: $(STAMP) ## Create .venv with the pinned dependencies (TORCH=system: with the installed torch)

$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys' 2>/dev/null || { \
	  echo "error: PYTHON is \"$(PYTHON)\", which does not run; name Python 3.11 or newer: make PYTHON=..." >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "error: Python 3.11 or newer is needed, $$($(PYTHON) -V) was found as \"$(PYTHON)\";" \
	    "name another: make PYTHON=..." >&2; exit 1; }
ifeq ($(TORCH),system)
	@$(PYTHON) -c 'from importlib.metadata import version; version("torch")' 2>/dev/null || { \
	  echo "error: TORCH=system, but \"$(PYTHON)\" has no torch" >&2; exit 1; }
endif
	@echo "Installing into .venv (torch: $(TORCH)); the first time takes some minutes"
	@$(PYTHON) -m venv $(if $(OTHER_STAMPS),--clear) $(if $(filter system,$(TORCH)),--system-site-packages) .venv
ifeq ($(TORCH),system)
	@$(BIN)/python -c 'from importlib.metadata import version; print("torch==" + version("torch"))' \
	  > .venv/constraints.txt 2>/dev/null || { \
	  echo "error: TORCH=system, but \"$(PYTHON)\" has its torch in a virtual environment;" \
	    "name the interpreter that this environment was made from, with torch installed there" >&2; exit 1; }
	@sed '/^# torch and what it needs/,$$d' constraints.txt >> .venv/constraints.txt
else
	@cp constraints.txt .venv/constraints.txt
endif
	@$(BIN)/python -m pip install --quiet --disable-pip-version-check -c .venv/constraints.txt -e '.[dev]'
	@echo '$(PYTHON)' > $@

train: $(STAMP) ## Run the main job: digits, two workers (ARGS="--set epochs=3")
	@$(BIN)/ray-dynbs train jobs/configs/digits.yaml $(ARGS)

test: lint types imports ## Lint, types, import contracts and all tests but the slow ones
	@$(BIN)/python -m pytest -m "not slow and not gpu" $(ARGS)

unit: $(STAMP) ## The fast part: tests that do not start Ray
	@$(BIN)/python -m pytest -m "not ray and not slow and not gpu" $(ARGS)

# pytest ends with 5 when it collected no test; that is fine here, and only here.
test-slow: $(STAMP) ## The slow tests
	@$(BIN)/python -m pytest -m "slow and not gpu" $(ARGS) || { \
	  code=$$?; test $$code -eq 5 && echo "no slow tests were found (pytest exit code 5)" || exit $$code; }

test-gpu: $(STAMP) ## The tests that need a CUDA device
	@$(BIN)/python -m pytest -m gpu $(ARGS)

lint: $(STAMP) ## Check style and formatting
	@$(BIN)/ruff check $(SOURCES)
	@$(BIN)/ruff format --check $(SOURCES)

types: $(STAMP) ## Check types
	@$(BIN)/mypy

imports: $(STAMP) ## Check the import contracts
	@$(BIN)/lint-imports --no-logo

format: $(STAMP) ## Fix style and formatting where that is safe
	@$(BIN)/ruff check --fix-only $(SOURCES)
	@$(BIN)/ruff format $(SOURCES)

bench: $(STAMP) ## Measure what a decision, an epoch and a trial's start cost (ARGS="--quick")
	@$(BIN)/python jobs/bench_overhead.py $(ARGS)
	@$(BIN)/python jobs/bench_tune.py $(ARGS)

hooks: $(STAMP) ## Run the checks on every commit and the fast tests on every push
	@$(BIN)/pre-commit install --hook-type pre-commit --hook-type pre-push

clean: ## Remove caches and build outputs (.venv and runs/ stay)
	@rm -rf build dist *.egg-info .mypy_cache .pytest_cache .ruff_cache .hypothesis .import_linter_cache
	@find jobs ray_dynbs tests -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true
