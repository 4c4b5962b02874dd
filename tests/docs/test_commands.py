"""Every command of the documents is run by a test at its smallest size, and says what the Makefile and the code say.

`RUN_BY` names the test. A command that stands in no row fails, and so does a row whose command or test is gone.
"""

from __future__ import annotations

import ast
import json
import os
import re
import runpy
import shlex
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import yaml

from tasks.params import edit
from tests import shipped
from tests.docs.documents import ROOT, documents
from tests.pipeline.toy import Toy
from tests.server.attacks import exchange, get
from tests.server.running import ServerProcess, free_port

HERE = "tests/docs/test_commands.py"
PIPELINE = "tests/stages/test_smoke_pipeline.py::test_the_flow_killed_again_and_again_gives_the_bytes_of_bare_dvc"
COMPARED = "tests/pipeline/test_flow.py::test_a_comparison_runs_its_methods_and_seeds_and_leaves_dvc_nothing_to_do"
RETRIEVERS = "tests/stages/test_retrievers.py::test_the_stage_in_a_clone"
TRAINED = "tests/methods/test_all_train.py::test_five_steps_move_the_weights"
SERVED = "tests/server/test_server.py::test_our_client_gets_the_hits_of_a_local_search"
SETTINGS = "tests/params/test_edit.py::test_every_setting_has_a_variable_of_the_makefile"
LINTED = f"{HERE}::test_ci_runs_what_the_documents_say"
SHARED = "tests/pipeline/test_sharing.py::test_what_one_clone_pushed_another_one_pulls_and_has_nothing_to_run"
DIFFERENT = "tests/stages/test_smoke_pipeline.py::test_dvc_compares_two_settings_by_their_results"
COMPOSED = f"{HERE}::test_the_compose_file_has_the_services"
MEASURED_MODEL = "tests/benchmarks/test_bench_model.py::test_the_parts_run_to_their_tables"
MADE = f"{HERE}::test_small_targets"
REAL = "tests/stages/test_real_data.py::test_real_data_goes_through_every_stage"
GIVEN_MODEL = "tests/stages/test_bad_input.py::test_a_whole_model_folder_is_taken_over_as_it_is"
SENT_LATER = (
    "tests/stages/test_tracking.py::test_a_dead_or_hanging_server_costs_seconds_once_and_rows_can_be_sent_later"
)
REGISTERED = "tests/registry/test_registry.py::test_the_first_is_champion_and_a_better_one_takes_the_alias"
REGISTERED_PLAYS = "tests/registry/test_registry.py::test_a_registered_policy_plays_anywhere_and_a_changed_weight_shows"
NIGHTS = "tests/registry/test_nightly.py::test_nights_on_their_schedule_and_two_regressions"
HELP = "tests/house/test_make.py::test_help_lists_every_target_and_every_setting"
SETUP = "tests/house/test_make.py::test_a_half_made_environment_is_made_anew_from_a_python_outside_of_it"
PEER = "tests/benchmarks/test_bench.py::test_both_sides_run_to_the_table"
SERVER = "tests/benchmarks/test_bench_server.py::test_it_runs_to_its_verdict"
PARAMS = (
    "tests/pipeline/test_flow.py::test_a_setting_re_executes_what_depends_on_it_and_one_for_this_run_only_is_put_back"
)
CHOSEN = "tests/params/test_chosen.py::test_what_is_set_wins_over_every_file_and_only_what_reads_it_changes"
KEPT = "tests/stages/test_runs.py::test_old_ones_are_listed_and_removed"
SCALE = "tests/benchmarks/test_bench_retrieval.py::test_every_step_of_the_scale_benchmark_runs"
EVIDENCE = "tests/tool/test_serving.py::test_the_client_of_the_search_server_gets_evidence"
RESPLIT = "tests/stages/test_data.py::test_a_split_of_our_own_is_told_and_counted"
MEASURED = "tests/tool/test_agent.py::test_the_command_prints_and_writes_a_table"
SCORED = "tests/score/test_score.py::test_the_page_scores_its_own_reward"
OWN = "tests/stages/test_additions.py::test_a_system_outside_the_clone_is_one_of_the_run"
ASKED = "tests/tool/test_ask.py::test_one_question_is_shown_while_it_is_played"

