# Each target does all its own set-up: the environment .venv, the dependencies, the build.
#   make demo    train a small transformer with torch's norms and with fused ones
#   make test    the tests, but for those of make stacks
#   make stacks  the tests of fused_norm.integrations, beside the stacks' own packages
#   make build   compile the extension into fused_norm/, so that the tree itself is importable
#   make budget  the size of the sources beside its limits and goals
#   make lint | bench | wheel | clean
# PYTHON=python3.13 and TORCH=2.9.1 choose versions. The variables of setup.py (FUSED_NORM_CUDA,
# TORCH_CUDA_ARCH_LIST, MAX_JOBS) are passed on.

SHELL := /bin/bash
.SHELLFLAGS := -eu -o pipefail -c
.DEFAULT_GOAL := build
.PHONY: build demo test stacks host-tests core budget lint bench wheel clean

# The first of these that runs and can make an environment (an installed name may be a dead shim of
# pyenv, whose own folder has the Python then).
ifndef PYTHON
PYENV_3.12 := $${PYENV_ROOT:-~/.pyenv}/versions/3.12.*/bin/python3.12
PYTHON := $(shell for python in python3.12 $(PYENV_3.12) python3.11 python3.13 python3.10; do \
    $$python -c 'import ensurepip, venv' >/dev/null 2>&1 && { echo $$python; break; }; done)
endif
TORCH ?= 2.11.0
PYTHON_VERSION := $(shell '$(PYTHON)' -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>&-)
ifeq ($(PYTHON_VERSION),)
$(error $(or $(PYTHON:%=% does not run),No Python 3.10 to 3.13 with venv and pip was found); \
    name one with PYTHON=/path/to/python)
endif
ifneq ($(filter 2.% 3.0 3.1 3.2 3.3 3.4 3.5 3.6 3.7 3.8 3.9,$(PYTHON_VERSION)),)
$(error $(PYTHON) is Python $(PYTHON_VERSION), but 3.10 or later is needed; \
    name one with PYTHON=/path/to/python)
endif

BIN := .venv/bin
ENV := .venv/.python-$(PYTHON_VERSION)-torch-$(TORCH)
# An environment holds its own path: one that came along with a moved tree is made anew.
MADE_IN := $(shell cat .venv/.made-by-make 2>&-)
ifneq ($(MADE_IN),)
ifneq ($(MADE_IN),$(CURDIR))
MOVED := yes
.PHONY: $(ENV)
endif
endif
IN_CI := $(filter true 1,$(CI))
NVCC := $(or $(wildcard $(CUDA_HOME)/bin/nvcc),$(shell command -v nvcc),\
    $(wildcard /usr/local/cuda/bin/nvcc))
# Where CI finds a CUDA toolkit it must be used, unless FUSED_NORM_CUDA=0 forbids it.
ifneq ($(and $(IN_CI),$(NVCC)),)
ifneq ($(FUSED_NORM_CUDA),0)
export FUSED_NORM_CUDA := 1
CI_KERNELS := core
endif
endif

# Python compiles the modules that are imported when they first are, and keeps them; to compile all
# that is installed would take a minute.
export PYTHONDONTWRITEBYTECODE :=

# An environment of other versions is made anew, unless it is someone else's.
define CHECK_ENV
from importlib.metadata import version
import sys
assert sys.version_info[:2] == tuple(map(int, "$(PYTHON_VERSION)".split(".")))
assert version("torch").split("+")[0] == "$(TORCH)".split("+")[0]
endef
export CHECK_ENV

$(ENV): pyproject.toml
	@if [ -e .venv ] && { [ -n "$(MOVED)" ] || ! $(BIN)/python -c "$$CHECK_ENV" 2>/dev/null; }; then \
	    if [ ! -e .venv/.made-by-make ]; then \
	        echo ".venv is not of this Makefile and has other versions than Python $(PYTHON_VERSION)" \
	            "and torch $(TORCH): remove it, or pass its PYTHON= and TORCH=" >&2; exit 1; \
	    fi; \
	    rm -rf .venv build; \
	fi
	@if [ ! -e .venv ]; then \
	    mkdir .venv; echo '$(CURDIR)' > .venv/.made-by-make; $(PYTHON) -m venv .venv; \
	fi
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile \
	    'torch==$(TORCH)' 'setuptools>=77' wheel ninja
	$(BIN)/python -c 'from setuptools.config.pyprojecttoml import read_configuration as read; \
	    extras = read("pyproject.toml", expand=False)["project"]["optional-dependencies"]; \
	    print(*sorted(set(sum(extras.values(), []))), sep="\n")' > .venv/requirements.txt
	$(BIN)/python -m pip install --disable-pip-version-check --no-compile --quiet \
	    -r .venv/requirements.txt
	@# The tree is on this environment's import path: scripts run from any folder.
	@echo '$(CURDIR)' > "$$($(BIN)/python -c 'import site; print(site.getsitepackages()[0])')/fused_norm_tree.pth"
	@rm -f .venv/.python-*
	@touch $@

