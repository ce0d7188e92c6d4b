"""The peer of a comparison: vLLM's OpenAI server for CPUs, with the interpreter that the user names.

It runs as well as it can here: every core bound by name (left alone it keeps one back), prefix caching, bf16, and the memory
allocator and OpenMP of its own environment preloaded where they are found. How many tokens it may compute per step
(``--max-num-batched-tokens``, its chunk budget) is the caller's choice.
"""

from __future__ import annotations

import glob
import json
import os
import signal
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil

from moonpool.bench.local_cluster import free_port, terminable
from moonpool.bench.process_trees import bound_cpus, tree_of
from moonpool.core.errors import ConfigError

BUDGETS = (512, 1_024, 2_048)
BLOCK_TOKENS = 32
MAX_CONTEXT = 8_192
START_S = 900.0
_ANSWER_S = 120.0
_STOP_S = 30.0
_POLL_S = 0.1
_ALLOCATOR = "/usr/lib/*/libtcmalloc_minimal.so.4"
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class PeerSettings:
    """``kv_gib``: memory for KV, GiB. ``cpus``: the cores it computes on."""

    python: Path
    chunk_budget: int
    kv_gib: int = 1
    cpus: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))
    max_sequences: int = 64

    def command(self, model_dir: Path, port: int) -> list[str]:
        return [
            str(self.python), "-m", "vllm.entrypoints.openai.api_server",
            "--model", str(model_dir), "--served-model-name", "peer", "--host", "127.0.0.1", "--port", str(port),
            "--dtype", "bfloat16", "--max-model-len", str(MAX_CONTEXT), "--block-size", str(BLOCK_TOKENS),
            "--enable-prefix-caching", "--enable-prompt-tokens-details", "--no-enable-log-requests",
            "--max-num-seqs", str(self.max_sequences), "--max-num-batched-tokens", str(self.chunk_budget),
        ]  # fmt: skip

    def environment(self) -> dict[str, str]:
        """What is set beside the environment that it inherits."""
        preloaded = [*sorted(glob.glob(_ALLOCATOR))[:1]]
        if (openmp := self.python.parent.parent / "lib/libiomp5.so").is_file():
            preloaded.append(str(openmp))
        return {
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "DO_NOT_TRACK": "1",
            "VLLM_CPU_KVCACHE_SPACE": str(self.kv_gib),
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, self.cpus)),
            **({"LD_PRELOAD": ":".join(preloaded)} if preloaded else {}),
        }


@dataclass(frozen=True, slots=True)
class Peer:
    """A running server. ``startup_s``: from the start of its process to its first answer."""

    url: str
    pid: int
    startup_s: float
    settings: PeerSettings

    def processes(self) -> list[psutil.Process]:
        return tree_of(self.pid)

    def facts(self) -> dict[str, Any]:
        settings = self.settings
        return {
            "chunk_budget": settings.chunk_budget,
            "command": settings.command(Path("MODEL"), 0)[1:],
            "environment": settings.environment(),
            "threads_by_cpus": bound_cpus(self.processes()),
            "kv_bytes": settings.kv_gib << 30,
        }


@contextmanager
def vllm_server(settings: PeerSettings, model_dir: Path, say: Say) -> Iterator[Peer]:
    """Started when the block begins, ended with it. ConfigError: it did not come up; its last words are in the message."""
    if not os.access(settings.python, os.X_OK):
        raise ConfigError(f"peer-python: {settings.python} cannot be run; give an interpreter that has vllm-cpu", param="peer")
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    with terminable(), tempfile.TemporaryDirectory(prefix="moonpool-peer-") as folder:
        log = Path(folder) / "peer.log"
        say(f"peer: starting, chunk budget {settings.chunk_budget}")
        began = time.monotonic()
        with log.open("wb") as words:
            child = subprocess.Popen(
                settings.command(model_dir, port),
                env=_inherited() | settings.environment(),
                cwd=folder,  # its interpreter looks for modules where it starts
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            _wait_for_answer(url, child, log, began + START_S)
            taken = time.monotonic() - began
            say(f"peer: first answer after {taken:.1f} s")
            yield Peer(url, child.pid, taken, settings)
        finally:
            _end(child)


def peer_version(python: Path) -> str:
    """Of the package that ``python`` has; ConfigError where it has none."""
    ask = "import importlib.metadata as m; print(next(d.metadata['Name'] + ' ' + d.version for d in m.distributions()"
    ask += " if d.metadata['Name'] in ('vllm-cpu', 'vllm')))"
    try:
        done = subprocess.run([str(python), "-c", ask], capture_output=True, text=True, timeout=60, cwd="/")
    except (OSError, subprocess.TimeoutExpired) as e:
        raise ConfigError(
            f"peer-python: {python} does not run: {e}; give an interpreter that has vllm-cpu", param="peer"
        ) from e
    if done.returncode:
        raise ConfigError(f"peer-python: {python} has no vllm-cpu; give one that has", param="peer")
    return done.stdout.strip()


def _inherited() -> dict[str, str]:
    """Our own environment without what is meant for us."""
    kept: Mapping[str, str] = os.environ
    return {name: value for name, value in kept.items() if not name.startswith(("MOONPOOL_", "PYTHON", "OMP_", "LD_PRELOAD"))}


def _wait_for_answer(url: str, child: subprocess.Popen[bytes], log: Path, until: float) -> None:
    body = json.dumps({"model": "peer", "prompt": [1_000, 1_001], "max_tokens": 1, "temperature": 0}).encode()
    asked = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
    while True:
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                pass
            with urllib.request.urlopen(asked, timeout=_ANSWER_S) as answer:
                json.load(answer)
            return
        except (OSError, ValueError) as e:
            ended = child.poll() is not None
            if ended or time.monotonic() > until or isinstance(e, urllib.error.HTTPError):
                tail = log.read_text(errors="replace")[-1_500:]
                what = "ended" if ended else f"does not answer ({e})"
                raise ConfigError(f"bench: the peer {what}: {tail}", param="peer") from e
        time.sleep(_POLL_S)


def _end(child: subprocess.Popen[bytes]) -> None:
    """Its whole session: an engine of its own outlives a killed server otherwise."""
    below = tree_of(child.pid)
    for number, patience_s in ((signal.SIGCONT, 0.0), (signal.SIGTERM, _STOP_S), (signal.SIGKILL, _STOP_S)):
        for process in below:
            try:
                process.send_signal(number)
            except psutil.NoSuchProcess:
                continue
        if patience_s:
            _, below = psutil.wait_procs(below, patience_s)
    child.wait(_STOP_S)
