# Everything a contributor runs. Needs python3, make and git; the rest goes into $(VENV).

PYTHON ?= python3
VENV ?= .venv
RANKS ?= 2
TIMES ?= 20
# CPU-only wheels on Linux: make test TORCH_INDEX=https://download.pytorch.org/whl/cpu
TORCH_INDEX ?=

BIN := $(VENV)/bin
PIP_INSTALL := pip install --quiet --disable-pip-version-check
TORCH_INSTALL := $(PIP_INSTALL) $(if $(TORCH_INDEX),--extra-index-url $(TORCH_INDEX))
PACKAGE_INSTALL := $(PIP_INSTALL) --no-deps --no-build-isolation --editable .

BENCH_VENV := .venv-bench
BENCH_BIN := $(BENCH_VENV)/bin

TORCH_VENV := .venv-torch-$(TORCH)
TORCH_BIN := $(TORCH_VENV)/bin

AUDIT_VENV := .venv-audit

INTEGRATIONS := .venv-integrations
SITE_PACKAGES := -c 'import sysconfig; print(sysconfig.get_path("purelib"))'

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-all test-quick chaos soak races golden golden-renew fuzz audit test-integrations test-torch lint types format \
        bench bench-compare bench-balance bench-plan bench-cuts bench-overhead bench-checking bench-consolidate \
        bench-checkpoint \
        clean

help: ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(VENV)/.installed ## train a small model on RANKS=2 processes of this machine
	OMP_NUM_THREADS=1 KINETO_LOG_LEVEL=99 $(BIN)/torchrun --standalone --nproc-per-node $(RANKS) examples/demo.py

test: lint types ## lint, types, all quick tests and the trainers: what CI runs
	$(BIN)/pytest
	$(MAKE) --no-print-directory test-integrations

test-all: lint types ## the same with the slow tests, and short trials with fresh seeds
	$(BIN)/pytest -m ""
	$(MAKE) --no-print-directory test-integrations
	$(BIN)/python trials/golden.py || [ $$? -eq 77 ]  # 77: the file is of another kind of machine
	$(MAKE) --no-print-directory soak MINUTES=2 SEED=
	$(MAKE) --no-print-directory races RUNS=20 SEED=
	$(MAKE) --no-print-directory chaos TRIALS=5 MACHINES=0 SEED=

test-quick: $(VENV)/.installed ## tests that need no processes, and one of each thing a job does; under two minutes
	$(BIN)/pytest -m "not slow and (not processes or smoke)"

soak: $(VENV)/.installed ## MINUTES=30 of random operations on RANKS=8 processes, compared with unsharded training
	$(BIN)/python trials/soak.py --minutes $(or $(MINUTES),30) $(if $(SEED),--seed $(SEED)) \
	    $(if $(filter command line environment,$(origin RANKS)),--ranks $(RANKS))

races: $(VENV)/.installed ## RUNS=200 seeded runs with random delays, overlap on: no bit changes
	$(BIN)/python trials/races.py --runs $(or $(RUNS),200) $(if $(SEED),--seed $(SEED))

golden: $(VENV)/.installed ## hashes and messages of short training runs against trials/golden.json (ONLY="4 ranks")
	$(BIN)/python trials/golden.py $(if $(ONLY),--only "$(ONLY)")

golden-renew: $(VENV)/.installed ## write trials/golden.json: in a commit that says why bits change
	$(BIN)/python trials/golden.py --write

chaos: $(VENV)/.installed ## kill ranks at TRIALS=55 chosen moments, and MACHINES=5: does the training go on as if nothing had been?
	$(BIN)/python trials/chaos.py --trials $(or $(TRIALS),55) $(if $(MACHINES),--machines $(MACHINES)) \
	    $(if $(SEED),--seed $(SEED))

fuzz: $(VENV)/.installed ## bad inputs of all kinds, other ones each time (TIMES=20)
	ONECOPY_FUZZ=$(TIMES) $(BIN)/pytest -m "" tests/project/test_fuzz_*.py

audit: $(AUDIT_VENV)/.installed ## known advisories of everything that is pinned; needs the network
	$(AUDIT_VENV)/bin/python trials/audit.py

test-integrations: $(INTEGRATIONS)/.installed ## the examples for trainers, with the real trainers
	$(INTEGRATIONS)/bin/python -m pytest tests/project/test_integrations.py

lint: $(VENV)/.installed ## ruff: rules and format
	$(BIN)/ruff check
	$(BIN)/ruff format --check

types: $(VENV)/.installed ## mypy --strict on the package
	$(BIN)/mypy

format: $(VENV)/.installed ## let ruff rewrite what it can
	$(BIN)/ruff check --fix
	$(BIN)/ruff format