RUN_BY = {
    "make run": PIPELINE,
    "make smoke": PIPELINE,
    "make run SCALE=smoke": PIPELINE,
    "make run SYSTEMS=base,search_r1_grpo": PIPELINE,
    "make run SEEDS=0,1,2 METHODS=stepsearch,dspo": TRAINED,
    "make run METHODS=stepsearch,dspo": TRAINED,
    "make run RETRIEVER=dense MAX_QUESTIONS=1000": SETTINGS,
    "make run SEEDS=0,1,2 KEEP=1": PARAMS,
    'make run SET="train.policy.lr=1e-4 rollout.top_k=5"': CHOSEN,
    'make run SET="method.search_r1_grpo.sampler.size=8 retriever.k1=1.2"': CHOSEN,
    "python -m flows.reproduce --set train.num_steps=5": CHOSEN,
    "make run RETRIEVER=dense": "tests/retrieval/test_dense.py::test_the_embedded_encoder",
    "OMP_NUM_THREADS=16 make run RETRIEVER=dense": "tests/retrieval/test_dense.py::test_the_embedded_encoder",
    "make run RETRIEVER=elasticsearch": "tests/retrieval/test_elasticsearch.py::test_the_stages_search_the_server",
    "make run RETRIEVER=elasticsearch_index": (
        "tests/retrieval/test_elasticsearch_index.py::test_the_stages_search_an_index_that_exists"
    ),
    "make run RETRIEVER=remote": SERVED,
    "make run COMPARE_RETRIEVERS=bm25,dense,hybrid": RETRIEVERS,
    "make run COMPARE_RETRIEVERS=dense": RETRIEVERS,
    "make smoke DATA=/path/to/folder": "tests/stages/test_data.py::test_folder_in_two_runs_gives_the_same_bytes",
    "make run DATA=/path/to/folder": "tests/stages/test_data.py::test_folder_in_two_runs_gives_the_same_bytes",
    "make run DATA=resplit DATA_FOLDER=/path/to/folder": RESPLIT,
    "make run DATA=/path/to/folder COMPARE_RETRIEVERS=bm25,dense,hybrid": RETRIEVERS,
    "make run DATA=<folder> MAX_QUESTIONS=700": REAL,
    "make run AUGMENT=openai": "tests/stages/test_augment.py::test_a_model_killed_in_a_clone_and_asked_for_the_rest",
    "make smoke MODEL=smollm2-135m": "tests/stages/test_smollm2.py::test_teaching_and_training_change_the_weights",
    "make run MODEL=my-model SCALE=paper": GIVEN_MODEL,
    "make run MODEL=smollm2-135m SCALE=small DATA=my-data METHODS=search_r1_grpo SEEDS=0": (
        "tests/stages/test_smollm2.py::test_teaching_and_training_change_the_weights"
    ),
    "make run GENERATOR=vllm": "tests/generate/test_vllm.py::test_three_rl_steps_with_vllm",
    "make setup WITH=deepspeed,vllm,dense": (
        "tests/test_libraries.py::test_a_part_gets_what_it_requires_when_it_is_first_named"
    ),
    "make run ENGINE=<name>": (
        "tests/stages/test_additions.py::test_the_engine_trained_and_the_generator_took_its_weights"
    ),
    "make run GENERATOR=fleet METHODS=search_r1_grpo SEEDS=0,1,2": (
        "tests/stages/test_deepspeed.py::test_the_flow_gives_the_same_bytes_as_dvc_and_mlflow_has_one_run_each"
    ),
    "make run ENGINE=deepspeed": (
        "tests/stages/test_deepspeed.py::test_the_flow_gives_the_same_bytes_as_dvc_and_mlflow_has_one_run_each"
    ),
    "make run ENGINE=deepspeed CLUSTER=mine": (
        "tests/engine/test_two_hosts.py::test_two_hosts_train_as_one_and_go_on_after_a_cut_over_a_bad_link"
    ),
    "sudo infra/two-hosts.sh make smoke ENGINE=deepspeed": (
        "tests/engine/test_two_hosts.py::test_one_machine_is_two_hosts_for_a_command"
    ),
    "make run PRESET=3b-8gpu DATA=my-data": "tests/plan/test_presets.py::test_other_words_stand_above_a_preset",
    "python -m tests.benchmarks.bench_ahead": (
        "tests/benchmarks/test_bench_workers.py::test_a_step_is_played_while_another_is_learned"
    ),
    "python -m tests.benchmarks.bench_overlap": "tests/benchmarks/test_bench_workers.py::test_searches_overlap",
    "python -m tests.benchmarks.bench_scaling": "tests/benchmarks/test_bench_workers.py::test_seconds_are_predicted",
    "HF_HUB_OFFLINE=0 make run": PIPELINE,
    "BREADCRUMB_PREFLIGHT=warn make run": "tests/plan/test_preflight.py::test_it_can_be_asked_to_warn_only",
    "make compare": COMPARED,
    "make compare STUDY=penalty": COMPARED,
    "make compare STUDY=learned": COMPARED,
    "make compare STUDY=family": COMPARED,
    "make report": MADE,
    "make runs": KEPT,
    "make runs REMOVE=20261128-030000-4711": KEPT,
    "make runs KEEP_LAST=5": KEPT,
    "make clean": MADE,
    "make help": HELP,
    "make setup": SETUP,
    "make upload": SENT_LATER,
    "make register": REGISTERED,
    "make evaluate CHAMPION=champion": REGISTERED_PLAYS,
    "make ui": f"{HERE}::test_both_pages_answer",
    "make serve": NIGHTS,
    "make nightly": NIGHTS,
    'make nightly ACCEPT="the scorer removes accents now"': NIGHTS,
    "NIGHTLY_WEBHOOK=https://hooks.example/T0/B0 make serve": NIGHTS,
    "make search-server INDEX=artifacts/index PORT=8000": SERVED,
    "make search-server INDEX=.scratch/served-index": SERVED,
    'make search-server INDEX=.scratch/served-index ARGS="--host 0.0.0.0 --without-key"': (
        "tests/server/test_server.py::test_what_keeps_it_from_listening_to_others"
    ),
    'make search-server INDEX=.scratch/served-index ARGS="--set names=[host.docker.internal]"': (
        "tests/tool/test_chat.py::test_every_refusal_is_an_error_object"
    ),
    'make search-server INDEX=.scratch/served-index ARGS="--processes 4"': (
        "tests/server/test_processes.py::test_both_answer_as_one_process_and_the_metrics_are_sums"
    ),
    "make run METHODS=r_search": TRAINED,
    "make run METHODS=pica": "tests/stages/test_reward_model.py::test_its_users_get_it_and_refuse_another_one",
    "make evidence-server POLICY=artifacts/train/r_search-0": EVIDENCE,
    "make evidence-server POLICY=artifacts/train/r_search-0 PORT=8002": EVIDENCE,
    "make mcp-server POLICY=artifacts/train/r_search-0": "tests/tool/test_serving.py::test_a_client_talks_over_http",
    "python -m tasks.reward_model --model pica --seed 0": (
        "tests/services/test_reward_model.py::test_a_server_gives_the_same_probabilities"
    ),
    "python -m tasks.tool.mcp_server --policy artifacts/train/r_search-0 --index artifacts/index": (
        "tests/tool/test_serving.py::test_a_client_starts_the_tool_and_talks_over_stdio"
    ),
    "make measure-tool READER=artifacts/models/tiny_llama-1": MEASURED,
    "make measure-tool POLICY=artifacts/train/r_search-0 READER=artifacts/models/tiny_llama-1": MEASURED,
    "cp -r artifacts/index .scratch/served-index": f"{HERE}::test_a_served_copy_answers",
    "mkdir -p ../my_parts/conf/method ../my_parts/tasks/rewards": SCORED,
    "make score": SCORED,
    "make score METHOD=mine": SCORED,
    "make score METHOD=search_r1_grpo": SCORED,
    'make run SET="train.policy.lr=1e-4"': SETTINGS,
    "make score METHOD=mine PARTS=../my_parts FILE=../my_parts/plays.jsonl": SCORED,
    "make score METHOD=mine PARTS=../my_parts": (
        "tests/score/test_score.py::test_without_a_file_the_newest_training_is_taken"
    ),
    "make smoke METHODS=mine SEEDS=0 PARTS=../my_parts": OWN,
    "make run METHODS=mine SEEDS=0,1 PARTS=../my_parts": OWN,
    "make ask POLICY=mine-0 PARTS=../my_parts": ASKED,
    "make ask": ASKED,
    'make ask QUESTION="Who wrote it?"': ASKED,
    'make ask QUESTION="Who is Kertas Kenbux\'s rector\'s mentor?" POLICY=search_r1_grpo-0': ASKED,
    "make ask POLICY=search_r1_grpo-0": "tests/tool/test_ask.py::test_somebody_types",
    "make ask POLICY=base-0 RETRIEVER=bm25_exact": (
        "tests/tool/test_ask.py::test_another_retriever_has_an_index_of_its_own"
    ),
    "make chat-server POLICY=search_r1_grpo-0 PORT=8001": (
        "tests/tool/test_chat.py::test_the_client_of_openai_gets_an_answer"
    ),
    "curl -sN http://127.0.0.1:8001/v1/chat/completions -H 'content-type: application/json' "
    """-d '{"model": "search_r1_grpo-0", "stream": true, """
    """"messages": [{"role": "user", "content": "Who wrote it?"}]}'""": (
        "tests/tool/test_chat.py::test_events_end_as_clients_expect_it"
    ),
    "make test": LINTED,
    "make test LONG=1": LINTED,
    'make test ARGS="tests/gpu -s"': LINTED,
    "make lint": LINTED,
    "make check": LINTED,
    "make format": LINTED,
    "make bench": "tests/benchmarks/test_bench.py::test_our_side_runs",
    "make bench MODEL=smollm2-135m": MEASURED_MODEL,
    'make bench MODEL=smollm2-135m ARGS="--parts decode,training"': MEASURED_MODEL,
    'make bench MODEL=smollm2-135m ARGS="--parts decode,vllm"': MEASURED_MODEL,
    "make bench MODEL=smollm2-135m ARGS=--quick": MEASURED_MODEL,
    "python -m tests.benchmarks.bench_trl --smallest": PEER,
    "python -m tests.benchmarks.bench_trl --separate-prefixes": PEER,
    "make bench-slate": "tests/benchmarks/test_bench_slate.py::test_it_says_what_it_needs",
    "make bench-retrieval": "tests/benchmarks/test_bench_retrieval.py::test_the_overhead_is_measured",
    'make bench-retrieval ARGS="--memory-minutes 10"': SERVER,
    "python -m flows.reproduce --help": "tests/params/test_edit.py::test_the_command_line_names_every_setting",
    "python -m flows.reproduce --set scale=smoke --set evaluate.top_k=2": (
        "tests/pipeline/test_flow.py::test_a_setting_re_executes_what_depends_on_it_and_one_for_this_run_only_is_put_back"
    ),
    "python -m flows.reproduce --no-prefect": PIPELINE,
    "python -m flows.reproduce --force evaluate": (
        "tests/pipeline/test_flow.py::test_force_repeats_a_group_and_gives_the_same_bytes"
    ),
    "python -m tasks.server --help": f"{HERE}::test_options_are_known_to_their_command",
    "python -m tests.benchmarks.scale_retrieval --passages 1000000 "
    "--types ivf_sq8,flat,sq8,ivf_pq --folder FOLDER": SCALE,
    "python -m tests.benchmarks.scale_retrieval --corpus artifacts/data/corpus.jsonl "
    "--types flat,sq8,hnsw,ivf_sq8,ivf_pq --no-kill --folder FOLDER": SCALE,
    "dvc repro": PIPELINE,
    "dvc repro report": SHARED,
    "dvc repro augment": "tests/stages/test_augment.py::test_the_rules_in_a_clone",
    "dvc repro --force --single-item index": "tests/retrieval/test_elasticsearch.py::test_the_stages_search_the_server",
    "dvc repro --force --single-item report": "tests/report/test_stage.py::test_stage_writes_the_files",
    "dvc dag": SHARED,
    "dvc remote add --default store /path/to/shared/folder": SHARED,
    "dvc push": SHARED,
    "dvc pull": SHARED,
    "dvc gc --workspace": SHARED,
    "dvc status": SHARED,
    "dvc metrics show": DIFFERENT,
    "dvc metrics diff": DIFFERENT,
    "dvc params diff": DIFFERENT,
    "dvc plots": DIFFERENT,
    "dvc plots show": DIFFERENT,
    "dvc plots diff": DIFFERENT,
    "dvc exp run": DIFFERENT,
    "dvc exp run -S evaluate.num_bootstrap=300 -n boot300": DIFFERENT,
    "dvc exp run -S evaluate.top_k=1 -n one-passage": DIFFERENT,
    "dvc exp run -S '+set.train.policy.lr=1e-4' -n slow": (
        "tests/params/test_chosen.py::test_dvc_writes_it_into_the_section_set"
    ),
    "dvc exp show": DIFFERENT,
    "make experiments": DIFFERENT,
    "dvc exp diff HEAD one-passage": DIFFERENT,
    "git checkout params.yaml": PARAMS,
    "docker compose -f infra/compose.yaml up -d prefect": COMPOSED,
    "docker compose -f infra/compose.yaml up -d mlflow": COMPOSED,
    "docker compose -f infra/compose.yaml up -d elasticsearch": COMPOSED,
    "curl -X DELETE $ELASTICSEARCH_URL/<index>": (
        "tests/retrieval/test_elasticsearch.py::test_a_vanished_index_fails_a_search_at_once"
    ),
    "curl -s http://127.0.0.1:8000/retrieve -H 'content-type: application/json' "
    """-d '{"queries": ["city in France"], "topk": 3}'""": f"{HERE}::test_a_served_copy_answers",
}  # fmt: skip
COMMANDS = sorted({command for document in documents() for command in document.commands()})
ASSIGNED = re.compile(r"([A-Z_]+)=(.*)", re.DOTALL)


