# One command each; the first call of any of them makes .venv, later calls start at once.
#
#   make run                    everything that is out of date, then the result table
#   make run SEEDS=0,1 METHODS=search_r1_grpo DATA=folder
#                               the same, after writing these settings into params.yaml
#   make smoke                  the whole pipeline at its smallest size; params.yaml stays as it is
#   make compare                the methods and seeds of conf/compare/main.yaml (STUDY=main) at laptop scale; the report
#                               judges the papers' claims on them
#   make report                 the result table of the last run
#   make ui                     Prefect and MLflow on this machine (PORT_PREFECT=4200 PORT_MLFLOW=5000)
#   make serve                  deployments on that Prefect: on demand, and a nightly evaluation
#   make search-server          INDEX=artifacts/index over HTTP on PORT=8000, for RETRIEVER=remote and Search-R1's clients
#   make evidence-server        POLICY=artifacts/train/r_search-0: a trained agent's evidence in place of passages, likewise
#   make mcp-server             the same agent as a tool of the Model Context Protocol, on this machine (PORT=8765)
#   make measure-tool           does that evidence help another model (READER=artifacts/models/tiny_llama-1)?
#   make upload                 records that no MLflow server has taken yet
#   make test | check | lint    every test | lint and the fast tests | format, lint and types (ARGS= goes to pytest)
#   make format                 what ruff can mend
#   make bench | bench-retrieval | bench-slate  measurements
#   make setup | clean | help   .venv alone | remove what can be made again | this text
#
# METHODS=a,b trains these and sets them beside the system they are compared with, PARALLEL=2 runs so many stages at once,
# REQUIREMENTS=requirements/cpu.txt decides what is installed. A run downloads no model: HF_HUB_OFFLINE=1, unless you set
# it, and sends nothing out: DO_NOT_TRACK=true. The settings of run, smoke and compare are:

SHELL := /bin/bash
.SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := run
.NOTPARALLEL:

VENV := .venv
BIN := $(VENV)/bin
# requirements/gpu.txt where nvidia-smi lists a GPU; REQUIREMENTS=requirements/cpu.txt decides otherwise.
GPUS := $(shell nvidia-smi --list-gpus 2>/dev/null | grep --count '^GPU')
REQUIREMENTS ?= requirements/$(if $(filter-out 0,$(GPUS)),gpu,cpu).txt
STAMP := $(VENV)/.made-from-$(notdir $(REQUIREMENTS))
BENCH_STAMP := $(VENV)/.made-from-bench.txt
UV := 0.13.8
PORT_PREFECT ?= 4200
PORT_MLFLOW ?= 5000
INDEX ?= artifacts/index
POLICY ?= artifacts/train/r_search-0
READER ?= artifacts/models/tiny_llama-1

