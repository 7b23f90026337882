# make setup       create .venv with all dependencies (does nothing if it is up to date)
# make demo        prepare a corpus, train three small models at length 128, evaluate them up to 2,048
# make test        all tests
# make test-unit   unit tests only; they start no processes
# make test-hosts  training on two hosts emulated on this machine; as root, this installs the Debian packages it needs
# make lint        ruff, mypy and the documentation without warnings
# make docs        build the documentation site in site/
# make bench       benchmarks on this CPU: ratios measured in one run
# make bench-gpu   benchmarks that need an NVIDIA GPU (PYTHON=... must have PyTorch with CUDA)
# make pictures    train every trainable method with the demo's settings (if missing) and redraw docs/pictures
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TEST_WORKERS ?= 2
PYTEST := $(BIN)/python -m pytest -q -m "not slow" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

.PHONY: setup demo test test-unit test-hosts lint docs bench bench-gpu pictures clean

setup: $(VENV)/.installed

$(VENV)/.installed: $(wildcard requirements/*.txt)
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/pip install --quiet "$(TORCH)"
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -r requirements/dev.txt
	touch $@

demo: setup
	$(BIN)/python tools/demo.py

test: setup
	$(PYTEST)

test-unit: setup
	$(PYTEST) tests/unit

HOST_PACKAGES := openssh-server pdsh openmpi-bin slurm-wlm munge

# Without root, the tests fail and name the missing packages.
test-hosts: setup
	if [ "$$(id -u)" = 0 ] && ! dpkg -s $(HOST_PACKAGES) > /dev/null 2>&1; then \
	  apt-get update && DEBIAN_FRONTEND=noninteractive apt-get install -y --no-install-recommends $(HOST_PACKAGES); \
	fi
	$(BIN)/python -m pytest -q -m slow tests/integration/test_multi_host.py

lint: setup docs
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

# A broken link or an invalid docstring is an error.
docs: setup
	$(BIN)/python -m sphinx -b html -c docs -W --keep-going -q . site

# These methods have no trainable parameters, or training does not change their plot.
UNTRAINED := learned none sinusoidal cope dape dape_rotary alibi kerple_power_original rotary sandwich xpos
TRAINED := $(filter-out $(UNTRAINED),$(basename $(notdir $(wildcard configs/pos_emb/*.yml))))

pictures: setup
	$(BIN)/python tools/demo.py --output runs/pictures --tokens 2048 --methods $(TRAINED)
	$(BIN)/python tools/plot_kernels.py --output docs/positional-methods.md \
	  --checkpoint $(TRAINED:%=runs/pictures/%/checkpoints)

bench: setup
	$(BIN)/python benchmarks/run.py

bench-gpu:
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh

clean:
	rm -rf .venv runs site .pytest_cache .ruff_cache .mypy_cache
