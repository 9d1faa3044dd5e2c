# Every target first installs what it needs into $(VENV). Existing installations are reused.
#
#   make train ARGS="--size 124m --steps 5"     make test ARGS="-k partition"
#   make train EXAMPLE=bert
#   make train DEVICES=8
#   make test PYTHON=python3.13 VENV=.venv-3.13
#   make test SLOW=1 TEST_EXTRAS=test,models
#   make sanitize CXX=clang++

PYTHON ?= $(shell tools/pythons | head -n 1)
VENV ?= .venv
ARGS ?=
# Extras to install for the tests; `models` adds the tests of third-party models.
TEST_EXTRAS ?= test
# Any value also runs the tests marked as slow: training runs of the examples, and repetitions in other dtypes.
SLOW ?=
# The example that `make train` trains.
EXAMPLE ?= gpt2
# Number of devices that share each batch; without an accelerator, virtual CPU devices.
DEVICES ?=
# Number of test processes; each takes about 2 GB of memory.
JOBS ?= 2

# On a machine with an NVIDIA GPU, the example runs on it.
TRAIN_EXTRAS := $(shell nvidia-smi -L >/dev/null 2>&1 && echo examples,cuda13 || echo examples)

# Python compiles modules when it first imports them, which few of an environment's ten thousand are.
PIP_INSTALL := $(VENV)/bin/python -m pip install --quiet --disable-pip-version-check --no-compile

# Changes to these need a new installation, even an editable one. So do modules that move: it knows where they were.
NATIVE_SOURCES := $(shell find xla_ffi -type f)
MODULES := $(VENV)/modules-$(shell find jaxferry -name '*.py' | LC_ALL=C sort | cksum | cut -d ' ' -f 1)

.DELETE_ON_ERROR:
.PHONY: help train test attack docs sanitize lint format
.PHONY: install-train install-test install-dev install-all clean

help:
	@echo "make train | test | attack | docs | sanitize | lint | format | clean   (README.md, CONTRIBUTING.md)"

train: install-train
	@$(VENV)/bin/python examples/$(EXAMPLE)/train.py $(if $(DEVICES),--devices $(DEVICES)) $(ARGS)

test: install-test
	@$(VENV)/bin/python -m pytest -n $(JOBS) --dist worksteal $(if $(SLOW),,-m "not slow") $(ARGS)

attack: install-test
	@$(VENV)/bin/python tests/attack/campaign.py --seconds $(or $(SECONDS),600) --sanitize $(ARGS)

docs: $(VENV)/installed-docs
	@NO_MKDOCS_2_WARNING=1 $(VENV)/bin/python -m mkdocs build --strict

sanitize: install-test
	@PYTHON=$(VENV)/bin/python tools/sanitize $(ARGS)
	@PYTHON=$(VENV)/bin/python tools/sanitize_steps

lint: install-dev
	$(VENV)/bin/ruff check .
	$(VENV)/bin/ruff format --check .
	$(VENV)/bin/mypy
	$(VENV)/bin/python -m pytest -q tests/test_imports.py
	$(VENV)/bin/pre-commit validate-config

format: install-dev
	$(VENV)/bin/ruff check --fix .
	$(VENV)/bin/ruff format .

install-train: $(VENV)/installed-train
install-test: $(VENV)/installed-test $(VENV)/gpu-packages
install-dev: $(VENV)/installed-dev

# Installs everything for lint, types and tests into one environment, with one build instead of two.
install-all: $(MODULES) | $(VENV)/bin/python
	@echo "Installing jaxferry[dev,$(TEST_EXTRAS)] into $(VENV): the first time takes a few minutes"
	@$(PIP_INSTALL) --editable ".[dev,$(TEST_EXTRAS)]"
	@touch $(VENV)/installed-dev $(VENV)/installed-test

$(VENV)/installed-train: EXTRAS = $(TRAIN_EXTRAS)
$(VENV)/installed-test: EXTRAS = $(TEST_EXTRAS)
$(VENV)/installed-dev: EXTRAS = dev
$(VENV)/installed-docs: EXTRAS = docs

$(MODULES): | $(VENV)/bin/python
	@rm -f $(VENV)/modules-*
	@touch $@

# A stamp is newer than pyproject.toml, the native sources and the set of modules while the installation is up to date.
$(VENV)/installed-%: pyproject.toml $(NATIVE_SOURCES) $(MODULES) | $(VENV)/bin/python
	@echo "Installing jaxferry[$(EXTRAS)] into $(VENV): the first time takes a few minutes"
	@$(PIP_INSTALL) --editable ".[$(EXTRAS)]"
	@touch $@

# Compilers for a GPU that run on any machine, for tests of compiled programs.
$(VENV)/gpu-packages: $(VENV)/installed-test tools/gpu-packages
	@tools/gpu-packages $(VENV)
	@touch $@

$(VENV)/bin/python:
	@test -n "$(PYTHON)" || { echo "error: found no Python 3.11 or later that can make a virtual environment;" \
	  "install python3 and python3-venv, or name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@echo "Creating $(VENV) with $(PYTHON)"
	@$(PYTHON) -m venv "$(VENV)"

clean:
	rm -rf .venv .venv-* build dist site *.egg-info .hypothesis .mypy_cache .pytest_cache .ruff_cache
	rm -f jaxferry/native/*.so
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
