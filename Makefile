# make setup       create .venv with all dependencies (does nothing if it is up to date)
# make demo        install what the demo needs, prepare a corpus, train three small models at length 128, evaluate them
# make test        the quick tests (CI also runs those marked `ci`; run the slow ones with pytest -m slow)
# make test-ci     the tests marked `ci`, which take longer
# make test-unit   unit tests only; they start no processes
# make test-latest tests of what depends on other packages, with their newest allowed versions in .venv-latest
# make lock        renew requirements/lock.txt, the versions that all other targets install; needs uv
# make test-hosts  training on two hosts emulated on this machine; as root, this installs the Debian packages it needs
# make lint        ruff, mypy, import-linter and the documentation without warnings
# make docs        build the documentation site in site/; installs nothing, so it needs make setup once
# make bench       benchmarks on this CPU: ratios measured in one run
# make bench-gpu   benchmarks that need an NVIDIA GPU (PYTHON=... must have PyTorch with CUDA)
# make pictures    train every trainable method with the demo's settings (if missing) and redraw docs/pictures
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
# On Linux, PyTorch's wheels on PyPI contain CUDA: 2.7 GB to download, 4.8 GB installed. Without an NVIDIA GPU, take those
# of PyTorch's CPU index, whose versions (2.13.0+cpu) pip prefers. `make demo TORCH_OPTIONS=` takes what pip is
# configured for.
TORCH_OPTIONS ?= $(if $(shell command -v nvidia-smi),,--extra-index-url https://download.pytorch.org/whl/cpu)
# If uv is installed, it is used. It finds the build of PyTorch for this machine itself.
UV := $(shell command -v uv)
# The versions to install. Empty: the newest that the other files in requirements/ allow.
CONSTRAINTS ?= --constraint requirements/lock.txt
BUILD_TOOLS := "setuptools>=77" wheel
# Packages are installed without bytecode. Even if the user's environment says otherwise, Python must save what it
# compiles: otherwise every process starts slowly.
export PYTHONDONTWRITEBYTECODE :=
TEST_WORKERS ?= 2
MARKS = not slow and not ci
PYTEST = $(BIN)/python -m pytest -q -m "$(MARKS)" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-ci test-unit test-latest test-oldest lock test-hosts lint docs bench bench-gpu pictures clean

setup: $(VENV)/.installed

ifdef UV
CREATE := $(UV) venv --quiet --allow-existing --python $(PYTHON) $(VENV)
INSTALL := $(UV) pip install --quiet --python $(VENV) $(CONSTRAINTS)
INSTALL_TORCH := $(INSTALL) $(if $(TORCH_OPTIONS),--torch-backend=auto)
else
# By default, pip compiles all modules of all packages. For the demo, that takes longer than to compile what it imports.
CREATE := $(PYTHON) -m venv $(VENV)
INSTALL := $(BIN)/python -m pip install --quiet --no-compile --disable-pip-version-check $(CONSTRAINTS)
# The next step installs the dependencies of torch, from PyPI.
INSTALL_TORCH := $(INSTALL) --no-deps $(TORCH_OPTIONS)
endif

$(VENV)/.torch:
	@echo "creating $(VENV) and installing $(TORCH)"
	@$(CREATE)
	@$(INSTALL_TORCH) "$(TORCH)"
	@touch $@

$(VENV)/.demo: $(VENV)/.torch $(addprefix requirements/,core.txt train.txt demo.txt lock.txt)
	@echo "installing DeepSpeed, megatron-core and the other packages in requirements/demo.txt"
	@DS_BUILD_OPS=0 $(INSTALL) $(BUILD_TOOLS) -r requirements/demo.txt
	@touch $@

$(VENV)/.installed: $(VENV)/.demo $(wildcard requirements/*.txt)
	@echo "installing the packages for tests and lint in requirements/dev.txt"
	@DS_BUILD_OPS=0 $(INSTALL) -r requirements/dev.txt
	@echo "installing the command kerple"
	@$(INSTALL) --no-build-isolation --no-deps --editable .
	@echo "compiling the packages to bytecode"
	@$(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true  # some packages contain invalid modules: templates and tests
	@touch $@

demo: $(VENV)/.demo
	$(BIN)/python prepare_data.py python_stdlib
	$(BIN)/python tools/demo.py

test: setup
	$(PYTEST) $(TESTS)

test-ci: MARKS = ci and not slow
test-ci: test

test-unit: setup
	$(PYTEST) tests/unit

# The tests of exports, evaluation, the configuration and reports. Then, those of kerple.transformers with the oldest
# version that it supports.
LATEST_TESTS := $(addprefix tests/unit/megatron/,checkpoint convert cli/test_eval_tasks.py cli/test_evaluate_positional.py config evaluation inference plots reporting utils/test_environment.py) \
  $(addprefix tests/integration/test_,transformers_training.py evaluate.py) tests/unit/kerple/transformers

test-latest:
	rm -rf .venv-latest
	$(MAKE) test VENV=.venv-latest CONSTRAINTS= MARKS="not slow" TESTS="$(LATEST_TESTS)"
	$(MAKE) test-oldest VENV=.venv-latest CONSTRAINTS= MARKS="not slow"

test-oldest:
	$(INSTALL) "transformers==5.0.0"
	$(PYTEST) tests/unit/kerple/transformers

# The build of torch differs between machines. The Makefile chooses it, so it is not in the lock.
lock:
	@test -n "$(UV)" || { echo "make lock needs uv: pip install uv" >&2; exit 1; }
	printf '%s\n' "$(TORCH)" $(BUILD_TOOLS) | $(UV) pip compile --quiet --upgrade --universal --python-version 3.10 \
	  --no-annotate --no-emit-index-url --no-emit-find-links --custom-compile-command "make lock" \
	  --output-file requirements/lock.txt - $(addprefix requirements/,$(addsuffix .txt,dev demo data eval gpu))
	sed -i -E '/^(torch|nvidia-.*|cuda-.*)==/d' requirements/lock.txt

HOST_PACKAGES := openssh-server pdsh openmpi-bin slurm-wlm munge

# Without root, the tests fail and name the missing packages.
test-hosts: setup
	if [ "$$(id -u)" = 0 ] && ! dpkg -s $(HOST_PACKAGES) > /dev/null 2>&1; then \
	  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(HOST_PACKAGES); \
	fi
	$(BIN)/python -m pytest -q -m slow tests/integration/test_multi_host.py

lint: setup
	$(MAKE) docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

# A broken link or an invalid docstring is an error.
docs:
	@$(BIN)/python -c "import furo, myst_parser, sphinx" 2> /dev/null || { echo "make docs needs the packages of requirements/dev.txt in $(VENV): run make setup" >&2; exit 1; }
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going -q . site

pictures: setup
	$(BIN)/python prepare_data.py python_stdlib
	$(BIN)/python kerple_command.py sweep experiments/pictures.yml
	$(BIN)/python experiments/pictures.py --output docs/positional-methods.md --checkpoint runs/pictures/runs/*/checkpoints

bench: setup
	$(BIN)/python benchmarks/run.py

bench-gpu:
	PYTHON=$(PYTHON) bash benchmarks/first_contact.sh

clean:
	rm -rf .venv .venv-latest runs site .pytest_cache .ruff_cache .mypy_cache
