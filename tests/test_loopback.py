"""A proxy of the environment, meant for the internet, never stands between this machine and its own servers."""

import os
import re
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import httpx
import pytest
import requests
from hypothesis import given
from hypothesis import strategies as st

from flows import server as prefect_server
from tasks import loopback
from tests import shipped
from tests.pipeline.toy import HOUSE
from tests.services.completions import serving

DEAD = ["http://127.0.0.1:9", "127.0.0.1:9", "socks5://127.0.0.1:9", "socks5h://127.0.0.1:9", "socks4://127.0.0.1:9",
        "socks://127.0.0.1:9/", "http://user:pa#ss@127.0.0.1:9", "http://127.0.0.1:9x", "http://[::1"]  # fmt: skip
NAMES = ["http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"]
MAKERS = {"Client", "AsyncClient", "HTTPTransport", "urlopen", "build_opener", "Elasticsearch", "OpenAI", "Session",
          "HTTPConnection", "HTTPSConnection", "ClientSession", "PoolManager", "MlflowClient"}  # fmt: skip
CALL = re.compile(rf"(?<!def )(?<!class )\b({'|'.join(sorted(MAKERS))})\((?!\))")
MADE_IN = {
    "flows/server.py": {"build_opener"},
    "tasks/retrieval/elastic_server.py": {"Elasticsearch"},
    "tasks/retrieval/remote.py": {"Client"},
    "tasks/runner/upload.py": {"MlflowClient"},
    "tasks/services/endpoint.py": {"Client"},
}
"""What makes a client of HTTP; a new one belongs here, and into a test below."""


