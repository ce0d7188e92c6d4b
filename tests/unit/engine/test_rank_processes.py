"""Ranks as processes: what they leave behind when they end, whoever ends first."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch
from engine_runner import VOCAB, Runner, load_tiny, random_ids, save_tiny
from transformers import GPT2Config, LlamaConfig

from moonpool.core.errors import ConfigError, PeerSilent
from moonpool.engine.engine import Row
from moonpool.engine.tensor_parallel import ranks as module
from moonpool.engine.tensor_parallel.ranks import STEP_S, Ranks

SIZES = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 128}


def llama(folder: Path, heads: int = 4, kv_heads: int = 2) -> Path:
    sizes = {**SIZES, "hidden_size": 8 * heads, "intermediate_size": 48}
    return save_tiny(folder, LlamaConfig(**sizes, num_attention_heads=heads, num_key_value_heads=kv_heads, head_dim=16))


def until(what: Callable[[], bool], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def pages_held() -> list[str]:
    """Unnamed files of pages that this process has open."""
    gc.collect()  # engines of earlier tests
    found = []
    for fd in Path("/proc/self/fd").iterdir():
        try:
            found.append(os.readlink(fd))
        except OSError:
            pass
    return [name for name in found if "moonpool-pages" in name]


def test_a_killed_rank_ends_every_step_at_once_and_leaves_nothing(tmp_path: Path) -> None:
    before = pages_held()
    one = load_tiny(llama(tmp_path))
    engine = load_tiny(tmp_path, tensor_parallel=2, rank_sums="memory")
    prompts = [random_ids(n, n) for n in (40, 17)]
    want, got = Runner(one).run(prompts, 4), Runner(engine).run(prompts, 4)
    for a, b in zip(got, want, strict=True):
        torch.testing.assert_close(torch.stack(a.logits), torch.stack(b.logits), atol=3e-5, rtol=1e-5)
    ranks = engine._backend._ranks
    (rank,) = ranks.pids
    assert len(pages_held()) > len(before)
    assert ranks.folder is None

    pages = engine.pages.allocate(2)

    def kill(layer: int) -> None:
        if layer == 1:
            os.kill(rank, signal.SIGKILL)

    begun = time.monotonic()
    for hooks in ({"before_layer": kill}, {}):
        with pytest.raises(PeerSilent, match=f"rank 1 of this worker .process {rank}. has ended: signal 9"):
            engine.forward([Row(random_ids(20, 4), 0, pages, True)], **hooks)
    assert engine.lost is not None and "signal 9" in engine.lost.result(0)
    assert time.monotonic() - begun < 10
    engine.close()
    one.close()
    assert not psutil.pid_exists(rank)
    assert pages_held() == before


STARTS_ONE = """
import time
from moonpool.engine.tensor_parallel.ranks import Ranks
print(*Ranks.start(1, "memory").pids, flush=True)
time.sleep(60)
"""


def test_a_rank_ends_with_the_process_that_started_it_however_that_ends() -> None:
    with subprocess.Popen((sys.executable, "-c", STARTS_ONE), stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        rank = psutil.Process(int(parent.stdout.readline()))
        parent.kill()
    until(lambda: not rank.is_running() or rank.status() == psutil.STATUS_ZOMBIE)


def test_ranks_are_put_away_once_however_often_that_is_asked_for() -> None:
    """Numbers of files that they had may be others' by then."""
    ranks = Ranks.start(0, "memory")
    ranks.close()
    reading, writing = os.pipe()
    ranks.close()
    os.write(writing, b"x")
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    os.close(writing)


@pytest.mark.parametrize("error", [OSError("no more processes"), ValueError("embedded null byte"), MemoryError()], ids=repr)
def test_whatever_keeps_a_rank_from_starting_is_said_and_nobody_waits(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    threads = threading.active_count()
    monkeypatch.setattr(subprocess, "Popen", fail)
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: a rank cannot be started"):
        Ranks.start(1, "memory")
    until(lambda: threading.active_count() <= threads)


def test_a_rank_that_is_stopped_is_lost_and_one_that_goes_on_at_once_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_S", 0.5)
    ranks = Ranks.start(2, "memory")
    os.kill(ranks.pids[0], signal.SIGSTOP)
    os.kill(ranks.pids[0], signal.SIGCONT)
    time.sleep(1.2)
    assert not ranks.lost.done()
    os.kill(ranks.pids[1], signal.SIGSTOP)
    assert ranks.lost.result(5) == f"rank 2 of this worker (process {ranks.pids[1]}) was stopped"
    until(lambda: not any(psutil.pid_exists(pid) for pid in ranks.pids))
    ranks.close()


def test_ranks_that_cannot_be_watched_are_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(Ranks, "_watch", fail)
    ranks = Ranks.start(0, "memory")
    assert "cannot be watched: no more memory" in ranks.lost.result(10)
    ranks.close()


def test_ranks_wait_longer_for_one_another_than_a_hook_waits_for_what_comes_from_elsewhere() -> None:
    """Or a rank would take rank 0, which waits for K/V of a long prompt within a step, for gone."""
    for waits_s, step_s in ((120.0, STEP_S), (3_600.0, 3_660.0)):
        ranks = Ranks.start(0, "memory", waits_s=waits_s)
        assert ranks.step_s == step_s
        ranks.close()


def test_what_cannot_be_shared_is_refused_by_name(tmp_path: Path) -> None:
    for heads, kv_heads, ranks, what in (
        (7, 1, 2, "7 attention heads do not divide among 2 ranks"),
        (12, 3, 4, "4 ranks are more than the 3 K/V heads"),
    ):
        with pytest.raises(ConfigError, match=f"engine.tensor_parallel: .* {what}"):
            load_tiny(llama(tmp_path / f"{heads}-{kv_heads}", heads, kv_heads), tensor_parallel=ranks)
    directory = llama(tmp_path / "llama")
    for backend in ("torch", "compiled"):
        with pytest.raises(ConfigError, match=f"engine.backend: '{backend}' computes on one rank"):
            load_tiny(directory, backend=backend, tensor_parallel=2)


def test_what_is_found_out_while_loading_leaves_no_rank_behind(tmp_path: Path) -> None:
    before = set(psutil.Process().children()), pages_held()
    gpt2 = save_tiny(tmp_path / "gpt2", GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=128))
    with pytest.raises(ConfigError, match=r"engine\.tensor_parallel: .* GPT2LMHeadModel is of no family"):
        load_tiny(gpt2, tensor_parallel=2)
    assert (set(psutil.Process().children()), pages_held()) == before
