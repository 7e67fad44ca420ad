# detlab's tasks. Each works alone in a fresh clone: what it needs is set up first, once.
#
#   PYTHON=...          the Python (3.11 or newer) that the virtual environment is made from
#   TORCH_PIP_ARGS=...  more arguments for installing torch, such as the index that has the build for your GPU
#   TEST_WORKERS=...    test files run at a time, a process with one thread for each (default 2; 0: in one process)
#   LOCK_ARGS=...       more arguments for `make lock`, such as --upgrade

SHELL := /bin/bash
.DEFAULT_GOAL := help
.PHONY: help venv lab demo check test evidence workshop lock clean

TORCH_VERSION := 2.13.0
PYTHON ?=
TORCH_PIP_ARGS ?=
LOCK_ARGS ?=
NOTEBOOK_CELL_TIMEOUT ?= 300
TEST_WORKERS ?= 2

VENV := .venv
VENV_PYTHON := $(VENV)/bin/python
STAMP := $(VENV)/.detlab-is-set-up

# OpenMP's idle workers would otherwise spin and starve each other where there are more threads than cores.
export GOMP_SPINCOUNT := 0
# The hub is not asked during tests, and one thread is where every machine can start from.
TEST_ENV := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1
WORKERS := --numprocesses=$(TEST_WORKERS) --dist=loadfile

help: ## list the targets (the default)
	@awk -F ':.*## ' '/^[a-z]+:.*## / { printf "  make %-10s %s\n", $$1, $$2 }' Makefile

venv: $(STAMP) ## set up .venv from the lock; does nothing the second time

# An interrupted run goes on where it stopped: packages already installed are kept, one cut short (no RECORD) is not.
$(STAMP): requirements.lock pyproject.toml
	@set -euo pipefail; \
	if ! $(VENV_PYTHON) -c 'import sys, pip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then \
		python=; \
		if [ -n "$${PYTHON:-}" ]; then candidates=("$$PYTHON"); \
		else candidates=(python3.13 python3.12 python3.11 python3); fi; \
		for candidate in "$${candidates[@]}"; do \
			if "$$candidate" -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; \
			then python=$$candidate; break; fi; \
		done; \
		if [ -z "$$python" ]; then \
			echo "make venv: no Python >= 3.11 with the modules venv and ensurepip; tried: $${candidates[*]}." >&2; \
			echo "Install one (on Debian: apt-get install python3 python3-venv) or name one: make venv PYTHON=/path/to/python3" >&2; \
			exit 1; \
		fi; \
		echo "Making $(VENV) with $$("$$python" --version)"; \
		"$$python" -m venv --clear $(VENV); \
	fi; \
	for info in $(VENV)/lib/python3*/site-packages/*.dist-info; do \
		if [ -d "$$info" ] && [ ! -f "$$info/RECORD" ]; then rm -rf "$$info"; fi; \
	done; \
	$(VENV_PYTHON) -m pip install $(TORCH_PIP_ARGS) torch==$(TORCH_VERSION); \
	$(VENV_PYTHON) -m pip install --no-deps --require-hashes -r requirements.lock; \
	$(VENV_PYTHON) -m pip install --no-deps --no-build-isolation -e .; \
	touch $(STAMP)

lab: $(STAMP) ## open the notebooks in JupyterLab
	$(VENV_PYTHON) -m detlab lab

demo: $(STAMP) ## find one divergence in the terminal; writes report.html
	$(VENV_PYTHON) -m detlab demo

check: $(STAMP) ## lint, types and the fast tests
	@failed=; \
	$(VENV_PYTHON) -m ruff check . || failed="$$failed ruff"; \
	$(VENV_PYTHON) -m mypy || failed="$$failed mypy"; \
	$(TEST_ENV) $(VENV_PYTHON) -m pytest $(WORKERS) --doctest-modules -m "not slow and not browser" detlab tests || failed="$$failed tests"; \
	if [ -n "$$failed" ]; then echo "make check: failed:$$failed" >&2; exit 1; fi

test: $(STAMP) ## everything: lint, types, all tests, every notebook
	@failed=; \
	$(VENV_PYTHON) -m ruff check . || failed="$$failed ruff"; \
	$(VENV_PYTHON) -m mypy || failed="$$failed mypy"; \
	$(TEST_ENV) $(VENV_PYTHON) -m pytest $(WORKERS) --doctest-modules detlab tests || failed="$$failed tests"; \
	if compgen -G "notebooks/*.ipynb" >/dev/null; then \
		$(TEST_ENV) $(VENV_PYTHON) -m pytest --nbval-lax --nbval-current-env \
			--nbval-cell-timeout=$(NOTEBOOK_CELL_TIMEOUT) notebooks/*.ipynb || failed="$$failed notebooks"; \
	else echo "make test: notebooks/ holds no notebook"; fi; \
	if [ -n "$$failed" ]; then echo "make test: failed:$$failed" >&2; exit 1; fi

evidence: $(STAMP) ## run every benchmark and print the README's tables
	@failed=; \
	for script in benchmarks/[a-z]*.py; do \
		[ -e "$$script" ] || continue; \
		echo "== $$script"; $(VENV_PYTHON) "$$script" || failed="$$failed $$script"; \
	done; \
	if [ -n "$$failed" ]; then echo "make evidence: failed:$$failed" >&2; exit 1; fi

workshop: $(STAMP) ## student notebooks and solutions, in build/workshop
	$(VENV_PYTHON) tools/make_workshop.py

lock: $(STAMP) ## resolve requirements.lock anew; pins that still fit are kept
	$(VENV_PYTHON) tools/refresh_lock.py $(LOCK_ARGS)

clean: ## remove caches and generated files; .venv, the lock and your traces stay
	rm -rf .mypy_cache .pytest_cache .ruff_cache build dist ./*.egg-info report.html
	find . -path ./$(VENV) -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -type d -exec rm -rf {} +
