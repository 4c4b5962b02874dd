"""Several processes behind one port: the answers of one, and nothing is left over, however they end."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tasks.server.__main__ import main
from tasks.server.metrics import FOLDER
from tests.server.running import ROOT, ServerProcess, ends_with_make, free_port
from tests.server.test_server import Load

pytestmark = [pytest.mark.slow, pytest.mark.servers]

LIMITS = ("--set", "stop_timeout_s=5")


def workers(server: ServerProcess) -> list[psutil.Process]:
    """The processes that answer."""
    return psutil.Process(server.process.pid).children()


def wait_for(true: Callable[[], bool], seconds: float = 90) -> None:
    until = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < until
        time.sleep(0.05)


def ask(url: str, **body: Any) -> httpx.Response:
    """On a connection of its own, so that any process may get it."""
    return httpx.post(f"{url}/retrieve", json=body, timeout=60)


def metric(text: str, name: str) -> float:
    found = re.search(rf"^{re.escape(name)} (\S+)$", text, re.MULTILINE)
    assert found, f"{name} is not in\n{text}"
    return float(found[1])


def ends(family: list[psutil.Process], port: int) -> None:
    """None of these lives on, and nobody listens on the port."""
    _, alive = psutil.wait_procs(family, 20)
    for one in alive:
        one.kill()
    assert not alive
    with socket.socket() as again:
        again.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        again.bind(("127.0.0.1", port))


@pytest.fixture(scope="module")
def pair(world_index: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """Two processes that share a cache."""
    cache = f"cache_folder={tmp_path_factory.mktemp('pair')}/cache"
    with ServerProcess(world_index, "--port", "0", "--processes", "2", "--set", cache, *LIMITS) as running:
        yield running


def test_both_answer_as_one_process_and_the_metrics_are_sums(pair, local):
    queries = [[f"film city {i % 7}", f"mayor {i}"] for i in range(60)]
    for i, two in enumerate(queries):
        result = ask(pair.url, queries=two, topk=1 + i % 5, return_scores=True).json()["result"]
        found = [[(hit["document"]["id"], hit["score"]) for hit in hits] for hits in result]
        expected = local.search(two, 1 + i % 5)
        assert found == [[(hit.passage_id, hit.score) for hit in hits] for hits in expected]

    # 60 connections: the chance that one of two processes got none of them is below 1e-17.
    family = workers(pair)
    assert len(family) == 2
    used = [sum(one.cpu_times()[:2]) for one in family]
    for _ in range(60):
        ask(pair.url, queries=[f"other {_} {j}" for j in range(40)], topk=20)
    assert all(sum(one.cpu_times()[:2]) > before for one, before in zip(family, used, strict=True))

    texts = {httpx.get(f"{pair.url}/metrics").text for _ in range(12)}
    for text in texts:
        assert metric(text, 'search_requests_total{path="/retrieve",status="200"}') == 120
        assert metric(text, "search_request_seconds_count") == 120
        assert metric(text, "search_requests_in_work") == 0
        assert metric(text, "search_cache_hits_total") + metric(text, "search_cache_misses_total") == 120 + 60 * 40
        for one in family:
            assert metric(text, f'process_resident_memory_bytes{{process="{one.pid}"}}') > 1e7


def test_the_memory_map_of_the_index_is_shared(pair, world_index):
    for one in workers(pair):
        mapped = {Path(part.path) for part in one.memory_maps()}
        assert world_index / "passages.jsonl" in mapped


def test_one_that_is_killed_is_started_again_while_the_other_answers(pair, local):
    family = workers(pair)
    ask(pair.url, queries=["city"])
    before = metric(httpx.get(f"{pair.url}/metrics").text, 'search_requests_total{path="/retrieve",status="200"}')
    killed, other = family
    gauges = Path(killed.environ()[FOLDER]) / f"gauge_livesum_{killed.pid}.db"
    assert gauges.exists()
    load = Load(pair.url, 4)
    try:
        load.wait_for_answers(30)
        killed.kill()
        wait_for(lambda: len(workers(pair)) == 2 and killed.pid not in {one.pid for one in workers(pair)})
        load.wait_for_answers(30)
    finally:
        answers = load.end()

    # Only what was in work or in the queue of the killed process is lost; a client's next try finds the other one.
    failed = [answer for answer in answers if answer[1] != 200]
    assert {status for _, status, _ in failed} <= {0}
    assert len(failed) <= 8
    assert all(hits == 2 for _, status, hits in answers if status == 200)
    (new,) = {one.pid for one in workers(pair)} - {other.pid}
    wait_for(lambda: f'process="{new}"' in httpx.get(f"{pair.url}/metrics").text)
    text = httpx.get(f"{pair.url}/metrics").text
    assert f'process="{killed.pid}"' not in text
    # A request is counted after its answer is sent: the killed process may have sent one to each client that is not.
    least = before + len(answers) - len(failed) - 4
    assert metric(text, 'search_requests_total{path="/retrieve",status="200"}') >= least
    assert metric(text, "search_requests_in_work") == 0, "what the killed process had in work is not counted for ever"
    assert not gauges.exists(), "nor what its other gauges had"
    assert f"process {killed.pid} ended with status -9; it is started again now" in pair.log.read_text()


@pytest.mark.parametrize(
    ("how", "num_killed"), [(signal.SIGTERM, 0), (signal.SIGINT, 0), (signal.SIGKILL, 0), (signal.SIGKILL, 1)]
)
def test_the_end_leaves_no_process_and_no_file(world_index, tmp_path, how, num_killed):
    """Also where one process is killed together with the one that watches it."""
    env = {"TMPDIR": str(tmp_path)}
    words = ("--port", "0", "--processes", "2", "--set", "cache_bytes=0", *LIMITS)
    with ServerProcess(world_index, *words, env=env) as running:
        family = workers(running)
        assert len(family) == 2
        load = Load(running.url, 4)
        try:
            load.wait_for_answers(20)
            running.process.send_signal(how)
            for one in family[:num_killed]:
                one.kill()
            status = running.process.wait(40)
            ends(family, running.port)
        finally:
            answers = load.end()
    assert status == (-9 if how == signal.SIGKILL else 0), running.log.read_text()
    assert {status for _, status, _ in answers} <= {0, 200, 503}
    assert "Traceback" not in running.log.read_text()
    wait_for(lambda: not list(tmp_path.glob("search-server-*")), 10)


def test_make_leaves_nothing_behind(world_index):
    ends_with_make("search-server", f"INDEX={world_index}", "ARGS=--processes 2 --set cache_bytes=0")


def test_one_that_opens_another_index_ends_them_all(world_index, corpus_of, tmp_path):
    """The folder is replaced while they serve, and one of them is killed."""
    index = corpus_of([("Bern", "A city."), ("Aare", "A river.")])
    words = ("--port", "0", "--processes", "2", "--set", "cache_bytes=0", *LIMITS)
    with ServerProcess(index, *words) as running:
        family = workers(running)
        index.rename(tmp_path / "old")
        index.symlink_to(world_index)
        family[0].kill()
        assert running.process.wait(90) == 1
        ends(family, running.port)
    assert re.search(r"error: process \d+ opened another index \(ready: .* than the first", running.log.read_text())


def test_what_keeps_them_from_starting_is_told_once(world_index, tmp_path):
    def fails(*words: str) -> list[str]:
        command = [sys.executable, "-m", "tasks.server", *words, "--processes", "3"]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=90, env={"PATH": ""})
        assert done.returncode == 1, done
        assert "Traceback" not in done.stderr, done.stderr
        return [line for line in done.stderr.splitlines() if line.startswith("error: ")]

    (told,) = fails("--index", str(tmp_path), "--port", "0")
    assert "no search index here (manifest.json is missing)" in told
    port = str(free_port())
    with ServerProcess(world_index, "--port", port, "--processes", "2", "--set", "cache_bytes=0", *LIMITS) as one:
        (folder, *_) = {Path(worker.environ()[FOLDER]) for worker in workers(one)}
        # A shared port would be open to a second server of this user: half of the answers would be of another index.
        (told,) = fails("--index", str(world_index), "--port", port)
        assert told.startswith(f"error: cannot have port {port} of 127.0.0.1 (Address already in use)")
        assert folder.is_dir()
        one.process.kill()
        wait_for(lambda: not folder.exists())
    (told,) = fails("--index", str(world_index), "--host", "0.0.0.0")
    assert "SEARCH_SERVER_API_KEY is not set" in told


@pytest.mark.parametrize("count", ["0", "257", "-1", "two", "1.5"])
def test_a_number_of_processes_that_is_none(count, capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--index", "none", f"--processes={count}"])
    assert ended.value.code == 2
    assert f"argument --processes: found {count!r}, expected 1 to 256" in capsys.readouterr().err
