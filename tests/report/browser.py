"""Headless Chromium over its own debugging pipe: enough to load a page, press keys and look. Needs no library."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from tests.skips import chromium

FLAGS = [
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
]
CALM = """
    window.requestAnimationFrame = draw => setTimeout(() => draw(performance.now()), 250);
    window.cancelAnimationFrame = clearTimeout;
"""


class Browser:
    """One tab. `problems` collects console errors, exceptions and policy violations; `requests` every address asked.

    Scripts of `calm` pages draw four times a second: without a GPU what they move by themselves keeps a processor busy.
    """

    def __init__(self, width: int = 1200, height: int = 900, dark: bool = False, calm: bool = False) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self._folder = tempfile.mkdtemp(prefix="breadcrumb-browser-")
        self._buffer = b""
        self._number = 0
        self._session: str | None = None
        self._start()
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        if calm:
            self.call("Page.addScriptToEvaluateOnNewDocument", source=CALM)

    def _start(self) -> None:
        child_in, self._out = os.pipe()
        self._in, child_out = os.pipe()

        def wire() -> None:
            # Chromium reads commands from descriptor 3 and answers on 4; move both up first, lest one hides the other.
            first, second = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in (child_in, child_out))
            os.dup2(first, 3)
            os.dup2(second, 4)

        command = [str(chromium()), *FLAGS, f"--user-data-dir={self._folder}", "about:blank"]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(
            command,
            stdin=quiet,
            stdout=quiet,
            stderr=quiet,
            close_fds=False,
            preexec_fn=wire,  # noqa: PLW1509 - only system calls; the other side must be on 3 and 4.
            start_new_session=True,
        )
        os.close(child_in)
        os.close(child_out)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        try:
            self._session = None
            self.call("Browser.close")
            self._process.wait(10)
        except (OSError, TimeoutError, subprocess.TimeoutExpired):
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)
        shutil.rmtree(self._folder, ignore_errors=True)

    def call(self, method: str, timeout_s: float = 30.0, **params: Any) -> dict[str, Any]:
        """Send one command and wait for its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + timeout_s
        while True:
            found = self._read(end - time.monotonic())
            if found is None:
                raise TimeoutError(f"the browser did not answer {method} within {timeout_s} s.")
            if found.get("id") == self._number:
                if "error" in found:
                    raise RuntimeError(f"{method}: {found['error']}")
                result: dict[str, Any] = found["result"]
                return result
            self._note(found)

    def _read(self, timeout_s: float) -> dict[str, Any] | None:
        while b"\0" not in self._buffer:
            if not select.select([self._in], [], [], max(0.0, timeout_s))[0]:
                return None
            block = os.read(self._in, 1 << 16)
            if not block:
                raise OSError("the browser has ended.")
            self._buffer += block
        message, _, self._buffer = self._buffer.partition(b"\0")
        parsed: dict[str, Any] = json.loads(message)
        return parsed

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"])[:600])
        elif event.get("method") == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning"):
            self.problems.append(json.dumps(params["args"])[:600])
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.problems.append(params["entry"]["text"])
        elif event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def resize(self, width: int, height: int) -> None:
        """Give the page a window of this size."""
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def open(self, page: Path | str) -> None:
        """Load a file or an address and wait until its script has run."""
        self.run("window.isOldPage = true")
        self.call("Page.navigate", url=page.as_uri() if isinstance(page, Path) else page)
        for _ in range(200):
            if self.run("document.readyState === 'complete' && !window.isOldPage"):
                return
            time.sleep(0.05)
        raise TimeoutError(f"{page} did not finish loading.")

    def run(self, script: str) -> Any:
        """Value of a JavaScript expression."""
        found = self.call("Runtime.evaluate", expression=script, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:600])
        return found["result"].get("value")

    def press(self, key: str) -> None:
        """Press and release one key, such as `ArrowRight`."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=key)

    def text(self) -> str:
        """What the page shows."""
        return str(self.run("document.body ? document.body.innerText : ''"))

    def wait_for(self, text: str, seconds: float = 60) -> None:
        """Wait until the page shows this text."""
        until = time.monotonic() + seconds
        while text not in self.text():
            if time.monotonic() > until:
                raise TimeoutError(f"{text!r} did not appear within {seconds} s: {self.text()}")
            time.sleep(0.3)

    def click(self, element: str, seconds: float = 60) -> None:
        """Click with the mouse on the element that this JavaScript expression gives, as soon as it is there."""
        where = f"""(() => {{
            const found = {element};
            if (!found) return null;
            found.scrollIntoView({{block: "center"}});
            const box = found.getBoundingClientRect();
            return box.width ? [box.x + box.width / 2, box.y + box.height / 2] : null;
        }})()"""
        before, until = None, time.monotonic() + seconds
        while (point := self.run(where)) is None or point != before:  # It may still move.
            if time.monotonic() > until:
                raise TimeoutError(f"nothing to click on within {seconds} s: {element}")
            before = point
            time.sleep(0.2)
        for kind in ("mousePressed", "mouseReleased"):
            self.call("Input.dispatchMouseEvent", type=kind, x=point[0], y=point[1], button="left", clickCount=1)

    def click_on(self, text: str, kinds: str = "button, a, [role=tab], li", seconds: float = 60) -> None:
        """Click on the last visible element of these kinds with exactly this text."""
        shown = "one => one.innerText.trim() === " + json.dumps(text) + " && one.offsetParent"
        self.click(f"[...document.querySelectorAll({json.dumps(kinds)})].findLast({shown})", seconds)

    def write(self, text: str) -> None:
        """Type text where the focus is."""
        self.call("Input.insertText", text=text)

    def move(self, x: float, y: float) -> None:
        """Move the pointer."""
        self.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def picture(self, path: Path, whole: bool = False) -> None:
        """Save a PNG of the window, or of the whole page."""
        found = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole, **self._clip(whole))
        path.write_bytes(base64.b64decode(found["data"]))

    def _clip(self, whole: bool) -> dict[str, Any]:
        if not whole:
            return {}
        size = self.call("Page.getLayoutMetrics")["cssContentSize"]
        return {"clip": {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}}
