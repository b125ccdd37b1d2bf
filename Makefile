# One virtual environment for everything; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo

.PHONY: install demo serve test lint gpu clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/paged-backend demo

serve: install
	$(BIN)/paged-backend serve $(MODEL)

# Kernels first, under Triton's interpreter, which is chosen for a whole process.
test: install
	TRITON_INTERPRET=1 $(BIN)/python -m pytest tests/kernels
	$(BIN)/python -m pytest -m "not gpu"

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Runs on the GPU machine's own python3 and installs nothing there.
gpu: export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/client:$(PYTHONPATH)
gpu: RESULTS ?= loadtest/results
gpu:
	python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider tests/gpu
	mkdir -p $(RESULTS)
	python3 -m paged_backend.cli bench offline loadtest/models/llama-30m --load-format dummy \
		--device cuda --dtype float32 --concurrency 16 --json $(RESULTS)/offline-llama-30m-gpu.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
