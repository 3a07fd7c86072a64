# `make` lists the targets. Each one makes the environment first, if there is none or pyproject.toml or
# constraints.txt have changed; nothing is installed outside .venv.

PYTHON ?= python3
NPROC ?= 8

VENV := .venv
BIN := $(VENV)/bin
# Written last: an installation that was interrupted leaves none, and the next one starts from nothing.
STAMP := $(VENV)/.installed
# One thread a process: the ranks share the cores, and the order of arithmetic stays the same.
RUN := OMP_NUM_THREADS=1
# Two files of tests at a time: most need one core, those on several ranks two.
PARALLEL := -n 2 --dist loadfile

.DEFAULT_GOAL := help
.PHONY: help venv train test test-full lint bench

help: ## this list
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  %-10s %s\n", $$1, $$2 }' $(MAKEFILE_LIST)

venv: $(STAMP) ## the environment in .venv, with the versions of constraints.txt

# A plain Debian has no ensurepip, and a pip that may only install into an environment: `pip --python` (22.3 or
# newer) does that. Where pip is older or missing, venv must bring its own. The pinned pip then does the rest.
$(STAMP): pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(None if sys.version_info >= (3, 10) else \
	  "Python 3.10 or newer is needed, not %s: make PYTHON=python3.12" % sys.version.split()[0])'
	@test -f $@ \
	  || { $(PYTHON) -m venv --clear --without-pip $(VENV) \
	       && $(PYTHON) -m pip --python $(BIN)/python install -q -c constraints.txt pip; } \
	  || $(PYTHON) -m venv --clear $(VENV) \
	  || { echo 'Neither pip (22.3 or newer) nor ensurepip is here: apt install python3-pip' >&2; exit 1; }
	@rm -f $@
	@echo 'Installing into $(VENV): a minute with a CPU build of torch, several with the CUDA build'
	@$(BIN)/python -m pip install -q -c constraints.txt pip
	@PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -c constraints.txt --build-constraint constraints.txt -e '.[train,hf,deepspeed,report,wandb,dev]'
	@touch $@

train: ARGS ?= +ckpt=selective
train: $(STAMP) ## train the small model on 8 ranks; NPROC=2 ARGS="+ckpt=full engine=ddp" for another run
	$(RUN) $(BIN)/torchrun --nproc_per_node $(NPROC) launch/train.py $(ARGS)

test: $(STAMP) ## the fast tier of the tests; ARGS="-k name" for a part of it
	$(RUN) $(BIN)/python -m pytest $(PARALLEL) $(ARGS)

test-full: $(STAMP) ## every matrix, resumable; outcomes go to docs/verification.json and docs/support.md
	$(RUN) $(BIN)/python -m pytest --full --record=docs/verification.json $(ARGS); passed=$$?; \
	  $(RUN) $(BIN)/python -m tests.support_page > docs/support.md && exit $$passed

lint: $(STAMP) ## style, formatting, types and the floors of the package
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

bench: $(STAMP) ## every benchmark
	@for benchmark in benchmarks/[a-z]*.py; do echo "$$benchmark" && $(RUN) $(BIN)/python $$benchmark || exit 1; done