@pytest.fixture
def here() -> Iterator[str]:
    """A server on this machine that answers everything with a JSON object."""

    class Handler(BaseHTTPRequestHandler):
        def do_any(self) -> None:
            body = b'{"experiments": [], "version": {"number": "8.19.0"}, "tagline": "You Know, for Search"}'
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(200)
            self.send_header("content-type", "application/json")
            self.send_header("x-elastic-product", "Elasticsearch")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = do_any  # noqa: N815

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as stub:
        threading.Thread(target=stub.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{stub.server_port}"
        stub.shutdown()


@pytest.fixture
def dead(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every variable names a proxy that does not answer, or that no library knows."""
    for name in ("no_proxy", "NO_PROXY", loopback.ASIDE):
        monkeypatch.setenv(name, "x")  # So that it is removed afterwards, whatever the test does.
        monkeypatch.delenv(name)
    for name in NAMES:
        monkeypatch.setenv(name, request.param)
    loopback.spare()
    return str(request.param)


def test_every_place_that_makes_a_client_is_known() -> None:
    found: dict[str, set[str]] = {}
    for path in [*shipped.files("tasks", "*.py"), *shipped.files("flows", "*.py")]:
        if names := set(CALL.findall(path.read_text(encoding="utf-8"))):
            found[path.relative_to(HOUSE).as_posix()] = names
    assert found == MADE_IN


@pytest.mark.parametrize("dead", DEAD, indirect=True)
def test_clients_of_this_machine_see_no_proxy(dead: str, here: str) -> None:
    import requests
    from elasticsearch import Elasticsearch
    from websockets.proxy import get_proxy
    from websockets.uri import parse_uri

    from tasks.services.endpoint import ChatEndpoint

    assert prefect_server._is_well(here)
    assert requests.get(here, timeout=5).status_code == 200  # As MLflow asks.
    assert urllib.request.urlopen(here, timeout=5).status == 200
    assert Elasticsearch(here, max_retries=0).info()["version"]["number"] == "8.19.0"
    assert get_proxy(parse_uri(here.replace("http", "ws"))) is None  # Prefect's events.
    if loopback._is_known(dead):  # With another one no client can be made.
        assert httpx.get(here, timeout=5).status_code == 200
    with serving() as completions:
        chat = ChatEndpoint(completions.conf(), HOUSE / ".scratch/none")
        assert chat._http.get(here).status_code == 200
        chat.close()


@pytest.mark.parametrize("dead", DEAD[:3], indirect=True)
def test_a_server_elsewhere_goes_on_using_the_proxy(dead: str, tmp_path: Any) -> None:
    from tasks.services import ServiceError
    from tasks.services.endpoint import ChatEndpoint

    with serving() as completions:
        conf = completions.conf(base_url="http://elsewhere.example", retries=0)
    if not loopback._is_known(dead):
        with pytest.raises(ServiceError, match=r"the proxy of the environment .* cannot be used"):
            ChatEndpoint(conf, tmp_path)
        return
    chat = ChatEndpoint(conf, tmp_path)
    with pytest.raises(ServiceError, match=r"(?i)refused"):  # By the proxy's port: the name was not looked up.
        list(chat.replies([[{"role": "user", "content": "x"}]]))
    chat.close()


def _clear(patch: pytest.MonkeyPatch) -> None:
    """No variable of proxies is set; what a test sets is removed after it, whoever sets it."""
    for name in ("no_proxy", "NO_PROXY", *NAMES):
        patch.setenv(name, "x")
        patch.delenv(name)


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({"no_proxy": "corp.example"}, "corp.example"),
        ({"NO_PROXY": "corp.example, .local"}, "corp.example,.local"),
        ({"no_proxy": "[::1],127.0.0.1"}, "::1,127.0.0.1"),
        ({}, ""),
    ],
)
def test_what_the_user_excluded_stays_excluded(
    given: dict[str, str], wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _clear(monkeypatch)
    loopback.spare()
    assert "no_proxy" not in os.environ
    for name, value in {**given, "all_proxy": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    for _ in range(2):  # A child process does it again.
        loopback.spare()
    names = [*filter(None, wanted.split(",")), *loopback.NAMES]
    assert os.environ["no_proxy"] == os.environ["NO_PROXY"] == ",".join(dict.fromkeys(names))


ODD = ["fd00::/8", "localhost,10.0.0.0/8,fd00::/8", "::1/128", "[::1]:80", "x:y:z", "ü.de", "http://[::1", "a:99999",
       "[", "]", "[]", "a b", "://", "http://", "a/b", "%", "a@b", "10.0.0.0/99"]  # fmt: skip
"""What httpx cannot read, or could be thought not to."""


@pytest.mark.parametrize("proxy", ["", "http://127.0.0.1:9"])
@pytest.mark.parametrize("given", ODD)
def test_whatever_is_excluded_a_client_can_be_made(given: str, proxy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("no_proxy", f"corp.example,{given}")
    if proxy:
        monkeypatch.setenv("all_proxy", proxy)
    loopback.spare()
    with httpx.Client():
        pass
    assert os.environ["no_proxy"].startswith("corp.example,")


@given(st.lists(st.text(st.characters(exclude_characters="\0", exclude_categories=["Cs"])), max_size=3))
def test_no_text_in_no_proxy_stops_a_client(names: list[str]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _clear(patch)
        patch.setenv("NO_PROXY", ",".join(names))
        patch.setenv("no_proxy", "")
        loopback.spare()
        with httpx.Client():
            pass


@pytest.mark.parametrize("given", ["*", " * ", "corp.example,*"])
def test_a_star_excludes_everything_for_every_client(given: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _clear(monkeypatch)
    monkeypatch.setenv("no_proxy", given)
    monkeypatch.setenv("all_proxy", "http://127.0.0.1:9")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    for _ in range(2):
        loopback.spare()
    assert requests.utils.should_bypass_proxies("http://192.0.2.2/x", None)
    assert urllib.request.proxy_bypass("192.0.2.2")
    with httpx.Client() as client:
        assert client._mounts == {}, "no proxy for any address"


CHILD = """\
import sys
import flows
from pathlib import Path
from flows.child import Stopper, execute
from prefect import get_client

print(get_client(sync_client=True).request("GET", "/admin/version").status_code)
execute("see", ["this"], Path(sys.argv[1]), print, Stopper())
"""


def test_prefects_client_is_made_with_any_proxy_and_stages_get_theirs_back(here: str, tmp_path: Any) -> None:
    proxy = "socks://127.0.0.1:9/"
    (tmp_path / "this.py").write_text(
        "import os\nprint(*map(os.environ.get, ['all_proxy', 'HTTPS_PROXY', 'http_proxy']))\n"
    )
    gone = {name: value for name, value in os.environ.items() if "proxy" not in name.lower()}
    env = {**gone, "PYTHONPATH": f"{HOUSE}:{tmp_path}", "PREFECT_API_URL": f"{here}/api", "all_proxy": proxy}
    command = [sys.executable, "-c", CHILD, str(tmp_path)]
    env["HTTPS_PROXY"] = env["http_proxy"] = closed = "http://127.0.0.1:9"
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.splitlines() == ["200", f"{proxy} {closed} {closed}"], done.stderr
    assert done.stderr == ""
