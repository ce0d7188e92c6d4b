"""What open consoles cost a gateway: its CPU time, and answers per second, with none and with ten.

PYTHONPATH=tests python -m support.console_cost
"""

from __future__ import annotations

import asyncio
import random
import tempfile
import threading
import time
from pathlib import Path

import httpx
import psutil

from support.cluster import SPLIT, LocalCluster, running
from support.workers import make_tiny_model

SECONDS, CONSOLES, CLIENTS, PAIRS = 10.0, 10, 6, 3
SETTINGS = {
    "engine__block_tokens": 16,
    "engine__page_bytes": 8 << 20,
    "store__pool_bytes": 32 << 20,
    "store__region_bytes": 8 << 20,
}


class Cost:
    def __init__(self, cluster: LocalCluster) -> None:
        self._url, self._gateway = cluster.url, psutil.Process(cluster.member("gateway-0").pid)
        self._answers, self._over = 0, threading.Event()
        self._threads: list[threading.Thread] = []

    def load(self) -> None:
        self._threads = [threading.Thread(target=self._ask, args=(number,)) for number in range(CLIENTS)]
        for thread in self._threads:
            thread.start()

    def _ask(self, number: int) -> None:
        draw = random.Random(number)
        while not self._over.is_set():
            body = {
                "model": "smollm2",
                "prompt": [draw.randrange(128) for _ in range(60)],
                "max_tokens": 16,
                "ignore_eos": True,
            }
            answer = httpx.post(f"{self._url}/v1/completions", json=body, timeout=60, trust_env=False)
            self._answers += answer.status_code == 200

    def stop(self) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def measure(self, consoles: int) -> str:
        cpu, answers, begun = self._cpu(), self._answers, time.monotonic()
        asyncio.run(self._look(consoles, begun + SECONDS))
        seconds = time.monotonic() - begun
        return f"{100 * (self._cpu() - cpu) / seconds:.1f} % of a core, {(self._answers - answers) / seconds:.1f} answers/s"

    def _cpu(self) -> float:
        times = self._gateway.cpu_times()
        return float(times.user + times.system)

    async def _look(self, consoles: int, until: float) -> None:
        async def one() -> None:
            async with httpx.AsyncClient(base_url=self._url, trust_env=False) as client:
                while time.monotonic() < until:
                    await asyncio.gather(client.get("/console/api/cluster"), client.get("/console/api/requests"))
                    await asyncio.sleep(1.0)

        await asyncio.gather(*(one() for _ in range(consoles)), asyncio.sleep(until - time.monotonic()))


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="moonpool-cost-") as folder:
        model = make_tiny_model(Path(folder) / "tiny")
        home = Path(folder) / "moonpool"
        home.mkdir()
        with running(LocalCluster(home, model, SPLIT, **SETTINGS)) as cluster:
            cost = Cost(cluster)
            for consoles in (0, 1, CONSOLES):
                print(f"idle, {consoles} consoles: {cost.measure(consoles)}", flush=True)
            cost.load()
            try:
                for pair in range(PAIRS):
                    for consoles in (0, CONSOLES) if pair % 2 == 0 else (CONSOLES, 0):
                        print(f"loaded, {consoles} consoles: {cost.measure(consoles)}", flush=True)
            finally:
                cost.stop()


if __name__ == "__main__":
    main()