def _words(command: str, program: str) -> list[str]:
    """The words behind the program, where it is the command's."""
    words = shlex.split(command)
    while ASSIGNED.fullmatch(words[0]):
        words.pop(0)
    return words[1:] if words[0] == program else []


def test_every_command_is_run_by_a_test() -> None:
    assert set(COMMANDS) - set(RUN_BY) == set(), "name the test that runs it"
    assert set(RUN_BY) - set(COMMANDS) == set(), "no document has this command any more"


@pytest.mark.parametrize("test", sorted(set(RUN_BY.values())))
def test_the_test_exists(test: str) -> None:
    path, _, name = test.partition("::")
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    assert name in [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]


def _makefile() -> tuple[set[str], set[str]]:
    """Targets and variables of the Makefile."""
    text = (ROOT / "Makefile").read_text(encoding="utf-8").replace("\\\n", " ")
    targets = re.findall(r"^\.PHONY: (.*)$", text, re.MULTILINE)[0].split()
    taken = " ".join(re.findall(r"^override TAKES\S* := (.*)$", text, re.MULTILINE)).split()
    return set(targets), {*taken, *edit.VARIABLES, "METHODS", "PRESET"}


@pytest.mark.parametrize("command", [command for command in COMMANDS if _words(command, "make")])
def test_targets_and_variables_are_those_of_the_makefile(command: str) -> None:
    targets, variables = _makefile()
    values = {}
    for word in _words(command, "make"):
        if assigned := ASSIGNED.fullmatch(word):
            values[assigned[1]] = assigned[2]
        else:
            assert word in targets, f"{command}: no target {word}"
    assert set(values) <= variables, command
    mine = {"DATA", "DATA_FOLDER", "MODEL", "ENGINE", "PARTS"}  # Their values are a reader's own.
    mine |= {"METHODS"} if "PARTS" in values else set()
    words = [f"{name}={value}" for name, value in values.items() if name in {*edit.VARIABLES, "METHODS"} - mine]
    answers = edit.parse(words, shipped.root())
    names = edit.names_of(["method", "system", "retriever", "augment", "scale", "generator"], ROOT)
    for key, value in answers.items():
        for name in value if isinstance(value, list) else [value]:
            assert not isinstance(name, str) or name in names, f"{command}: {key} has no {name}"
    study = values.get("STUDY", "main")
    assert (ROOT / "conf/compare" / f"{study}.yaml").is_file()


