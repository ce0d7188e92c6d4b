"""Headless Chromium, driven over its DevTools protocol: pages that are opened, looked at, and photographed."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from websockets.sync.client import ClientConnection, connect

MISSING = "no Chromium here; scripts/setup --dev installs it (Debian: chromium)"
START_S = 60.0
ANSWER_S = 30.0
POLL_S = 0.05
ARGUMENTS = (
    "--headless=new",
    "--no-sandbox",  # root may not use it
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-default-apps",
    "--disable-extensions",
    "--disable-sync",
    "--metrics-recording-only",
    "--no-first-run",
    "--no-default-browser-check",
    "--remote-debugging-port=0",
)


def chromium() -> str | None:
    return next((found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None)


class Browser:
    """One process for as many pages as are wanted. Use it as a context manager: it leaves nothing behind."""

    def __init__(self) -> None:
        binary = chromium()
        if binary is None:
            pytest.skip(MISSING)
        self._folder = tempfile.mkdtemp(prefix="moonpool-browser-")
        words = (binary, *ARGUMENTS, f"--user-data-dir={self._folder}", "about:blank")
        self._process = subprocess.Popen(
            words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, env={**os.environ, "DBUS_SESSION_BUS_ADDRESS": ""}
        )
        self.link = Link(self._endpoint())

    def _endpoint(self) -> str:
        file, until = Path(self._folder) / "DevToolsActivePort", time.monotonic() + START_S
        while not (file.exists() and len(lines := file.read_text().splitlines()) > 1):
            assert self._process.poll() is None and time.monotonic() < until, "Chromium does not start"
            time.sleep(POLL_S)
        return f"ws://127.0.0.1:{lines[0]}{lines[1]}"

    def page(self, width: int = 1280, height: int = 900, scheme: str = "light") -> Page:
        """A new tab, with cookies and storage of its own."""
        context = self.link.call("Target.createBrowserContext")["browserContextId"]
        target = self.link.call("Target.createTarget", url="about:blank", browserContextId=context)["targetId"]
        session = self.link.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self.link, session, target, width, height, scheme)

    def close(self) -> None:
        self.link.close()
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Link:
    """One connection to the browser; events are kept by the session that they belong to."""

    def __init__(self, endpoint: str) -> None:
        self._open = ExitStack()
        self._socket: ClientConnection = self._open.enter_context(
            connect(endpoint, max_size=64 << 20, compression=None, ping_interval=None)
        )
        self._next = 0
        self.events: dict[str, list[dict[str, Any]]] = {}

    def call(self, method: str, session: str = "", **parameters: Any) -> dict[str, Any]:
        self._next += 1
        number = self._next
        message = {"id": number, "method": method, "params": parameters} | ({"sessionId": session} if session else {})
        self._socket.send(json.dumps(message))
        until = time.monotonic() + ANSWER_S
        while True:
            answer = json.loads(self._socket.recv(timeout=max(until - time.monotonic(), 0.01)))
            if answer.get("id") == number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                result: dict[str, Any] = answer["result"]
                return result
            self._keep(answer)

    def _keep(self, event: dict[str, Any]) -> None:
        if "method" in event:
            self.events.setdefault(event.get("sessionId", ""), []).append(event)

    def close(self) -> None:
        self._open.close()


class Page:
    def __init__(self, link: Link, session: str, target: str, width: int, height: int, scheme: str) -> None:
        self._link, self._session, self._target = link, session, target
        for domain in ("Page", "Runtime", "Log", "Network"):
            self._call(f"{domain}.enable")
        self.resize(width, height, scheme)

    def _call(self, method: str, **parameters: Any) -> dict[str, Any]:
        return self._link.call(method, self._session, **parameters)

    def resize(self, width: int, height: int, scheme: str = "light", scale: float = 1.0) -> None:
        narrow = width < 600
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=narrow)
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def before_each(self, script: str) -> None:
        """Run in every document of this tab, before its own scripts."""
        self._call("Page.addScriptToEvaluateOnNewDocument", source=script)

    def open(self, url: str) -> None:
        self._call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression in the page, JSON-able."""
        told = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, f"{script}: {told['exceptionDetails']}"
        return told["result"].get("value")

    def until(self, script: str, limit_s: float = 20.0) -> Any:
        """Its value, once it is true."""
        until = time.monotonic() + limit_s
        while not (value := self.run(script)):
            assert time.monotonic() < until, f"not within {limit_s:.0f} s: {script}\n{self.text()}\n{self.complaints()}"
            time.sleep(POLL_S)
        return value

    def text(self) -> str:
        return str(self.run("document.body ? document.body.innerText : ''"))

    def type(self, text: str) -> None:
        """Into whatever has the focus."""
        self._call("Input.insertText", text=text)

    def press(self, key: str) -> None:
        for kind in ("keyDown", "keyUp"):
            code = {"Enter": 13, "Tab": 9}.get(key, 0)
            extra = {"text": "\r"} if key == "Enter" and kind == "keyDown" else {}
            self._call("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **extra)

    def picture(self, path: Path) -> None:
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", format="png")["data"]))

    def requested(self) -> list[str]:
        """Every address that was asked for."""
        self.run("1")  # events come before the answer
        return [event["params"]["request"]["url"] for event in self._events("Network.requestWillBeSent")]

    def complaints(self) -> list[str]:
        """Errors and warnings of the page: exceptions, console, and what the browser itself logs."""
        self.run("1")
        found = [str(event["params"]["exceptionDetails"]) for event in self._events("Runtime.exceptionThrown")]
        for event in self._events("Runtime.consoleAPICalled"):
            if event["params"]["type"] in ("error", "warning", "assert"):
                found.append(str(event["params"]["args"]))
        for event in self._events("Log.entryAdded"):
            if event["params"]["entry"]["level"] in ("error", "warning"):
                found.append(f"{event['params']['entry']['text']} {event['params']['entry'].get('url', '')}")
        return found

    def _events(self, method: str) -> list[dict[str, Any]]:
        return [event for event in self._link.events.get(self._session, ()) if event["method"] == method]

    def close(self) -> None:
        self._link.call("Target.closeTarget", targetId=self._target)
        self._link.events.pop(self._session, None)
