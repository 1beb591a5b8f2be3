# Every target does its own set-up into .venv: minutes the first time, nothing after that.
#
#   make demo    a real vLLM through lmkv: cold, from RAM, from disk after a restart      MODEL=tiny | folder | hub id
#   make demo-pd  two of them, one computes prompts, one decodes, behind lmkv proxy      MODEL=… ARGS="--transport tcp"
#   make demo-p2p two nodes and the controller: the second answers from the first's pool  MODEL=… ARGS="--transport tcp"
#   make test    all tests but the slow ones                                             ARGS="-k name -x"
#   make test-all  all tests                                                             ARGS=…
#   make lint    ruff, mypy --strict, import contracts
#   make bench   measurements as ratios, a table and build/bench.json                    ONLY=name
#   make wheels  every distribution's wheel into build/wheels
#   make format  let ruff put the code in shape

PYTHON ?= python3
ARGS ?=
MODEL ?=
ONLY ?=
BIN := .venv/bin

.DEFAULT_GOAL := test
.PHONY: demo demo-pd demo-p2p test test-all lint format bench wheels setup-dev setup-vllm setup-pd setup-test clean

setup-dev:
	@$(PYTHON) .ci/setup.py dev

setup-vllm:
	@$(PYTHON) .ci/setup.py vllm

setup-pd:
	@$(PYTHON) .ci/setup.py pd

setup-test:
	@$(PYTHON) .ci/setup.py test

demo: setup-vllm
	@$(BIN)/python -m lmkv_vllm.demo $(if $(MODEL),--model "$(MODEL)") $(ARGS)

demo-pd: setup-pd
	@$(BIN)/python -m lmkv_vllm.demo.prefill_decode $(if $(MODEL),--model "$(MODEL)") $(ARGS)

demo-p2p: setup-pd
	@$(BIN)/python -m lmkv_vllm.demo.sharing $(if $(MODEL),--model "$(MODEL)") $(ARGS)

test: setup-test
	@$(BIN)/python -m pytest -m "not slow" $(ARGS)

test-all: setup-test
	@$(BIN)/python -m pytest $(ARGS)

lint: setup-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

format: setup-dev
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

bench: setup-test
	@$(BIN)/python -m tests.bench $(if $(ONLY),--only "$(ONLY)") $(ARGS)

wheels: setup-dev
	@$(BIN)/python .ci/wheels.py build/wheels

clean:
	rm -rf .venv build