def test_a_dry_run_calls_the_module_that_the_tests_run() -> None:
    """`make` hands a command on; that module is what the tests of `RUN_BY` start."""
    calls = {
        "run": "flows.reproduce", "smoke": "flows.reproduce --set scale=smoke", "ui": "flows.ui",
        "compare": 'flows.reproduce --compare "${STUDY:-main}"', "serve": "flows.serve nightly",
        "search-server": "tasks.server --index", "evidence-server": "tasks.tool --policy",
        "ask": "tasks.tool.ask --policy", "chat-server": "tasks.tool.chat_server --policy",
        "mcp-server": "tasks.tool.mcp_server --http --policy", "measure-tool": "tasks.tool.measure --policy",
        "upload": "tasks.runner.upload", "register": "tasks.registry register", "evaluate": "tasks.registry evaluate",
        "bench": "tests.benchmarks.bench_trl", "bench-retrieval": "tests.benchmarks.bench_server", "test": "pytest",
        "bench-slate": "tests.benchmarks.bench_slate", "nightly": "tasks.registry.nightly", "runs": "tasks.runner.runs",
        "bench MODEL=smollm2-135m": 'tests.benchmarks.bench_model --model="$MODEL";',
    }  # fmt: skip
    for target, module in calls.items():
        done = subprocess.run(["make", "-n", *target.split()], cwd=ROOT, capture_output=True, text=True, env=_plain())
        assert re.search(rf"python (-m|-c .*) {re.escape(module)}( |$)", done.stdout, re.MULTILINE), (target, done)