build: $(ENV)
	$(BIN)/python setup.py build_ext --inplace

demo: build
	$(BIN)/python examples/train_gpt.py --norm rms
	$(BIN)/python examples/train_gpt.py --norm layer

# Memory that a test frees is kept for the next one: to have pages anew took a quarter of the time.
test: host-tests $(CI_KERNELS) build budget
	MALLOC_MMAP_THRESHOLD_=1000000000 MALLOC_TRIM_THRESHOLD_=2000000000 \
	    $(BIN)/python -m pytest -n auto --dist worksteal tests

# An environment in front of .venv: what is there already, torch above all, is not installed again.
STACKS := .venv/stacks
$(STACKS)/.made: $(ENV) tests/stacks/requirements.txt
	rm -rf $(STACKS)
	$(BIN)/python -m venv $(STACKS)
	@site='import site; print(site.getsitepackages()[0])'; \
	    { echo '$(CURDIR)'; $(BIN)/python -c "$$site"; } \
	    > "$$($(STACKS)/bin/python -c "$$site")/fused_norm_tree.pth"
	$(STACKS)/bin/python -m pip install --disable-pip-version-check --no-compile --quiet \
	    'torch==$(TORCH)' -r tests/stacks/requirements.txt
	$(STACKS)/bin/python -m pip install --disable-pip-version-check --no-compile --quiet --no-deps \
	    'torchtitan==0.3.0; python_version >= "3.11"'
	@touch $@

stacks: build $(STACKS)/.made
	FUSED_NORM_STACKS=1 $(STACKS)/bin/python -m pytest -n auto --dist worksteal tests/stacks

# Unit tests of the host logic of csrc/core; they need neither torch nor nvcc.
host-tests: $(ENV)
	$(BIN)/cmake -S . -B build/host -G Ninja '-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja' \
	    -DFUSED_NORM_CUDA=OFF -DFUSED_NORM_TESTS=$(if $(IN_CI),ON,AUTO)
	$(BIN)/cmake --build build/host
	$(BIN)/ctest --test-dir build/host --output-on-failure $(if $(IN_CI),--no-tests=error)

# The oldest and the newest supported chip of a data centre, compiled without torch; and, as it is
# only to see that they compile, without most optimizations where nvcc (12.9 on) can: five times as
# fast.
FAST = $(shell '$(NVCC)' --help | grep -om1 -e '--Ofast-compile')
core: $(ENV)
	CUDACXX='$(NVCC)' $(BIN)/cmake -S . -B build/core -G Ninja '-DCMAKE_MAKE_PROGRAM=$(CURDIR)/$(BIN)/ninja' \
	    -DFUSED_NORM_CUDA=ON -DFUSED_NORM_TESTS=OFF '-DCMAKE_CUDA_FLAGS=$(FAST:%=%=max)' \
	    '-DFUSED_NORM_CUDA_ARCHITECTURES=80-real;100-real'
	$(BIN)/cmake --build build/core --target all backward_ladder

budget: build
	$(BIN)/python tests/budget.py

lint: $(ENV)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	git ls-files --cached --others --exclude-standard 'csrc/*' 'tests/cpp/*' 'benchmarks/*' \
	    | grep -E '\.(h|cpp|cu|cuh)$$' | xargs $(BIN)/clang-format --dry-run --Werror

bench: build
	$(BIN)/python -m benchmarks all

wheel: $(ENV)
	@rm -rf build/lib.* build/bdist.*
	$(BIN)/python -m pip wheel --no-build-isolation --no-deps --wheel-dir dist .

clean:
	rm -rf build dist *.egg-info fused_norm/*.so
