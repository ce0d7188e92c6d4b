"""docs/console.png: the console before a live cluster under load, photographed in headless Chromium.

PYTHONPATH=tests python -m support.console_picture docs/console.png
"""

from __future__ import annotations

import random
import sys
import tempfile
import threading
import time
from pathlib import Path

import httpx

from moonpool.cluster.models import local_model
from support.browser import Browser, Page
from support.cluster import LocalCluster, running

NODES = [{"name": "a", "prefill": 1}, {"name": "b", "prefill": 1}, {"name": "c", "decode": 1, "conductor": 1, "gateway": 1}]
WIDTH, HEIGHT = 1280, 930
WARM_S = 45.0
WORDS = ["moon", "tide", "harbour", "layer", "token", "prefill", "decode", "river", "stone", "lantern", "cloud", "north"]
MOST_BYTES = 300_000


class Load:
    """A few clients that ask again and again, some of them with the same long beginning."""

    def __init__(self, url: str, clients: int) -> None:
        self._url, self._over = url, threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(number,), daemon=True) for number in range(clients)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        shared = " ".join(random.Random(7).choice(WORDS) for _ in range(260))
        while not self._over.wait(draw.uniform(0.2, 1.5)):
            own = " ".join(draw.choice(WORDS) for _ in range(draw.randint(30, 120)))
            body = {
                "model": "smollm2",
                "prompt": (shared if draw.random() < 0.7 else "") + own,
                "max_tokens": draw.randint(16, 48),
            }
            headers = {"x-request-id": f"order-{number}-{draw.randrange(10_000)}"}
            httpx.post(
                f"{self._url}/v1/completions", json={**body, "ignore_eos": True}, headers=headers, timeout=120, trust_env=False
            )

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join(60.0)


def photograph(page: Page, url: str, into: Path) -> None:
    page.open(f"{url}/console")
    page.until("document.querySelectorAll('[data-state=ready]').length >= 8", 60.0)
    time.sleep(WARM_S)  # the tiles show the last minute
    page.until("document.querySelector('.flow.busy') !== null", 60.0)
    page.picture(into)
    size = into.stat().st_size
    assert size < MOST_BYTES, f"{into}: {size} bytes; at most {MOST_BYTES}"
    assert page.complaints() == []


def main() -> None:
    into = Path(sys.argv[1] if len(sys.argv) > 1 else "docs/console.png")
    model = local_model("smollm2", lambda line: print(line, file=sys.stderr))
    with tempfile.TemporaryDirectory(prefix="moonpool-picture-") as folder, Browser() as browser:
        home = Path(folder) / "moonpool"
        home.mkdir()
        settings = {"store__pool_bytes": 256 << 20, "engine__page_bytes": 128 << 20, "timing__silent_after_ms": 3_000}
        with running(LocalCluster(home, model, NODES, **settings)) as cluster:
            load = Load(cluster.url, 5)
            try:
                photograph(browser.page(WIDTH, HEIGHT, "dark"), cluster.url, into)
                request = into.with_name(f"{into.stem}-request{into.suffix}")
                photograph_request(browser.page(WIDTH, 1_010, "light"), cluster.url, request)
            finally:
                load.stop()
    print(into)


def photograph_request(page: Page, url: str, into: Path) -> None:
    """The waterfall of an answer that reused KV."""
    ended = httpx.get(f"{url}/console/api/requests", trust_env=False).json()["ended"]
    chosen = next((one for one in ended if one["outcome"] == "ok" and one["cached_tokens"]), ended[0])
    page.open(f"{url}/console#/request/{chosen['id']}")
    page.until("document.querySelectorAll('.track').length >= 4")
    page.picture(into)


if __name__ == "__main__":
    main()