def _plain() -> dict[str, str]:
    """The environment without what an outer `make` has left in it."""
    return {key: value for key, value in os.environ.items() if not key.startswith("MAKE")}


def _python_commands() -> list[tuple[str, list[str]]]:
    found = [words for command in COMMANDS if (words := _words(command, "python"))]
    searched = [words for command in COMMANDS if "search-server" in command and "ARGS" in command
                for words in [_words(command, "make")]]  # fmt: skip
    options = [word for words in searched for word in shlex.split(words[-1].removeprefix("ARGS="))]
    bench = shlex.split("--memory-minutes 10")
    more = [["-m", "tasks.server", *options], ["-m", "tests.benchmarks.bench_server", *bench]]
    return [(words[1], [word for word in words[2:] if word.startswith("--")]) for words in [*found, *more]]


@pytest.mark.parametrize("module", sorted({module for module, _ in _python_commands()}))
def test_options_are_known_to_their_command(
    module: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", [module, "--help"])
    monkeypatch.chdir(ROOT)
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert ended.value.code in (0, None)
    known = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
    for name, options in _python_commands():
        assert name != module or set(options) <= known


def test_stages_of_dvc_commands_exist() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text(encoding="utf-8"))["stages"]
    named = [words[-1] for command in COMMANDS if (words := _words(command, "dvc"))[:1] == ["repro"] and words[1:]]
    assert named
    assert set(named) <= set(stages)


