# Every target that needs Python makes its environment first; nothing has to be set up by hand.
# `make test PYTHON=python3.12` chooses the Python it is made with.
BIN := .venv/bin
READY := .venv/.kvferry-ready
READY_NEWEST := .venv-newest/.kvferry-ready
READY_SGLANG := .venv-sglang/.kvferry-ready
READY_VLLM := .venv-vllm/.kvferry-ready
READY_SGLANG_ENGINE := .venv-sglang-engine/.kvferry-ready
READY_VLLM_ENGINE := .venv-vllm-engine/.kvferry-ready
# Whole files: those of the kernels' plans and copies, and any other that runs the interpreter.
NEWEST_TESTS = $(sort $(wildcard tests/test_pack*.py tests/test_plan*.py) \
	$(shell grep -ls 'mark\.interpreter' tests/*.py))

.PHONY: help demo demo-sglang demo-vllm test test-faults test-deep mutants soak test-newest test-engines test-sglang test-vllm test-vllm-oldest check doctor bench-host bench-transport bench-direct bench-layers bench-sglang bench-vllm bench-overlap inspect inspect-newest tune bench-sass bench-pack bench-ranges gpu-check nsys ncu figures clean

help: ## list these targets
	@sed -n 's/^\([a-z0-9-]*\):.*## \(.*\)/  make \1	\2/p' $(MAKEFILE_LIST) | expand -t 26

demo: $(READY) ## save and load pages through a real Mooncake master on this machine
	$(BIN)/python -m kvferry demo

demo-sglang: $(READY_SGLANG_ENGINE) ## SGLang itself, its prefix cache in Mooncake (MODELS, QUICK, OUT)
	PYTHONPATH=benchmarks .venv-sglang-engine/bin/python engine_demos/demo_sglang.py $(MODELS) \
		$(if $(QUICK),--quick) $(if $(OUT),--out $(OUT))

demo-vllm: $(READY_VLLM_ENGINE) ## vLLM itself, its prefix cache in Mooncake (MODELS, QUICK, OUT)
	PYTHONPATH=benchmarks .venv-vllm-engine/bin/python engine_demos/demo_vllm.py $(MODELS) \
		$(if $(QUICK),--quick) $(if $(OUT),--out $(OUT))

test: $(READY) ## the whole core suite
	$(BIN)/python -m pytest

test-faults: $(READY) ## faults of real Mooncake processes and of the linker's own threads
	$(BIN)/python -m pytest fault_tests

test-deep: $(READY) ## the property tests with ten times as many random layouts
	KVFERRY_HYPOTHESIS=deep $(BIN)/python -m pytest tests/test_pack.py tests/test_runs.py \
		tests/test_nests.py tests/test_order.py tests/test_reshard.py tests/test_restore.py \
		tests/test_checksum.py tests/test_tables.py tests/test_staging.py tests/test_keys.py

mutants: $(READY) ## deliberate faults in the library: does the suite catch each?
	$(BIN)/python tests/mutants.py

MINUTES ?= 10
soak: $(READY) ## saves, loads, cancels and faults for MINUTES=10, every byte checked
	$(BIN)/python benchmarks/soak.py --minutes $(MINUTES) $(if $(SEED),--seed $(SEED)) $(if $(FAULTS),--faults '$(FAULTS)')

test-newest: $(READY_NEWEST) ## the kernels' tests with the newest Triton, in an environment of its own
	KVFERRY_HYPOTHESIS=few .venv-newest/bin/python -m pytest $(NEWEST_TESTS)

test-engines: test-sglang test-vllm ## tests against the real engines, on a CPU

test-sglang: $(READY_SGLANG) ## SGLang's own pools, and its prefix tree through a real Mooncake master
	.venv-sglang/bin/python -m pytest engine_tests/sglang

test-vllm-oldest: $(READY_VLLM_ENGINE) ## the same with the oldest vLLM that is served, 0.32 (not in test-engines)
	.venv-vllm-engine/bin/python -m pytest engine_tests/vllm

test-vllm: $(READY_VLLM) ## vLLM's own caches, and its scheduler through a real Mooncake master
	.venv-vllm/bin/python -m pytest engine_tests/vllm

check: $(READY) ## lint, format and types
	$(BIN)/ruff check
	$(BIN)/ruff format --check
	$(BIN)/mypy

doctor: $(READY) ## what this machine has, and what to do about the rest
	$(BIN)/python -m kvferry doctor

bench-host: $(READY) ## planning a save on the host, beside a list of its ranges
	$(BIN)/python benchmarks/bench_host.py

bench-transport: $(READY) ## packed transfers beside Mooncake's own contiguous calls
	$(BIN)/python benchmarks/bench_transport.py

bench-direct: $(READY) ## saves straight from block-major pools beside packed ones, by page size
	$(BIN)/python benchmarks/bench_direct.py

bench-layers: $(READY) ## packed layer groups beside ranges straight from the pools
	$(BIN)/python benchmarks/bench_layers.py

bench-sglang: $(READY_SGLANG) ## kvferry's linker beside SGLang's own, in one process: some 15 minutes
	.venv-sglang/bin/python benchmarks/bench_sglang.py $(if $(WRITE),--write)

bench-vllm: $(READY_VLLM) ## kvferry's descriptors beside those of vLLM's Mooncake connector
	.venv-vllm/bin/python benchmarks/bench_vllm.py $(if $(WRITE),--write)

bench-overlap: $(READY) ## a layer-wise load beside a step's compute (OUT=folder for its timeline)
	$(BIN)/python benchmarks/bench_overlap.py $(if $(OUT),--out $(OUT))

inspect: $(READY) ## compile every kernel for five GPUs, tabulate, check thresholds: some 5 minutes
	$(BIN)/python -m kvferry.tuning inspect $(if $(ONLY),--only '$(ONLY)')

inspect-newest: $(READY_NEWEST) ## the same by the newest Triton
	.venv-newest/bin/python -m kvferry.tuning inspect $(if $(ONLY),--only '$(ONLY)')

tune: $(READY) ## measure launch numbers on this machine's GPU (OUT=folder, LIMIT=seconds)
	$(BIN)/python -m kvferry.tuning sweep $(if $(OUT),--out '$(OUT)') $(if $(LIMIT),--limit-s $(LIMIT))

bench-sass: $(READY) ## machine code of the kernels, by compiling alone
	$(BIN)/python benchmarks/bench_sass.py

bench-pack: $(READY) ## pack and unpack beside Tensor.copy_ of as many bytes
	$(BIN)/python benchmarks/bench_pack.py

bench-ranges: $(READY) ## what NVTX ranges cost a transfer, with a tool that listens and without
	$(BIN)/python benchmarks/bench_ranges.py

gpu-check: $(READY) ## bytes, rates and waits on a GPU, within minutes (OUT=folder); small on a CPU
	$(BIN)/python benchmarks/gpu_check.py $(or $(OUT),gpu-check)

NSIGHT = OUT="$(or $(OUT),nsight)" RANGE="$(RANGE)" LAUNCHES="$(LAUNCHES)" \
	PATH="$(CURDIR)/$(BIN):$$PATH" scripts/nsight.sh
nsys: $(READY) ## a timeline by Nsight Systems of the demo, or of CMD="..." (RANGE, OUT)
	$(NSIGHT) nsys $(or $(CMD),python -m kvferry demo)

ncu: $(READY) ## our kernels by Nsight Compute, in the demo or in CMD="..." (RANGE, OUT, LAUNCHES)
	$(NSIGHT) ncu $(or $(CMD),python -m kvferry demo)

figures: $(READY) ## measure everything that the documents quote, and write it there
	$(BIN)/python benchmarks/figures.py

clean: ## remove the environments, caches and build outputs
	rm -rf .venv .venv-newest .venv-sglang .venv-sglang-engine .venv-vllm .venv-vllm-engine engine_demo_out build dist src/*.egg-info .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(READY): pyproject.toml scripts/setup.sh $(wildcard scripts/constraints-c*.txt)
	scripts/setup.sh .venv dev

$(READY_NEWEST): pyproject.toml scripts/setup.sh scripts/constraints-newest.txt
	CONSTRAINTS=scripts/constraints-newest.txt scripts/setup.sh .venv-newest cpu dev

$(READY_SGLANG): scripts/setup_engine.sh $(wildcard engine_tests/sglang/*.txt)
	scripts/setup_engine.sh sglang .venv-sglang

$(READY_SGLANG_ENGINE): scripts/setup_engine.sh engine_demos/requirements-sglang.txt $(wildcard engine_tests/sglang/*.txt)
	scripts/setup_engine.sh sglang .venv-sglang-engine engine_demos/requirements-sglang.txt

$(READY_VLLM): scripts/setup_engine.sh $(wildcard engine_tests/vllm/*.txt)
	scripts/setup_engine.sh vllm .venv-vllm

$(READY_VLLM_ENGINE): scripts/setup_engine.sh engine_demos/engine-vllm.txt engine_tests/vllm/requirements.txt
	ENGINE_TXT=engine_demos/engine-vllm.txt scripts/setup_engine.sh vllm .venv-vllm-engine
