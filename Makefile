# One virtual environment for everything; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
PARALLEL := -n logical --maxprocesses 4

.PHONY: install demo serve test soak lint gpu gpu-test gpu-kernels gpu-engine gpu-small clean

install: $(VENV)/.installed

$(VENV)/.installed: pyproject.toml
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --disable-pip-version-check --editable ".[dev]"
	touch $@

demo: install
	$(BIN)/paged-backend demo

serve: install
	$(BIN)/paged-backend serve $(MODEL)

# Kernels first, under Triton's interpreter, which is chosen for a whole process; what needs a
# server last, one after the other, as some of it is about time.
test: install
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(PARALLEL) tests/kernels
	$(BIN)/python -m pytest $(PARALLEL) -m "not gpu and not soak and not server"
	$(BIN)/python -m pytest -m "not gpu and not soak and server"

# Faults and load for longer than a test may take; the soak itself runs SOAK_MINUTES (default 20).
soak: install
	SOAK_SAVE=loadtest/results $(BIN)/python -m pytest -s -m soak

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Runs on the GPU machine's own python3 and installs nothing there; each part takes minutes.
gpu: gpu-test gpu-kernels gpu-engine gpu-small

gpu-%: export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/client:$(CURDIR)/loadtest:$(PYTHONPATH)
gpu-%: RESULTS ?= loadtest/results
gpu-%: BENCH = python3 -m paged_backend.cli bench decode --load-format dummy --device cuda

gpu-test:
	python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider tests/kernels tests/gpu

gpu-kernels:
	python3 kernels/benchmarks/run_all.py --json $(RESULTS)/kernels-gpu.json

gpu-engine:
	$(BENCH) loadtest/models/llama-3-8b --max-model-len 9216 --json $(RESULTS)/decode-llama-3-8b.json

gpu-small:
	$(BENCH) loadtest/models/smollm2-135m --context 1024,8000 --json $(RESULTS)/decode-smollm2-135m.json

clean:
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
