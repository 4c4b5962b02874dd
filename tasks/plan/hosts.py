"""Looks at the hosts of a cluster file before a run: whether they answer, are alike, and have a GPU for each worker.

A host of which the file says how to start or to reach a worker is asked in the way in which its workers will be: so a
name that does not resolve, other code, libraries or Python, an address at which it cannot reach this host, and a
network device that it does not have are found here and not after hours, at the start of training.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

from tasks import cluster, conf
from tasks.cluster import Cluster, HostConf
from tasks.crew import Crew, CrewError
from tasks.plan.machine import Machine
from tasks.plan.run_settings import RunSettings

_WORKER = "tasks.plan.host_worker"
Divided = Mapping[str, tuple[int, str]]
"""`engine` and `generator` -> number of processes, and file and key that say so."""


def divided(run: RunSettings) -> dict[str, tuple[int, str]]:
    """The run's numbers of workers and generators, where these are processes that the cluster file places."""
    found = {}
    for folder, key, tree in (("generator", "generators", run.generator()), ("engine", "workers", run.engine())):
        if key in tree:
            found[folder] = (tree[key], f"{conf.CONF}/{folder}/{getattr(run.params, folder)}.yaml: {key}")
    return found


def check_places(run: RunSettings) -> None:
    """Raise the ValueError for a wrong cluster file, or for fewer places than the run has processes."""
    chosen = cluster.load(root=run.root)
    for of_kind in divided(run).values():
        chosen.places(*of_kind)


def problem(run: RunSettings, here: Machine) -> str:
    """One line where the hosts of this run's processes do not do for it, else nothing.

    Args:
        run: settings of the run.
        here: this machine.

    Raises:
        ValueError: see `check_places`.
    """
    counts, chosen = divided(run), cluster.load(root=run.root)
    if not counts:
        return _of_generator(run, here.num_gpus, 1) if here.gpu is not None else ""
    used = {name: Counter(place.host for place in chosen.places(*of_kind)) for name, of_kind in counts.items()}
    names = set().union(*used.values())
    hosts = [host for host in chosen.hosts if host.name in names]
    try:
        machines = _seen(chosen, hosts, here)
    except CrewError as error:
        return str(error)

    if told := _differing(run, hosts, machines):
        return told
    for host in hosts:
        counted = {name: (used[name][host.name], where) for name, (_, where) in counts.items()}
        if told := _of_gpus(run, host, machines[host.name], counted):
            return told
    return ""


def _seen(chosen: Cluster, hosts: list[HostConf], here: Machine) -> dict[str, Machine]:
    """The machine of each host by name; all are asked at once, but for this one where the file says nothing of it.

    Raises:
        CrewError: one cannot be reached, has other code or libraries, or lacks its network device.
    """
    machines = {host.name: here for host in hosts}
    bare = [replace(host, workers=1, devices=()) for host in hosts]
    asked = [host for host in bare if host != HostConf(host.name) or chosen.address != Cluster.address]
    if asked:
        with Crew(_WORKER, len(asked), replace(chosen, hosts=tuple(asked))) as workers:
            found = workers.call("machine", [(host.interface, host.address) for host in asked])
        machines |= {host.name: machine for host, machine in zip(asked, found, strict=True) if host.start}
    return machines


def _differing(run: RunSettings, hosts: list[HostConf], machines: Mapping[str, Machine]) -> str:
    """One line for a host that trains on another kind of device, or in another type, than the first."""
    first, *others = hosts
    kinds = {name: "processor" if machine.gpu is None else "GPU" for name, machine in machines.items()}
    types = {name: "bfloat16" if one.trains_in_bfloat16 else "float32" for name, one in machines.items()}
    for host in others:
        if kinds[host.name] != kinds[first.name]:
            return (
                f"{cluster.chosen_file()}: {host.name} computes on a {kinds[host.name]}, and {first.name} on a "
                f"{kinds[first.name]}: expected the same of all hosts."
            )
        if types[host.name] != types[first.name] and run.training().dtype != "float32":
            return (
                f"{cluster.chosen_file()}: {host.name} computes in {types[host.name]}, and {first.name} in "
                f"{types[first.name]}, because not every {kinds[first.name]} has instructions for bfloat16: expected "
                "one type. Set "
                f"`train: {{dtype: float32}}` in {conf.CONF}/scale/{run.params.scale}.yaml, or name hosts that are "
                "alike."
            )
    return ""


def _of_gpus(run: RunSettings, host: HostConf, machine: Machine, counts: Divided) -> str:
    """One line where a host has too few GPUs; one without any computes on its processor."""
    devices = f"{cluster.chosen_file()}: {host.name}: devices={list(host.devices)}"
    if machine.gpu is None:
        return f"{devices}: expected none: the host has no GPU." if host.devices else ""
    there = f"{machine.num_gpus} GPU{'s' if machine.num_gpus > 1 else ''}"
    if host.devices and max(host.devices) >= machine.num_gpus:
        return f"{devices}: expected numbers below {machine.num_gpus}: the host has {there}."
    num_gpus = len(host.devices) or machine.num_gpus
    workers, where = counts.get("engine", (0, ""))
    if workers > num_gpus:
        return (
            f"{where}: {workers} of them are placed on {host.name}, which has {there}, expected one for each. Lower "
            "the number, take PRESET=3b-1gpu, or let CLUSTER= name more hosts."
        )
    return _of_generator(run, num_gpus, counts.get("generator", (1, ""))[0])


def _of_generator(run: RunSettings, num_gpus: int, generators: int) -> str:
    """One line where the run's vLLM engines take more than so many GPUs have."""
    tree = run.generator()
    tree = tree.get("of", tree)
    if "gpu_memory_utilization" not in tree:
        return ""
    where = f"{conf.CONF}/generator/{run.params.generator}.yaml"
    each, share = tree["tensor_parallel_size"], tree["gpu_memory_utilization"]
    if each > num_gpus:
        return f"{where}: tensor_parallel_size={each}: expected at most {num_gpus}, the GPUs of a host."
    on_one = -(-generators * each // num_gpus)
    if on_one > 1 and on_one * share > 1:
        return (
            f"{where}: {generators} generators on {num_gpus} GPU{'s' if num_gpus > 1 else ''} take {on_one * share:g} "
            f"of the memory of one (gpu_memory_utilization={share}), expected at most 1. Lower one of the two."
        )
    return ""