test-torch: ## the tests (or TESTS=...) with another torch, TORCH=x.y.z, in a venv of its own
	$(if $(TORCH),,$(error say which torch, 2.6 or later: make test-torch TORCH=2.15.0))
	$(if $(filter 0.% 1.% $(foreach n,0 1 2 3 4 5,2.$n 2.$n.%),$(TORCH)),$(error torch $(TORCH) is too old: 2.6 or later is admitted))
	$(MAKE) --no-print-directory $(TORCH_VENV)/.installed
	$(TORCH_BIN)/pytest $(TESTS)

bench: $(BENCH_VENV)/.installed ## every peer and our modes in one run (FULL=1: all of it)
	$(BENCH_BIN)/python benchmarks/bench.py $(if $(FULL),--full)

bench-compare: $(BENCH_VENV)/.installed ## our modes at BASE=<git ref> and as they are now (RANKS="2 4" WIRE="loopback 1")
	$(if $(BASE),,$(error say with what to compare: make bench-compare BASE=main))
	$(BENCH_BIN)/python benchmarks/compare.py $(BASE) $(if $(WIRE),--wire $(WIRE)) \
	    $(if $(filter command line environment,$(origin RANKS)),--ranks $(RANKS))

bench-balance: $(VENV)/.installed ## how evenly plans load the ranks
	$(BIN)/python benchmarks/plan.py balance

bench-plan: $(VENV)/.installed ## how long planning takes
	$(BIN)/python benchmarks/plan.py time

bench-cuts: $(VENV)/.installed ## where tensors may be cut without changing bits
	$(BIN)/python benchmarks/plan.py cuts

bench-overhead: $(VENV)/.installed ## what a step costs beside the optimizer class
	$(BIN)/python benchmarks/step.py overhead

bench-checking: $(VENV)/.installed ## what check_every costs
	$(BIN)/python benchmarks/step.py checking

bench-consolidate: $(VENV)/.installed ## time and memory of collecting the full state
	$(BIN)/python benchmarks/state.py consolidate

bench-checkpoint: $(VENV)/.installed ## time and memory of writing and reading checkpoints
	$(BIN)/python benchmarks/state.py checkpoint

clean: ## remove caches and build leftovers, keep the virtual environments
	rm -rf build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis demo-report
	find onecopy tests trials examples benchmarks -name __pycache__ -prune -exec rm -rf {} + 2>/dev/null || true

# Torch first and alone; then the lock, in which nothing is resolved; then the package itself.
$(VENV)/.installed: requirements/torch.txt requirements/dev.txt pyproject.toml
	@echo "setting up $(VENV)"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/$(TORCH_INSTALL) -r requirements/torch.txt
	@$(BIN)/$(PIP_INSTALL) --no-deps -r requirements/dev.txt
	@$(BIN)/$(PACKAGE_INSTALL)
	@touch $@

# The peers look for torch when they are built, hence no isolation.
$(BENCH_VENV)/.installed: requirements/torch.txt requirements/bench-build.txt requirements/bench.txt
	@echo "setting up $(BENCH_VENV) with the peers"
	@$(PYTHON) -m venv $(BENCH_VENV)
	@$(BENCH_BIN)/$(TORCH_INSTALL) -r requirements/torch.txt
	@$(BENCH_BIN)/$(PIP_INSTALL) --no-deps -r requirements/bench-build.txt
	@$(BENCH_BIN)/$(PIP_INSTALL) --no-deps --no-build-isolation -r requirements/bench.txt
	@$(BENCH_BIN)/$(PACKAGE_INSTALL)
	@touch $@

# The trainers alone; a .pth file lets them see torch and the tools in $(VENV).
$(INTEGRATIONS)/.installed: $(VENV)/.installed requirements/integrations.txt
	@echo "setting up $(INTEGRATIONS)"
	@$(BIN)/python -m venv --clear --without-pip $(INTEGRATIONS)
	@echo "import site; site.addsitedir('$$($(BIN)/python $(SITE_PACKAGES))')" \
	    > "$$($(INTEGRATIONS)/bin/python $(SITE_PACKAGES))/tools.pth"
	@$(BIN)/pip --python $(INTEGRATIONS)/bin/python install --quiet --disable-pip-version-check \
	    --no-deps -r requirements/integrations.txt
	@touch $@

$(AUDIT_VENV)/.installed: requirements/audit.txt
	@echo "setting up $(AUDIT_VENV)"
	@$(PYTHON) -m venv $(AUDIT_VENV)
	@$(AUDIT_VENV)/bin/$(PIP_INSTALL) --no-deps -r requirements/audit.txt
	@touch $@

$(TORCH_VENV)/.installed: requirements/dev.txt pyproject.toml
	@echo "setting up $(TORCH_VENV)"
	@$(PYTHON) -m venv $(TORCH_VENV)
	@$(TORCH_BIN)/$(TORCH_INSTALL) torch==$(TORCH)
	@$(TORCH_BIN)/$(PIP_INSTALL) --no-deps -r requirements/dev.txt
	@$(TORCH_BIN)/$(PACKAGE_INSTALL)
	@touch $@
