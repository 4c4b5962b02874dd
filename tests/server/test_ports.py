"""Ports on the command lines of this project's servers."""

from __future__ import annotations

from typing import Any

import pytest

from tasks.reward_model import __main__ as reward_model
from tasks.server.__main__ import main as server_main
from tasks.tool import chat_server, mcp_server


@pytest.mark.parametrize("main", [reward_model.main, mcp_server.main, chat_server.main, server_main])
@pytest.mark.parametrize("port", ["65536", "99999", "-1", "8e3", "1" * 5000, "\u0668"])
def test_what_is_no_port_is_told_by_the_command_line(main: Any, port: str, capsys: Any) -> None:
    words = {
        reward_model.main: ["--model", "small", "--seed", "3"],
        mcp_server.main: ["--policy", "none", "--index", "none", "--http"],
        chat_server.main: ["--policy", "none", "--index", "none"],
        server_main: ["--index", "none"],
    }
    with pytest.raises(SystemExit) as ended:
        main([*words[main], f"--port={port}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err.splitlines()[-1]
    assert f"argument --port: found {port[:80]!r}, expected 0 (takes a free one) to 65535" in told
