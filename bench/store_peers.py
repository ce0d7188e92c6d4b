"""The other side of ``moonpool bench store``: other systems, each in a process of an interpreter that has it installed."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError

NAMES = ("mooncake", "nixl")


class Peer:
    """Asked over its pipes, one JSON line each way. Times are taken in its process, around its own calls only."""

    def __init__(self, name: str, process: subprocess.Popen[str]) -> None:
        self.name = name
        self._process = process

    def _ask(self, command: dict[str, Any]) -> Any:
        if self._process.stdin is None or self._process.stdout is None:
            raise ConfigError(f"bench: {self.name} has no pipes", param="--peer-python")
        self._process.stdin.write(json.dumps(command) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise ConfigError(f"bench: {self.name} ended", param="--peer-python")
        return json.loads(line)

    def move(self, size: int, count: int) -> tuple[float, float]:
        """Seconds for ``count`` values of ``size`` bytes in one batch: (put, get)."""
        put, get = self._ask({"do": "move", "size": size, "count": count})
        return put, get

    def exists(self) -> tuple[float, float] | None:
        """(microseconds of one at the median, keys a second in batches); None where it has no such question."""
        found = self._ask({"do": "exists"})
        return None if found is None else (found[0], found[1])

    def end(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def open_peers(stack: ExitStack, python: str, say: Callable[[str], None]) -> list[Peer]:
    """Those that ``python`` can import, started. Their ends are pushed onto ``stack``."""
    peers: list[Peer] = []
    for name in NAMES if python else ():
        script = Path(__file__).with_name(f"store_peer_{name}.py")
        process = subprocess.Popen([python, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        peer = Peer(name, process)
        stack.callback(peer.end)
        said = process.stdout.readline() if process.stdout is not None else ""
        if said.strip() == "ready":
            peers.append(peer)
        else:
            say(f"{name}: {said.strip() or 'did not start'}")
    return peers
