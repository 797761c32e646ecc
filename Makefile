# Every target sets the environment up first; see .ci/setup.
SHELL := /bin/bash
.DEFAULT_GOAL := help

PYTHON := .venv/bin/python
TESTBED := bash .ci/testbed
STORE ?= file://$(CURDIR)/runs/demo
# A worker with an engine takes up to 4 GB of memory, so that two fit into 8.
WORKERS := -n auto --maxprocesses 2 --dist loadfile --no-loadscope-reorder
# Workers of vLLM and loaders of the trainer are spawned, and must find the project too.
export PYTHONPATH := $(CURDIR)$(if $(PYTHONPATH),:$(PYTHONPATH))
# Recorded in every manifest. A clone that another user owns is still one's own to read.
export EAGLE3_GIT_COMMIT := $(shell git -c safe.directory='*' rev-parse HEAD 2>/dev/null)

.PHONY: help setup demo test test-cluster check lint unit lock bench-extract bench-gate bench-prepare guards manifests images testbed cluster-up cluster-down clean

help: ## list the targets
	@grep -E '^[a-z-]+:.*## ' Makefile | sed -E 's/:[^#]*## /\t/' | expand -t 16

setup: ## make .venv, the locked environment
	@bash .ci/setup

demo: setup ## train and measure a draft for SmolLM2-135M on human chats, all stages
	@TQDM_DISABLE=1 $(PYTHON) -m jobs.demo_inputs
	@.venv/bin/eagle3 run --config docs/examples/demo.yaml --store $(STORE)

test: setup ## every test but those of the container images, as CI runs them
	@$(TESTBED) || echo "testbed: the other tests go on."
	@wanted="$${EAGLE3_CLUSTER:-$$($(PYTHON) -m tests.cluster expect)}" || exit 1; \
	  EAGLE3_CLUSTER="$$wanted" $(PYTHON) -m pytest $(WORKERS) -m "not images"

test-cluster: setup ## the tests of images, pods and nodes on the test cluster; see AGENTS.md
	@bash .ci/testbed
	@EAGLE3_CLUSTER=required $(PYTHON) -m pytest tests/cluster

check: setup ## lint, types and the tests without engines: the inner loop
	@$(MAKE) --no-print-directory -j2 --output-sync=target lint unit

lint:
	@$(PYTHON) -m ruff check .
	@$(PYTHON) -m ruff format --check .
	@$(PYTHON) -m mypy

unit:
	@$(PYTHON) -m pytest -q $(WORKERS) -m "not engine and not slow and not cluster"

lock: setup ## compile requirements.txt from pyproject.toml
	@bash .ci/lock

bench-extract: setup ## extraction against plain prefill, into runs/bench/extract.json
	@$(PYTHON) -m tests.bench.extract

guards: setup ## take each guard of tests/faults.toml away, and see its tests fail
	@$(PYTHON) -m tests.guards

bench-prepare: setup ## rows to shards against the bare tokenizer, into runs/bench/prepare.json
	@$(PYTHON) -m tests.bench.prepare

bench-gate: setup ## the gate of 100,000 objects against their bare listing, into runs/bench/gate.json
	@$(PYTHON) -m tests.bench.gate

manifests: setup ## write the chart's schema, the manifest's and k8s/ anew
	@$(PYTHON) -m eagle3.manifest.schema docs/data_config.schema.json
	@$(PYTHON) -m eagle3.chart --helm "$${HELM:-$$($(PYTHON) -m tests.helm)}"

images: ## build the container images with buildah, podman or docker; see docs/images.md
	@images/build.sh

testbed: setup ## build what the test cluster needs, into the cache
	@bash .ci/testbed

cluster-up: setup ## start the test cluster, and say how to reach it
	@$(PYTHON) -m tests.cluster up

cluster-down: setup ## take it down again, without a trace
	@$(PYTHON) -m tests.cluster down

clean: ## remove runs and caches, never the shared environment
	@rm -rf runs .mypy_cache .ruff_cache .pytest_cache .hypothesis
	@find . -name __pycache__ -not -path './.venv/*' -prune -exec rm -rf {} +
