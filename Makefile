# The two commands of the README are `make demo` and `make test`; both install what is missing first.
PYTHON ?= python3
TORCH ?= torch==2.13.0
VENV := .venv
BIN := $(VENV)/bin
# Modules are compiled after the installation, on all processors at a time: those of the packages that most
# processes import, the others on their first import.
INSTALL := install --quiet --disable-pip-version-check --no-compile
RARELY := /(tests?|pandas|moto|pip|setuptools|mypyc?|pygments|fontTools|cfnlint|datasets|pyarrow|graphql|trl)/|/transformers/models/
TRACE ?= demo/trace.csv
DEMO_ARGS ?=
AOT_ARGS ?=
OLD_AOT_ARGS ?= --few
TEST_TIME := .cache/test_time
TEST_LOG := .cache/test_log
# Else each process of a run would compile the tests and what they import anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: venv demo test test-slow lint results-check format kernels-aot kernels-aot-3.6 clean

venv: $(VENV)/.installed

# torch first and pinned: a range would let another package pull in a build with CUDA libraries.
$(VENV)/.installed: setup.cfg setup.py pyproject.toml $(wildcard moe_lora/*/csrc/* moe_lora/*/*/csrc/*)
	@echo "Installing into $(VENV): downloads torch and builds C++ libraries, which takes some minutes."
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip $(INSTALL) --upgrade pip "setuptools>=74.1" wheel
	$(BIN)/pip $(INSTALL) "$(TORCH)"
	PYTHONWARNINGS=ignore $(BIN)/pip $(INSTALL) --no-build-isolation --editable ".[test]"
	@$(BIN)/python -m compileall -qq -j 0 -x "$(RARELY)" $(VENV)/lib moe_lora bench demo || true  # of packages, some are templates
	touch $@

demo: venv
	@echo "The demo takes about three minutes."
	@$(BIN)/python -m demo.run --trace "$(TRACE)" $(DEMO_ARGS)

# In four parts at a time: what mostly awaits other processes leaves cores to others.
# Inductor generates code in the test's process: workers would import torch anew.
CLUSTERS := tests/dist tests/config/test_cluster.py tests/kernels
SERVERS := tests/serve
MODELS := tests/engine tests/models
test: venv
	@echo "Running all tests that need no GPU. Last time here: $$(cat $(TEST_TIME) 2>/dev/null || echo not known yet)."
	@mkdir -p $(dir $(TEST_TIME)); start=$$(date +%s); export OMP_WAIT_POLICY=passive TORCHINDUCTOR_COMPILE_THREADS=1; \
	    beside() { $(BIN)/python -m pytest -p no:cacheprovider $$2 > $(TEST_LOG).$$1 2>&1 & pids="$$pids $$!"; }; \
	    trap 'kill $$pids; cat $(TEST_LOG).*; exit 1' INT TERM; \
	    beside clusters "$(CLUSTERS)"; beside servers "$(SERVERS)"; beside models "$(MODELS)"; \
	    $(BIN)/python -m pytest $(addprefix --ignore=,$(CLUSTERS) $(SERVERS) $(MODELS)); failed=$$?; \
	    for pid in $$pids; do wait $$pid || failed=1; done; \
	    for part in clusters servers models; do echo "$$part:"; cat $(TEST_LOG).$$part; done; \
	    [ $$failed = 0 ] && echo "$$(( ($$(date +%s) - start + 59) / 60 )) minutes" > $(TEST_TIME)

# Further cells of grids, what takes minutes, and more examples of properties: not in `make test`.  With Ray,
# 70 MB are downloaded.
test-slow: venv
	$(BIN)/pip $(INSTALL) "ray>=2.52"
	$(BIN)/python -m pytest -m "(slow or hypothesis) and not gpu" --timeout=1800 --hypothesis-profile=default

lint: venv results-check
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/codespell

# Make the tables of the pages again from their records: fails on a difference and on an invalid record.
results-check: venv
	$(BIN)/python -m bench.pages.blocks

# Compile every Triton kernel for sm_90a, without a GPU, and check what the compiler made of it.
# AOT_ARGS=--all: every variant, some minutes.
kernels-aot: venv
	$(BIN)/python -m bench.gpu.aot.aot $(AOT_ARGS)

# With an older Triton each kernel with each dtype and required instruction (OLD_AOT_ARGS= : as kernels-aot), in
# an environment of its own over this one's packages: 200 MB are downloaded.
OLD_TRITON := 3.6.0
OLD_VENV := .cache/triton-$(OLD_TRITON)
kernels-aot-3.6: venv
	test -d $$(echo $(OLD_VENV)/lib/python*/site-packages)/triton-$(OLD_TRITON).dist-info || { $(PYTHON) -m venv $(OLD_VENV) && \
	    $(BIN)/python -c "import torch; print(torch.__path__[0].removesuffix('/torch'))" \
	        > $$(echo $(OLD_VENV)/lib/python*/site-packages)/packages.pth && \
	    $(OLD_VENV)/bin/pip $(INSTALL) --no-deps triton==$(OLD_TRITON); }
	$(OLD_VENV)/bin/python -m bench.gpu.aot.aot $(OLD_AOT_ARGS)

format: venv
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf $(VENV) build *.egg-info moe_lora/*/*.so moe_lora/*/*/*.so
