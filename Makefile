# The two commands of the README are `make demo` and `make test`; both install what is missing first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
TRACE ?= demo/trace.csv
DEMO_ARGS ?=
TEST_TIME := .cache/test_time

.PHONY: venv demo test lint format kernels-aot clean

venv: $(VENV)/.installed

# torch first and pinned: a range would let another package pull in a build with CUDA libraries.
$(VENV)/.installed: setup.cfg setup.py pyproject.toml $(wildcard moe_lora/*/csrc/* moe_lora/*/*/csrc/*)
	@echo "Installing into $(VENV): downloads torch and builds two C++ libraries, which takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --disable-pip-version-check --upgrade pip "setuptools>=74.1" wheel
	$(BIN)/pip install --quiet --disable-pip-version-check "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/pip install --quiet --disable-pip-version-check --no-build-isolation --editable ".[test]"
	touch $@

demo: venv
	@echo "The demo takes about three minutes."
	@$(BIN)/python -m demo.run --trace "$(TRACE)" $(DEMO_ARGS)

test: venv
	@echo "Running all tests that need no GPU. Last time here: $$(cat $(TEST_TIME) 2>/dev/null || echo not known yet)."
	@mkdir -p $(dir $(TEST_TIME)); start=$$(date +%s); \
	    $(BIN)/python -m pytest && echo "$$(( ($$(date +%s) - start + 59) / 60 )) minutes" > $(TEST_TIME)

lint: venv
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Compile every Triton kernel for sm_90a, without a GPU, and check what the compiler made of it.
kernels-aot: venv
	$(BIN)/python -m moe_lora.kernels.triton.aot

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info moe_lora/*/*.so moe_lora/*/*/*.so
