# Thin names over real commands. `make demo` and `make test` do all their own set-up.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := help
.DELETE_ON_ERROR:

PYTHON ?= python3
VENV   ?= .venv
BIN    := $(VENV)/bin
# Used only where no PyTorch is importable by $(PYTHON): a site's ROCm or CUDA build is never replaced.
TORCH  ?= torch==2.13.0
DEMO   ?= demo

.PHONY: help setup demo test lint cluster-packages cluster bench chaos clean

help: ## show this list
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1\t/' | expand -t 28

setup: $(VENV)/.ready ## virtual environment with the project and all it needs

$(VENV)/.ready: setup.cfg pyproject.toml
	@if ! $(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10))'; then \
	  echo "error: $(PYTHON) is older than Python 3.10. Name a newer one: make $(or $(MAKECMDGOALS),setup) PYTHON=python3.11" >&2; exit 2; fi
	@if [ ! -x $(BIN)/python ]; then \
	  if $(PYTHON) -c 'import torch' 2>/dev/null; then \
	    echo "using the PyTorch that $(PYTHON) already has"; $(PYTHON) -m venv --system-site-packages $(VENV); \
	  else $(PYTHON) -m venv $(VENV); fi; fi
	@$(BIN)/python -c 'import torch' 2>/dev/null || { echo "installing $(TORCH) (another build: make TORCH=...)"; $(BIN)/pip install --quiet --disable-pip-version-check $(TORCH); }
	@echo "installing hpcjobs and what it needs"
	@$(BIN)/pip install --quiet --disable-pip-version-check --editable '.[train,plots,dashboard,amd,dev]'
	@touch $@

demo: setup ## a small study here, from rendered data to a report (no Slurm, GPU or root)
	rm -rf $(DEMO)/study
	$(BIN)/python -m autospeed_model.render $(DEMO)/openlane --segments 12 --frames 40
	$(BIN)/python -m autospeed_model.prepare $(DEMO)/openlane $(DEMO)/data --height 96 --width 192
	$(BIN)/python -m hpcjobs.submit --study configs/studies/demo.yaml --data $(DEMO)/data --folder $(DEMO)/study --workers 2
	$(BIN)/python -m hpcjobs.report $(DEMO)/study

test: setup cluster-packages ## ruff, mypy, shellcheck and pytest; as root on Debian the cluster tests too
	@$(MAKE) --no-print-directory lint
	$(BIN)/python -m pytest -n 3 --dist loadfile

lint: setup ## ruff, mypy and shellcheck alone
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	git ls-files -z -- '*.sh' .ci/run 'slurm/*.d/*' slurm/study.sbatch | xargs -0 -r $(BIN)/shellcheck --shell=bash

cluster-packages:
	@tests/cluster/install-packages.sh

cluster: setup cluster-packages ## start the emulated Slurm cluster of the tests and keep it until Ctrl-C
	$(BIN)/python -m tests.cluster.emulator

bench: setup ## what our host path and our journal cost beside the usual ones, as ratios
	$(BIN)/python benchmarks/host_path.py
	$(BIN)/python benchmarks/journal.py --short

chaos: setup cluster-packages ## 500 faults in studies on the emulated cluster: nothing may be lost (half an hour)
	$(BIN)/python -m tests.cluster.chaos.run

clean: ## remove the demo's folder (the virtual environment stays)
	rm -rf $(DEMO)
