# Every target sets up what it needs in .venv first, once. `make help` lists the targets.

SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
PINS := constraints.txt
OLDEST := .venv-oldest
NEWEST := .venv-newest
pin = $(shell grep '^$(1)==' $(PINS))
PIP = $(BIN)/python -m pip install --disable-pip-version-check -c $(PINS)

# Of pip's output, show the downloads that take time and how much is installed; errors pass through.
PROGRESS = awk '/(Downloading|Using cached) .*MB\)/ { print "  " $$2, $$3, $$4; fflush() } \
	/^Installing collected packages/ && NF > 4 { print "  installing", NF - 3, "packages"; fflush() }'

# Tests start processes of their own: few test workers, and one thread in each process. There are more
# workers than the two processors of the smallest machine, because a third of a test's time is waiting.
WORKERS ?= 4
ARGS ?=
PYTEST = -m pytest -n $(WORKERS) --no-loadscope-reorder
test test-all test-oldest test-newest: export OMP_NUM_THREADS = 1
# What is imported is compiled once, and kept.
export PYTHONDONTWRITEBYTECODE =

.PHONY: help demo test test-all test-oldest test-newest test-cuda bench-cuda check format docs compile bench chaos interrupts mutate mutants fuzz clean

help: ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "make %-11s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

demo: $(VENV)/.demo ## collect 10,000 frames of Pendulum and plot the returns (ARGS="--workers 2")
	@rm -rf runs/demo
	$(BIN)/trawl collect Pendulum-v1 --frames 10000 --out runs/demo $(ARGS)
	$(BIN)/trawl show runs/demo --plot runs/demo/returns.png
	@echo "The plot: runs/demo/returns.png"

test: $(VENV)/.dev ## run the tests (ARGS="-k name" for some of them, WORKERS=0 for one process)
	$(BIN)/python $(PYTEST) -m "not long" $(ARGS)

test-all: $(VENV)/.dev ## run the tests, and those that take long
	$(BIN)/python $(PYTEST) $(ARGS)

test-oldest: $(OLDEST)/.test ## run the tests with the lowest versions in pyproject.toml (but for torch)
	$(OLDEST)/bin/python $(PYTEST) $(ARGS)

test-newest: $(NEWEST)/.test ## compare with the newest TorchRL, and run the tests with TorchRL's classes
	$(NEWEST)/bin/python tests/parity/compare.py
	$(NEWEST)/bin/python $(PYTEST) tests/parity tests/interop tests/collectors/test_torchrl_parity.py \
		$(ARGS)

# On a machine with a GPU nothing is set up: its Python has PyTorch for its GPU, and perhaps no network.
DEVICE ?= cuda:0
CUDA_PYTHON = $(if $(wildcard $(BIN)/python),$(BIN)/python,$(PYTHON))
test-cuda bench-cuda: export DEVICE := $(DEVICE)

test-cuda: ## run the tests of a GPU with this machine's Python (DEVICE=cpu: in miniature)
	$(CUDA_PYTHON) tests/cuda/run.py $(ARGS)

bench-cuda: ## measure collection on a GPU with this machine's Python (DEVICE=cpu: in miniature)
	$(CUDA_PYTHON) tests/cuda/needs.py
	PYTHONPATH=src:$$PYTHONPATH OMP_NUM_THREADS=1 $(CUDA_PYTHON) benchmarks/gpu.py --device $(DEVICE) \
		$(if $(filter cpu,$(DEVICE)),--quick) $(ARGS)

check: $(VENV)/.dev ## lint, formatting, types
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

format: $(VENV)/.dev ## sort the imports, mend what ruff can mend, format
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

docs: $(VENV)/.dev ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

compile: $(VENV)/.dev ## import the tests, which compiles them and the libraries that they need
	@echo "Importing the tests"
	@said=$$($(BIN)/python -m pytest --collect-only -q -q) || { echo "$$said" | tail -n 50; exit 1; }

bench: $(VENV)/.bench ## run the benchmarks (ARGS="..." reach benchmarks/run.py)
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/run.py $(ARGS)

chaos: $(VENV)/.dev ## kill workers at random for two minutes, and check every frame
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/chaos.py $(ARGS)

interrupts: $(VENV)/.dev ## press Ctrl-C 50 times for each kind of collector, and check every frame
	OMP_NUM_THREADS=1 $(BIN)/python benchmarks/interrupts.py $(ARGS)

SECONDS ?= 300

