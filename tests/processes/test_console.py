"""The console in a real browser, and `moonpool top`, before a live cluster that asks for API keys."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from support.browser import Browser, Page
from support.cluster import SPLIT, LocalCluster, running

from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.core.membership import Liveness

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

HOSTILE = '<img src=x onerror="window.hostile=1">\'-->{{7*7}}'
ROLES = {"admin": ["user", "admin"], "user": ["user"]}


class Seen:
    """What the tests share: the cluster, its keys, a browser."""

    def __init__(self, cluster: LocalCluster, keys: dict[str, str], browser: Browser) -> None:
        self.cluster, self.keys, self.browser = cluster, keys, browser

    def page(self, fragment: str = "", width: int = 1280, scheme: str = "light") -> Page:
        """The console, unlocked."""
        page = self.browser.page(width, 900, scheme)
        page.before_each(f"sessionStorage.setItem('moonpool.key', {json.dumps(self.keys['admin'])})")
        page.open(f"{self.cluster.url}/console{fragment}")
        return page

    def ask(self, prompt: list[int], tokens: int = 8) -> str:
        """The id of an answered request."""
        body = {"model": "smollm2", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
        headers = {"authorization": f"Bearer {self.keys['user']}", "x-request-id": HOSTILE, "x-moonpool-kind": "<b>kind</b>"}
        answer = httpx.post(f"{self.cluster.url}/v1/completions", json=body, headers=headers, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        return answer.headers["x-moonpool-request-id"]

    def assert_clean(self, page: Page) -> None:
        """No complaint of the browser, nothing asked of anybody else, nothing of a client's run."""
        assert page.complaints() == []
        assert [url for url in page.requested() if not url.startswith(self.cluster.url)] == []
        assert page.run("window.hostile ?? 0") == 0
        assert page.run("document.querySelectorAll('main img, main script, main b > b').length") == 0


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Seen]:
    with Browser() as browser:
        folder = tmp_path_factory.mktemp("console")
        kept, keys = [], {}
        for name, roles in ROLES.items():
            entry, keys[name] = mint()
            kept.append({"name": name, "tenant": "acme", "roles": roles, **entry})
        edit_book(folder / "keys.toml", lambda book: {"keys": kept, "tenants": {"acme": {}}})
        settings = {
            "engine__block_tokens": 16,
            "engine__page_bytes": 8 << 20,
            "store__pool_bytes": 32 << 20,
            "store__region_bytes": 8 << 20,
            "security__api_keys_file": str(folder / "keys.toml"),
        }
        with running(LocalCluster(folder, tiny_model, SPLIT, **settings)) as cluster:
            yield Seen(cluster, keys, browser)
            cluster.assert_idle()


def members_shown(page: Page) -> dict[str, str]:
    rows = "[...document.querySelectorAll('[data-member][data-state]')]"
    script = f"Object.fromEntries({rows}.map(e => [e.dataset.member, e.dataset.state]))"
    shown: dict[str, str] = page.run(script)
    return shown


def test_the_topology_shows_every_member_of_a_live_run(seen: Seen) -> None:
    page = seen.page()
    page.until("document.querySelectorAll('[data-state=ready]').length >= 7")
    wanted = {name: "ready" for name, change in seen.cluster.changes().items() if change.liveness is Liveness.LIVE}
    assert members_shown(page) == wanted
    text = page.text()
    assert "Node a" in text and "Node b" in text and "leads, term 1" in text
    seen.assert_clean(page)
    page.close()


def test_a_finished_request_shows_its_steps_its_decision_and_what_its_client_wrote_as_text(seen: Seen) -> None:
    name = seen.ask([*range(100)], tokens=8)
    page = seen.page("#/requests")
    page.until(f"document.querySelector('[data-request=\"{name}\"] a') !== null")
    assert HOSTILE in page.text() and "acme" in page.text()
    page.run(f"document.querySelector('[data-request=\"{name}\"] a').focus()")
    page.press("Enter")
    page.until("document.querySelectorAll('.track').length >= 4")
    assert page.run("location.hash") == f"#/request/{name}"
    steps = set(page.run("[...document.querySelectorAll('[data-step]')].map(e => e.dataset.step)"))
    assert {"tokenise", "place", "stream", "queue", "landing", "prefix", "compute", "land", "decode"} <= steps
    text = page.text()
    assert all(word in text for word in (HOSTILE, "<b>kind</b>", "acme", "decode-0", "placed", "Prefill workers considered"))
    seen.assert_clean(page)
    page.close()
    explained = page_of(seen, f"chatcmpl-{name}")
    assert explained["waterfall"]["rows"][0]["member"] == "gateway-0"
    assert page_of(seen, "req-unknown") == {**page_of(seen, "req-unknown"), "found": False, "waterfall": None}


def page_of(seen: Seen, name: str) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {seen.keys['admin']}"}
    told: dict[str, Any] = httpx.get(f"{seen.cluster.url}/console/api/request/{name}", headers=headers, trust_env=False).json()
    return told


