"""Adds up memory and disk of a run before its first step, and says what does not fit and which setting helps.

The sums are upper bounds for planning (`memory.py`, `disk.py`): they take the longest rows that the budgets allow. So a
run that fits does not end in the middle because a longer row came.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

from tasks import cluster, conf, generate, methods
from tasks.agent.free_play import require_free
from tasks.agent.rollout import RolloutConf
from tasks.base.settings import BaseConf, FormatConf
from tasks.conf import require
from tasks.model import Dtype
from tasks.plan import disk, hosts
from tasks.plan.machine import Machine, free_disk, this_machine
from tasks.plan.memory import START, Demand, Division, Learner, Served, Taught
from tasks.plan.model_size import ModelSize, of_folder, of_tiny
from tasks.plan.peak import Peak, Systems, helping, helping_to_teach, worst
from tasks.plan.run_settings import RunSettings
from tasks.reader.settings import ReaderConf
from tasks.train.ahead import require_apart
from tasks.train.settings import TrainConf

VARIABLE = "BREADCRUMB_PREFLIGHT"
CLOSE = 0.9
SMALL = 50_000_000
"""Weights of a model below which nothing is printed where all fits."""
UNPACKED = 4
"""Bytes of text behind a byte of a gzip file, about."""
NO_SETTING = "take a smaller model or a machine with more memory"
NO_CRITIC = ", or a method without a critic, such as search_r1_grpo"


def check(run: RunSettings, machine: Callable[[], Machine] = this_machine) -> None:
    """Compare what the run takes with what there is; prints both for a large model, and a warning where it is close.

    For a pretrained model it also prints the number format of its forward passes.

    Raises:
        ValueError: something does not fit, and the environment does not ask for a warning only; the policy's folder is
            no model; or the hosts have fewer places than the run has processes.
    """
    asked = os.environ.get(VARIABLE, "")
    require(asked in ("", "warn"), VARIABLE, asked, "warn, which starts although something does not fit, or nothing")
    hosts.check_places(run)
    model, here = _size(run), machine()
    systems = systems_of(run, model, here)
    peak, room = worst(systems), _Room(run, systems)
    if run.model.pretrained is not None:
        _say_dtype(systems[0][1])

    found = (hosts.problem(run, here), _of_length(run, systems), _of_memory(run, peak, systems), room.problem())
    problems = list(filter(None, found))
    if problems and not asked:
        raise ValueError(f"{' '.join(problems)} {VARIABLE}=warn starts in spite of it.")
    for problem in problems:
        print(f"warning: {problem}", file=sys.stderr)
    if not problems:
        _say(model, peak, room)


def _size(run: RunSettings) -> ModelSize:
    if run.model.tiny is not None:
        return of_tiny(run.model.tiny)
    assert run.model.pretrained is not None
    return of_folder(run.root / run.model.pretrained.folder)


def systems_of(run: RunSettings, model: ModelSize, machine: Machine) -> Systems:
    """The demand of every system that trains; of the first one if none does."""
    teaching: BaseConf | FormatConf | None = None
    if run.model.tiny is not None:
        teaching = run.scale(BaseConf, "base")
    elif run.teaches_format:
        teaching = run.scale(FormatConf, "format")

    lora, division = run.model.lora, _division(run)
    others = (*_reward_models(run, model), *_readers(run))
    generators = _generators(run)
    served = _served(run, generators, machine.num_gpus)
    plain = Demand(
        model, machine, run.training(), run.rollout(), lora, None, teaching, served, division, others, generators
    )
    trained = [(name, _learning(run, name, plain)) for name in run.params.systems if run.is_method(name)]
    return trained or [(run.params.systems[0], plain)]


def _reward_models(run: RunSettings, policy: ModelSize) -> Iterator[Taught]:
    """Those that are trained for services."""
    for name in run.params.reward_models:
        chosen = run.reward_model(name)
        model = policy if chosen.backbone is None else of_folder(run.root / chosen.backbone)
        tokens = max(chosen.fit.max_pack_tokens, chosen.fit.max_tokens)
        yield Taught(
            f"reward model {name}",
            model,
            chosen.fit.dtype,
            tokens,
            chosen.fit.max_tokens,
            keeps_all=chosen.fit.keep_activations,
            is_scored=True,
        )


def _readers(run: RunSettings) -> Iterator[Taught]:
    """Those that are trained for services, from random weights and on the processor."""
    for name in run.params.readers:
        made = run.load(ReaderConf, "reader", name)
        model, tokens = of_tiny(made.architecture), max(made.max_batch_tokens, made.architecture.max_positions)
        yield Taught(f"reader {name}", model, "float32", tokens, made.architecture.max_positions, on_gpu=False)


def _division(run: RunSettings) -> Division | None:
    """The run's workers.

    Raises:
        ValueError: they are more than the hosts have places.
    """
    tree, counts = run.engine(), hosts.divided(run)
    if "engine" not in counts:
        return None
    used = Counter(place.host for place in cluster.load(root=run.root).places(*counts["engine"]))
    return Division(tree["workers"], max(used.values()), tree["stage"], tree["offload"], tree["bucket"])


def _served(run: RunSettings, generators: int, num_gpus: int) -> Served | None:
    """The run's generator, or the fleet's on one host, if it takes a share of memory for itself."""
    tree = run.generator()
    tree = tree.get("of", tree)  # Of a fleet.
    if "gpu_memory_utilization" not in tree:
        return None
    on_one = -(-max(1, generators) * tree["tensor_parallel_size"] // num_gpus)
    return Served(on_one * tree["gpu_memory_utilization"], int(tree["cpu_kv_cache_gib"] * 2**30))


def _generators(run: RunSettings) -> int:
    """Processes of the run's fleet, the most on one host; 0 without a fleet."""
    counts = hosts.divided(run)
    if "generator" not in counts:
        return 0
    return max(Counter(place.host for place in cluster.load(root=run.root).places(*counts["generator"])).values())