mutate: $(VENV)/.dev ## load states with random changes for SECONDS=300, and check every collector
	OMP_NUM_THREADS=1 $(BIN)/python tests/collectors/mutations.py --seconds $(SECONDS) $(ARGS)

mutants: $(VENV)/.dev ## break a module in small ways, and print which tests notice (ARGS="MODULE --tests FILES")
	OMP_NUM_THREADS=1 $(BIN)/python tests/mutants.py $(ARGS)

fuzz: $(VENV)/.dev ## compare collectors with a plain loop in random cases for SECONDS=300
	OMP_NUM_THREADS=1 $(BIN)/python tests/oracle/fuzz.py --seconds $(SECONDS) $(ARGS)

clean: ## remove what was built (not .venv, .venv-oldest and .venv-newest, and not your runs)
	rm -rf site dist build runs/demo .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -type d -not -path './$(VENV)*/*' -prune -exec rm -rf {} +

# The set-up, one stamp per step; each step adds to the one before. torch comes first and by its exact
# pin: a looser request may fetch gigabytes of CUDA libraries.
$(VENV)/.torch: $(PINS)
	@$(PYTHON) -c 'import sys; v = sys.version_info; \
	v >= (3, 11) or sys.exit("The pins in $(PINS) need Python 3.11 or newer, and $(PYTHON) is %d.%d: try `make PYTHON=python3.11 ...`" % v[:2])'
	@echo "Setting up $(VENV): torch (once; all of it takes a minute or two)"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) --quiet $(call pin,pip)
	@$(PIP) $(call pin,torch) | $(PROGRESS)
	@touch $@

$(VENV)/.demo: $(VENV)/.torch pyproject.toml
	@echo "Setting up $(VENV): trawl and what it needs"
	@$(PIP) --build-constraint $(PINS) -e '.[plot]' | $(PROGRESS)
	@touch $@

$(VENV)/.dev: $(VENV)/.demo
	@echo "Setting up $(VENV): tests, checks, documentation"
	@$(PIP) --build-constraint $(PINS) -e '.[all]' --group test --group lint --group docs | $(PROGRESS)
	@touch $@

# Older versions of torch are kept as builds with CUDA alone, so it is the pinned one here as well.
# The lowest versions are what uv finds, in an environment of their own.
$(OLDEST)/.test: $(PINS) pyproject.toml
	@echo "Setting up $(OLDEST): the lowest versions"
	@$(PYTHON) -m venv $(OLDEST)
	@$(OLDEST)/bin/python -m pip install --disable-pip-version-check -c $(PINS) \
		$(call pin,torch) uv | $(PROGRESS)
	@$(OLDEST)/bin/uv pip install --quiet --python $(OLDEST)/bin/python --resolution lowest-direct \
		--override <(echo '$(call pin,torch)') --group test --group lint \
		-e '.[all]'
	@touch $@

# The newest TorchRL is a release or, if there is none since 0.15, the newest nightly build. That asks
# for a nightly tensordict, and gets the newest release of it.
NEWEST_PIP = $(NEWEST)/bin/python -m pip install --disable-pip-version-check -c $(NEWEST)/pins.txt

$(NEWEST)/.test: $(PINS) pyproject.toml
	@echo "Setting up $(NEWEST): the newest TorchRL"
	@$(PYTHON) -m venv $(NEWEST)
	@grep -vE '^(torchrl|tensordict)==' $(PINS) > $(NEWEST)/pins.txt
	@$(NEWEST_PIP) --quiet $(call pin,pip)
	@$(NEWEST_PIP) $(call pin,torch) | $(PROGRESS)
	@$(NEWEST_PIP) --build-constraint $(PINS) -e '.[all]' --group test | $(PROGRESS)
	@if $(NEWEST_PIP) --quiet --dry-run --no-deps 'torchrl>=0.15' 2> /dev/null; then \
		$(NEWEST_PIP) --quiet --upgrade 'torchrl>=0.15' 'tensordict>=0.15'; \
	else \
		$(NEWEST)/bin/python -m pip uninstall --quiet --yes torchrl; \
		$(NEWEST_PIP) --quiet --upgrade 'tensordict>=0.15'; \
		$(NEWEST_PIP) --quiet --no-deps torchrl-nightly; \
	fi
	@touch $@

$(VENV)/.bench: $(VENV)/.dev
	@echo "Setting up $(VENV): benchmarks"
	@$(PIP) --group bench | $(PROGRESS)
	@touch $@