def test_a_worker_that_dies_and_comes_back_is_seen_without_a_reload(seen: Seen) -> None:
    page = seen.page()
    page.until("document.querySelectorAll('[data-state=ready]').length >= 7")
    page.run("window.same = 1")
    victim = seen.cluster.member("prefill-1")
    os.kill(victim.pid, signal.SIGKILL)
    news = "document.querySelector('section[aria-label=\"Since you look\"]').innerText"
    page.until(f"{news}.includes('prefill-1')")
    page.until("document.querySelector('[data-member=prefill-1]').dataset.state === 'ready'", limit_s=60.0)
    assert page.run("window.same") == 1
    assert seen.cluster.member("prefill-1").incarnation > victim.incarnation
    seen.assert_clean(page)
    page.close()


def test_a_key_is_asked_for_and_only_an_admins_does(seen: Seen) -> None:
    page = seen.browser.page()
    page.open(f"{seen.cluster.url}/console")
    for key, told in (("", "This gateway asks for API keys."), (seen.keys["user"], "admin"), ("mp_0123456789ab_x", "key")):
        page.until("document.getElementById('door')?.open")
        if key:
            page.type(key)
            page.press("Enter")
            page.until("document.getElementById('key').value === ''")
        why = "document.getElementById('door').open ? document.getElementById('door-why').textContent : ''"
        page.until(f"({why}).includes({json.dumps(told)})")
        assert "prefill-0" not in page.text()
    page.type(seen.keys["admin"])
    page.press("Enter")
    page.until("document.querySelector('[data-member=prefill-0]') !== null")
    assert page.run("document.getElementById('door').open") is False
    assert seen.keys["admin"] not in page.run("document.documentElement.outerHTML + document.cookie + location.href")
    page.close()


def test_it_fits_a_narrow_screen_and_follows_the_systems_colours(seen: Seen) -> None:
    name = seen.ask([*range(40)])
    for fragment, drawn in (("", ".member"), ("#/requests", "tbody tr"), (f"#/request/{name}", ".track")):
        page = seen.page(fragment, width=400, scheme="dark")
        page.until(f"document.querySelector('{drawn}') !== null")
        assert page.run("document.documentElement.scrollWidth") <= 400
        red, green, blue = map(
            int, re.findall(r"\d+", page.run("getComputedStyle(document.documentElement).backgroundColor"))[:3]
        )
        assert red + green + blue < 200, "dark"
        seen.assert_clean(page)
        page.close()


# moonpool top


def words(seen: Seen, *more: str) -> list[str]:
    state = str(seen.cluster.folder / "state")
    named = ("--name", seen.cluster.name, "--set", f"cluster.state_dir={state}")
    return [sys.executable, "-m", "moonpool.cli.main", "top", *named, *more]


def test_top_tells_one_frame_as_json_and_as_text(seen: Seen) -> None:
    seen.ask([*range(90)])
    told = subprocess.run(words(seen, "--once", "--json", "-i", "0.5"), capture_output=True, text=True, check=True, timeout=60)
    frame = json.loads(told.stdout)
    assert {one["id"] for one in frame["members"]} == set(seen.cluster.changes())
    assert frame["seconds"] >= 0.5 and frame["live"] == 7 and len(frame["pools"]) == 2
    assert frame["conductors"][0]["leads"] >= 1
    assert ("a", "b") in {(link["source"], link["target"]) for link in frame["links"] if link["bytes"] > 0}
    assert frame["gateways"][0]["answers"] >= 1 and frame["gateways"][0]["ttft_ms"][0] > 0
    env = {**os.environ, "COLUMNS": "80"}
    told = subprocess.run(words(seen, "--once", "-i", "0.2"), capture_output=True, text=True, check=True, timeout=60, env=env)
    lines = told.stdout.splitlines()
    assert lines[0].endswith("7 of 7 live") and max(map(len, lines)) <= 80
    assert "\x1b" not in told.stdout


@pytest.mark.parametrize("end", ["q", "ctrl-c"])
def test_top_leaves_the_terminal_as_it_was(seen: Seen, end: str) -> None:
    pid, terminal = pty.fork()
    if not pid:
        os.execvpe(sys.executable, words(seen, "-i", "0.3"), {**os.environ, "TERM": "xterm", "COLUMNS": "100", "LINES": "30"})
    said = b""
    until = time.monotonic() + 60.0
    try:
        while b"prefill-0" not in said:
            assert time.monotonic() < until, said
            if select.select([terminal], [], [], 1.0)[0]:
                said += os.read(terminal, 1 << 16)
        assert b"\x1b[?1049h" in said, "a screen of its own"
        os.write(terminal, b"q" if end == "q" else b"\x03")
        while True:
            try:
                more = os.read(terminal, 1 << 16)
            except OSError:  # the terminal's other side is closed
                break
            said += more
            if not more:
                break
    finally:
        _, status = os.waitpid(pid, 0)
        os.close(terminal)
    assert os.waitstatus_to_exitcode(status) == 0, said
    assert said.rindex(b"\x1b[?1049l") > said.rindex(b"\x1b[?1049h"), "back to the former one"
    assert said.rindex(b"\x1b[?25h") > said.rindex(b"\x1b[?25l"), "with its cursor"
    assert b"Traceback" not in said