# A file of tests stays in one process: its fixtures are made once. Long files come first (tests/conftest.py). One
# process more than processors (nproc heeds OMP_NUM_THREADS), because many tests wait for what they have started.
PYTEST := -n $(shell echo $$(( $$(env -u OMP_NUM_THREADS nproc) + 1 ))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

export PATH := $(CURDIR)/$(BIN):$(PATH)
export PYTHONPATH := $(CURDIR)
export DO_NOT_TRACK ?= true
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
# Every stage is a process: without compiled libraries in .venv each of them starts twice as slowly.
unexport PYTHONDONTWRITEBYTECODE

# Every variable of the command line that is not the Makefile's own is a setting; flows.reproduce knows which there are.
OWN := VENV REQUIREMENTS UV PYTEST PORT_PREFECT PORT_MLFLOW INDEX POLICY READER PORT ARGS STUDY PARALLEL \
  DO_NOT_TRACK HF_HUB_OFFLINE OMP_NUM_THREADS UV_LINK_MODE PIP_FIND_LINKS PIP_INDEX_URL
GIVEN = $(strip $(foreach name,$(filter-out $(OWN),$(.VARIABLES)),$(if $(filter command,$(origin $(name))),$(name))))
SETTINGS = $(foreach name,$(GIVEN),$(if $($(name)),--set '$(name)=$($(name))')) \
  $(if $(PARALLEL),--max-parallel '$(PARALLEL)')
ifeq ($(filter run smoke compare,$(or $(MAKECMDGOALS),run)),)
ifneq ($(GIVEN),)
$(error $(GIVEN): only run, smoke and compare take settings, and $(MAKECMDGOALS) has no such variable (see `make help`))
endif
endif

.PHONY: help setup run smoke compare test lint check format bench bench-retrieval bench-slate ui serve search-server evidence-server mcp-server measure-tool report upload clean

help:
	@sed --quiet -e '/^$$/q' -e 's/^# \{0,1\}//p' Makefile
	@sed --quiet --regexp-extended 's/^ *([a-z_]+): *([^ #][^#]*[^ #]|[^ #]) *# (.*)/  \U\1\E=\2|\3/p' params.yaml \
	  | while IFS='|' read -r name meaning; do printf '%-49s%s\n' "$$name" "$$meaning"; done

setup: $(STAMP)

# The Python that makes .venv is not one of .venv: a half-made one would be removed under its own feet.
# pip finds a local build of torch through its find-links; uv does not read pip's configuration, so hand it on.
$(STAMP): $(REQUIREMENTS) requirements/overrides.txt
	@set -e; inside="$(CURDIR)/$(BIN)"; \
	outside="$$(echo "$$PATH" | tr ':' '\n' | grep --fixed-strings --line-regexp --invert-match "$$inside" | paste -sd:)"; \
	python=; for one in python3.11 python3.12 python3.13 python3; do \
	  python="$$(PATH="$$outside" "$$one" -c 'import sys; sys.version_info >= (3, 11) and print(sys._base_executable)' 2>/dev/null || true)"; \
	  if [ -n "$$python" ]; then break; fi; \
	done; \
	if [ -z "$$python" ]; then echo "error: no Python 3.11 or newer was found. Install one and run again." >&2; exit 1; fi; \
	echo "First use: making $(VENV) with $$("$$python" --version) from $(REQUIREMENTS) ($(or $(GPUS),0) GPUs found)."; \
	rm -rf $(VENV); "$$python" -m venv $(VENV); \
	$(call INSTALL,-r $(REQUIREMENTS) --overrides requirements/overrides.txt)
	@echo '$(notdir $(REQUIREMENTS))' > requirements/.made-from
	@touch $@

$(BENCH_STAMP): requirements/bench.txt $(STAMP)
	@set -e; $(call INSTALL,-r requirements/bench.txt -c $(REQUIREMENTS))
	@touch $@

define INSTALL
$(BIN)/python -m pip install --quiet --disable-pip-version-check "uv==$(UV)"; \
links="$$($(BIN)/python -m pip config get global.find-links 2>/dev/null || true)"; \
links="$${PIP_FIND_LINKS:-$$links}"; \
if [ -n "$$links" ]; then export UV_FIND_LINKS="$$(echo $$links | tr ' ' ',')"; fi; \
index="$$($(BIN)/python -m pip config get global.index-url 2>/dev/null || true)"; \
index="$${PIP_INDEX_URL:-$$index}"; \
if [ -n "$$index" ]; then export UV_DEFAULT_INDEX="$$index"; fi; \
UV_LINK_MODE=$${UV_LINK_MODE:-hardlink} $(BIN)/uv pip install --quiet --python $(BIN)/python $(1)
endef

# Notes what is installed in another version than the pinned one, so that stage `plan` sees it.
NOTE_INSTALLED = $(BIN)/python -m tasks.identity

run: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce $(SETTINGS)

smoke: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce --once --set scale=smoke $(if $(DATA),,--set data=smoke) $(SETTINGS)

compare: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce --compare '$(or $(STUDY),main)' $(if $(SCALE),,--set scale=laptop) $(SETTINGS)

test: $(STAMP)
	@$(BIN)/python -m pytest $(PYTEST) $(ARGS)

lint: $(STAMP)
	@$(BIN)/ruff format --check --quiet . || { echo "error: run 'make format'."; exit 1; }
	@$(BIN)/ruff check --quiet .
	@$(BIN)/mypy

check: lint
	@$(BIN)/python -m pytest -q -m "not slow and not servers and not gpu" $(PYTEST) $(ARGS)

format: $(STAMP)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: $(BENCH_STAMP)
	@$(BIN)/python -m tests.benchmarks.bench_trl

bench-slate: $(STAMP)
	@$(BIN)/python -m tests.benchmarks.bench_slate $(ARGS)

bench-retrieval: $(STAMP)
	@status=0; $(BIN)/python -m tests.benchmarks.bench_retrieval || status=1; \
	$(BIN)/python -m tests.benchmarks.bench_server $(ARGS) || status=1; exit $$status

report: $(STAMP)
	@cat reports/results.md 2>/dev/null || { echo "There is no report yet: make run"; exit 1; }
	@echo; echo "Open reports/index.html in a browser; it needs no server."

ui: $(STAMP)
	@PORT_PREFECT=$(PORT_PREFECT) PORT_MLFLOW=$(PORT_MLFLOW) $(BIN)/python -m flows.ui

serve: $(STAMP)
	@$(BIN)/python -m flows.serve

search-server: $(STAMP)
	@exec $(BIN)/python -m tasks.server --index '$(INDEX)' $(if $(PORT),--port '$(PORT)') $(ARGS)

evidence-server: $(STAMP)
	@exec $(BIN)/python -m tasks.tool --policy '$(POLICY)' --index '$(INDEX)' $(if $(PORT),--port '$(PORT)') $(ARGS)

mcp-server: $(STAMP)
	@exec $(BIN)/python -m tasks.tool.mcp_server --http --policy '$(POLICY)' --index '$(INDEX)' \
	  $(if $(PORT),--port '$(PORT)') $(ARGS)

measure-tool: $(STAMP)
	@$(BIN)/python -m tasks.tool.measure --policy '$(POLICY)' --reader '$(READER)' --index '$(INDEX)' $(ARGS)

upload: $(STAMP)
	@$(BIN)/python -m tasks.runner.tracking upload

# Results, DVC's cache, runs and ledger (MLflow, Prefect), encoded passages and replies of models stay. Stop what runs
# first: what an unfinished stage would go on from goes.
clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .scratch/{work,data_docs,logs,search-cache,bench-server,retrieval/index-*,retrieval/bm25-*}