def test_the_compose_file_has_the_services() -> None:
    """These tests have no containers: the names are looked up, and the same servers run without containers."""
    services = yaml.safe_load((ROOT / "infra/compose.yaml").read_text(encoding="utf-8"))["services"]
    for command in COMMANDS:
        if words := _words(command, "docker"):
            assert words[:5] == ["compose", "-f", "infra/compose.yaml", "up", "-d"]
            assert words[5] in services


def test_ci_runs_what_the_documents_say() -> None:
    """CI runs `make lint` and `make test LONG=1`; `make check` and `make format` are made of the same commands."""
    script = (ROOT / ".ci/run").read_text(encoding="utf-8")
    assert script.index("make --no-print-directory lint") < script.index("make --no-print-directory test LONG=1 ")
    done = subprocess.run(["make", "-n", "check", "format"], cwd=ROOT, capture_output=True, text=True, env=_plain())
    for command in ("ruff format --check", "ruff check", "mypy", "pytest -q -m", "ruff format --quiet", "--fix"):
        assert command in done.stdout, done.stderr


@pytest.mark.slow
def test_small_targets(tmp_path: Path) -> None:
    """`make report` and `make clean` in a folder with a report, caches and results."""
    shutil.copyfile(ROOT / "Makefile", tmp_path / "Makefile")
    (tmp_path / "requirements").mkdir()
    stamp = Path(".venv/.made-from-run.txt")

    def make(*words: str) -> subprocess.CompletedProcess[str]:
        command = ["make", "--silent", f"--old-file={stamp}", *words]
        return subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, env=_plain())

    (tmp_path / stamp).parent.mkdir()
    (tmp_path / stamp).touch()
    assert "There is no report yet" in make("report").stdout
    kept = ("reports/results.md", ".scratch/replies/a", ".scratch/retrieval/vectors-1/a", ".scratch/mlflow/a")
    gone = (".scratch/work/a", ".scratch/retrieval/index-1/a", ".scratch/bench-server/a", ".ruff_cache/a")
    for name in (*kept, *gone):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("a table")
    assert "a table" in make("report").stdout
    assert make("clean").returncode == 0
    assert [name for name in kept if not (tmp_path / name).exists()] == []
    assert [name for name in gone if (tmp_path / name).exists()] == []