def _learning(run: RunSettings, system: str, plain: Demand) -> Demand:
    """The demand of a method: its own budgets, critic and reference."""
    tree, where = run.method(system), f"{conf.CONF}/method/{system}.yaml"
    method = methods.build(tree, None, where)
    train, rollout = run.training(tree["train"], where), run.rollout(tree["rollout"], where)
    _check_generator(run, train, rollout)
    _check_workers(run, system, train.num_questions(method.sampler.size) * method.sampler.size // train.minibatches)
    # A sampler that chooses among candidates also holds the row that they continue.
    rows = train.num_questions(method.sampler.size) * (method.sampler.size + 1)
    learner = Learner(
        method.advantage.needs_values,
        method.needs_reference,
        method.sampler.from_start,
        max(rows, train.validate_questions),
    )
    return replace(plain, train=train, rollout=rollout, learner=learner)


def _check_generator(run: RunSettings, train: TrainConf, rollout: RolloutConf) -> None:
    """Raise the ValueError for settings that need another kind of generator than the run has."""
    kind = generate.started_by(generate.load(run.params.generator, run.root))
    if kind is None:
        return
    try:
        require_apart(train, kind)
        require_free(rollout, getattr(kind, "rows_are_free", False))
    except ValueError as error:
        files = f"{conf.CONF}/scale/{run.params.scale}.yaml, {conf.CONF}/generator/{run.params.generator}.yaml"
        raise ValueError(f"{files}: {error}") from error


def _check_workers(run: RunSettings, system: str, rows: int) -> None:
    """Raise the ValueError for more workers than an update has rows."""
    workers, where = hosts.divided(run).get("engine", (0, ""))
    require(workers <= rows, where, workers, f"at most {rows}, the rows of an update of {system}")


def _of_length(run: RunSettings, systems: Systems) -> str:
    """One line where a play may be longer than the model can place tokens, else nothing."""
    name, demand = max(systems, key=lambda one: one[1].rollout.max_total_tokens)
    longest, positions = demand.rollout.max_total_tokens, demand.model.positions
    if not positions or longest <= positions:
        return ""
    prompt = f"max_prompt_tokens: {positions // 2}, " if demand.rollout.max_prompt_tokens >= positions else ""
    return (
        f"{conf.CONF}/scale/{run.params.scale}.yaml, {conf.CONF}/model/{run.params.model}.yaml: {name} plays up to "
        f"{longest} tokens (`rollout: max_total_tokens`), and the model was made for {positions} "
        f"(max_position_embeddings). Set `rollout: {{{prompt}max_total_tokens: {positions}}}` in the model's "
        "file."
    )


def _of_memory(run: RunSettings, peak: Peak, systems: Systems) -> str:
    """One line where the peak is more than there is, else nothing."""
    if peak.share <= 1:
        return ""
    stage = ", stage `base`" if peak.phase.name == START else ""
    return (
        f"{conf.CONF}/scale/{run.params.scale}.yaml, {conf.CONF}/model/{run.params.model}.yaml: {peak.system} takes up "
        f"to {gb(peak.size)} of memory ({peak.phase.name}{stage}), and there are {gb(peak.memory.size)} "
        f"({peak.memory.source}{_no_gpu(systems)}). Most of it: {_items(peak)}. {_advice(systems)}"
        f"{_of_teaching(peak, systems)}{_other_scale(run)}"
    )


def _items(peak: Peak) -> str:
    return ", ".join(f"{item.name} {gb(item.size)}" for item in peak.phase.largest(peak.place, 3))


def _of_teaching(peak: Peak, systems: Systems) -> str:
    """A sentence on stage `base` where another phase is the peak and it does not fit either, else nothing."""
    taught, helps = worst(systems, START), helping_to_teach(systems)
    if peak.phase.name == START or taught.share <= 1 or helps is None:
        return ""
    setting, left = helps
    is_enough = left.share <= 1
    advice = (
        f"{setting} (up to {gb(left.size)})" if is_enough else f"no setting is enough, {setting} needs {gb(left.size)}"
    )
    return (
        f" Stage `base`, which teaches the start policy, does not fit either: up to {gb(taught.size)}. Most of it: "
        f"{_items(taught)}. For this stage alone: {advice}."
    )


def _no_gpu(systems: Systems) -> str:
    """What is added for a model that is made for GPUs, where there is none."""
    _, demand = systems[0]
    return ", which has no GPU" if demand.machine.gpu is None and demand.model.num_weights >= 20 * SMALL else ""


def _other_scale(run: RunSettings) -> str:
    """The scale for a pretrained model that has the budgets of a tiny one."""
    is_other = run.params.scale == "laptop" and run.model.pretrained is not None
    return " SCALE=small has budgets for a pretrained model." if is_other else ""


def _advice(systems: Systems) -> str:
    steps = helping(systems)
    told = ", then ".join(f"{setting} (up to {gb(left.size)}, {left.phase.name})" for setting, left in steps)
    if steps and steps[-1][1].share <= 1:
        return f"Set {told}."
    critic = NO_CRITIC if any(demand.learner and demand.learner.has_critic for _, demand in systems) else ""
    return f"{f'Not enough: {told}' if told else 'No setting helps'}; {NO_SETTING}{critic}."


class _Room:
    """What a run writes to the disk of its clone, beside what is free there."""

    def __init__(self, run: RunSettings, systems: Systems) -> None:
        self._run = run
        self._demands = [demand for _, demand in systems]
        self._data = _data(run)
        self._copies = disk.copies_of(run.root)
        self.room = self._with()
        self.needed = max(0, self.room.size - disk.there(run.root, self._copies))
        self.free = free_disk(run.root)

    def _with(self, seeds: int = 0, copies: int = 0) -> disk.Room:
        seeds, copies = seeds or len(self._run.params.seeds), copies or self._copies
        return disk.room(self._demands, seeds, copies, self._data)

    def problem(self) -> str:
        """One line where more is written than is free, else nothing."""
        if self.needed <= self.free:
            return ""
        items = ", ".join(f"{name} {gb(size)}" for name, size in self.room.largest(3))
        helps = []
        if (work := disk.size_of(self._run.root / disk.WORK)) > 0:
            helps.append(f"delete resume folders of runs that have ended in {disk.WORK} ({gb(work)} in all)")
        if self._copies > 1:
            saved = self.room.size - self._with(copies=1).size
            helps.append(f"`dvc config --local cache.type hardlink,symlink` ({gb(saved)} less)")
        if (seeds := len(self._run.params.seeds)) > 1:
            helps.append(f"one seed in place of {seeds} ({gb(self.room.size - self._with(seeds=1).size)} less)")
        helps.append("fewer systems at once, or a larger disk")
        return (
            f"{conf.PARAMS}: the run writes up to {gb(self.needed)}, and {gb(self.free)} are free on the disk of the "
            f"clone. Most of it: {items}. Helps: {'; '.join(helps)}."
        )


def _data(run: RunSettings) -> int:
    """Bytes of data that are read; those of a generated world are few."""
    folder = run.root / run.params.data_folder
    if run.data.kind != "folder" or not folder.is_dir():
        return 0
    return disk.size_of(folder, "*.jsonl") + UNPACKED * disk.size_of(folder, "*.jsonl.gz")


def _say(model: ModelSize, peak: Peak, room: _Room) -> None:
    """One line where it is close, or the model is large."""
    told = (
        f"memory up to {gb(peak.size)} of {gb(peak.memory.size)} ({peak.system}, {peak.phase.name}), "
        f"disk up to {gb(room.needed)} of {gb(room.free)}"
    )
    if peak.share > CLOSE or room.needed > CLOSE * room.free:
        print(f"warning: this run nearly fills the machine: {told}", file=sys.stderr)
    elif model.num_weights >= SMALL:
        print(f"this run takes {told}", flush=True)


def _say_dtype(demand: Demand) -> None:
    """The number format of the forward passes, and why; a second line where the format is taught in another one."""
    print(f"it computes in {_dtype(demand.train.dtype, demand)}", flush=True)
    if isinstance(demand.teaching, FormatConf) and demand.teaching.dtype != demand.train.dtype:
        print(f"stage base, which teaches it, computes in {_dtype(demand.teaching.dtype, demand)}", flush=True)


def _dtype(asked: Dtype, demand: Demand) -> str:
    which = "processor" if demand.place == "memory" else "GPU"
    if asked == "float32":
        return "float32: `dtype: float32` asks for it"
    if demand.machine.trains_in_bfloat16:
        return f"bfloat16: this {which} has instructions for it (`dtype: {asked}`)"
    return f"float32: this {which} has no instructions for bfloat16 (`dtype: {asked}`)"


def gb(size: int) -> str:
    """Bytes as a person reads them: 10^9 bytes are 1 GB."""
    return f"{size / 1e9:.1f} GB" if size < 100e9 else f"{size / 1e9:.0f} GB"
