# Everything runs in .venv, which scripts/setup_env.py makes and keeps at the versions of constraints.txt.
# ARGS is handed on: make test ARGS="-k scheduler", make lab ARGS="--no-browser --port 8899".

# The Python to make .venv with. One that is there already stays the one it was made with, unless PYTHON is given.
PYTHON ?= $(shell test -x .venv/bin/python && echo .venv/bin/python || echo python3)
RUN := .venv/bin/python -m

# Packages of another Python (ROS sets this, for one) have no place in .venv.
unexport PYTHONPATH PYTHONHOME

.DEFAULT_GOAL := help
.PHONY: help setup lab test lint format clean

help:
	@echo "make lab      open the course in JupyterLab      make lab ARGS='--no-browser --port 8899'"
	@echo "make test     run every test                     make test ARGS='-k scheduler'"
	@echo "make setup    only make .venv (the others do it where it is missing); PYTHON=python3.12 chooses the Python"
	@echo "make lint     ruff and mypy"
	@echo "make format   let ruff lay out the code"
	@echo "make clean    remove .venv and all caches"

setup:
	@command -v "$(PYTHON)" > /dev/null || { echo "$(PYTHON) is not here. Install Python 3.11 or newer (Debian, Ubuntu: \
	sudo apt install python3 python3-venv; macOS: brew install python@3.13), or name yours: make setup PYTHON=python3.13" >&2; exit 1; }
	@"$(PYTHON)" scripts/setup_env.py

# What a notebook starts with "!" comes from .venv. The printed address leads to the first chapter too, where no browser
# opens. JupyterLab refuses to run as root (in a container, say) unless told; it listens on localhost, behind a token.
lab: setup
	@PATH="$(CURDIR)/.venv/bin:$$PATH" $(RUN) jupyterlab --ServerApp.root_dir="$(CURDIR)" \
	    --LabApp.default_url=/lab/tree/chapters/00_start_here.ipynb \
	    $$(test "$$(id -u)" -ne 0 || echo --allow-root) $(ARGS)

# Two tests at a time: a test keeps 1.4 cores busy. The tests of a file share what takes long to make, so they stay together.
test: setup
	@$(RUN) pytest -n 2 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: setup
	@$(RUN) ruff check
	@$(RUN) ruff format --check
	@$(RUN) mypy

format: setup
	@$(RUN) ruff check --fix
	@$(RUN) ruff format

clean:
	rm -rf .venv .setup.lock .pytest_cache .mypy_cache .ruff_cache .hypothesis build dist *.egg-info
	find . -name .git -prune -o \( -name __pycache__ -o -name .ipynb_checkpoints \) -prune -exec rm -rf {} +
