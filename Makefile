# make setup   a virtual environment in .venv with everything installed (does nothing when it is current)
# make demo    the main job: prepare text, train three small models at length 128, test them up to 2,048
# make test    all tests
# make lint    ruff
# make bench   benchmarks: ratios measured side by side
# make bench-gpu   those that need an NVIDIA GPU (and PyTorch for it, under PYTHON)
# make pictures   train every method that learns with the demonstration's settings (what is missing), and draw all
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
TORCH ?= torch==2.13.0
TEST_WORKERS ?= 2

.PHONY: setup demo test lint bench bench-gpu pictures clean

setup: $(VENV)/.installed

$(VENV)/.installed: requirements/core.txt requirements/dev.txt
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --upgrade pip "setuptools>=77" wheel
	$(BIN)/pip install --quiet "$(TORCH)"
	DS_BUILD_OPS=0 $(BIN)/pip install --quiet -r requirements/dev.txt
	touch $@

demo: setup
	$(BIN)/python tools/demo.py

test: setup
	$(BIN)/python -m pytest -q -m "not slow" -n $(TEST_WORKERS) --dist loadfile --no-loadscope-reorder

lint: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

# Of the others there is nothing to draw, or nothing that training would change.
UNCHANGED := learned none sinusoidal cope dape alibi kerple_power_original rotary sandwich xpos
TRAINED := $(filter-out $(UNCHANGED),$(basename $(notdir $(wildcard configs/pos_emb/*.yml))))

pictures: setup
	$(BIN)/python tools/demo.py --output runs/pictures --tokens 2048 --methods $(TRAINED)
	$(BIN)/python tools/plot_kernels.py --checkpoint $(TRAINED:%=runs/pictures/%/checkpoints)

bench: setup
	$(BIN)/python benchmarks/run.py

bench-gpu:
	PYTHON=$(PYTHON) bash benchmarks/gpu.sh

clean:
	rm -rf .venv runs .pytest_cache .ruff_cache