@pytest.mark.slow
@pytest.mark.servers
def test_a_served_copy_answers(tmp_path: Path) -> None:
    """The copy of an index that the page serves, and the request that it shows."""
    from tasks import retrieval
    from tests.server.running import write_world

    write_world(tmp_path / "corpus.jsonl")
    retrieval.build(tmp_path / "corpus.jsonl", tmp_path / "artifacts/index", retrieval.load_settings("bm25", ROOT))
    (tmp_path / ".scratch").mkdir()
    (copying,) = [command for command in COMMANDS if _words(command, "cp")]
    (asking,) = [command for command in COMMANDS if "/retrieve" in command]
    subprocess.run(shlex.split(copying), cwd=tmp_path, check=True)
    cache = f"cache_folder={tmp_path / 'cache'}"
    with ServerProcess(tmp_path / ".scratch/served-index", "--port", "0", "--set", cache) as server:
        done = subprocess.run(shlex.split(asking.replace(":8000", f":{server.port}")), capture_output=True, text=True)
    assert len(json.loads(done.stdout)["result"][0]) == 3, done.stderr


def _is_closed_to_other_pages(port: int) -> None:
    """MLflow alone answers every page of `http://localhost:*`, with its reader's rights."""
    path = "/api/2.0/mlflow/experiments/get-by-name?experiment_name=Default"
    near, own = f"http://localhost:{port}", f"host: 127.0.0.1:{port}\r\n"
    for origin in ("http://localhost:1", "http://127.0.0.1:1", near, "http://evil.example", "null"):
        assert get(port, f"{own}origin: {origin}\r\n", path)[:12] == b"HTTP/1.1 403", origin
    for host in ("evil.example", f"192.168.evil.example:{port}"):
        assert get(port, f"host: {host}\r\n", path)[:12] == b"HTTP/1.1 403", host
    assert get(port, f"host: localhost:{port}\r\norigin: {near}\r\n", path)[:12] == b"HTTP/1.1 200"
    start = f"GET {path} HTTP/1.1\r\nhost: localhost\r\n".encode()
    assert exchange(port, start, *[b"x: " + b"a" * 1000 + b"\r\n"] * 1000)[:12] in (b"HTTP/1.1 400", b"")


@pytest.mark.slow
@pytest.mark.servers
@pytest.mark.timeout(600)
def test_both_pages_answer(tmp_path: Path) -> None:
    """What `make ui` starts, on free ports: two servers and the form of a run, which all end with it."""
    clone = Toy(tmp_path / "clone").root
    ports = {"PORT_PREFECT": str(free_port()), "PORT_MLFLOW": str(free_port())}
    home = {"PREFECT_HOME": str(tmp_path / "prefect"), "PYTHONPATH": str(ROOT)}
    keep = {key: value for key, value in _plain().items() if not key.startswith(("PREFECT_", "MLFLOW_"))}
    patient = (
        "import flows, flows.server, flows.ui; flows.server.SECONDS_TO_START = 250; exit(flows.command(flows.ui.main))"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", patient], cwd=clone, env={**keep, **ports, **home}, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        printed = [process.stdout.readline() for _ in range(4)]
        for port, line in zip(ports.values(), printed[1:3], strict=True):
            assert port in line
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=30) as answer:
                assert answer.status == 200
        _is_closed_to_other_pages(int(ports["PORT_MLFLOW"]))
        assert printed[3].startswith(f"Form:    http://127.0.0.1:{ports['PORT_PREFECT']}/deployments/deployment/")
    finally:
        process.terminate()
        process.wait(60)
