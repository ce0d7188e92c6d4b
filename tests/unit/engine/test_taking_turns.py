"""The compute permit between real processes: a holder that dies, one that freezes, steps that go before slices of prompts."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf
from pathlib import Path

import pytest
import support.permit_holder

from moonpool.core.config import Config
from moonpool.core.errors import ConfigError
from moonpool.core.gaps import Room
from moonpool.core.permit import MOST_PATIENCE_S, Beside
from moonpool.engine import permit
from moonpool.engine.permit import SharedPrompts, SharedSteps, Unshared, permit_folder, prompt_turns, step_turns
from moonpool.engine.timed_lock import TimedLock

FOREVER_S = 20.0


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the permit."""
    words = [sys.executable, support.permit_holder.__file__, str(folder)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def soon(condition: Callable[[], bool]) -> None:
    until = time.monotonic() + FOREVER_S
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.002)


def idle() -> None:
    """No thread that stands in line is left."""
    soon(lambda: all(thread.name != "permit" for thread in threading.enumerate()))


def test_the_permit_of_a_killed_holder_is_free_at_once(tmp_path: Path) -> None:
    steps = SharedSteps(tmp_path, "decode-0")
    steps.tell(Room(inf, inf), 0.01)
    with holder(tmp_path) as process:
        timer = threading.Timer(0.1, process.kill)
        timer.start()
        begun = time.monotonic()
        with steps.turn():
            waited = time.monotonic() - begun
        timer.join()
    assert steps.numbers()["permit_forced_count"] == 0
    assert 0.05 < waited < MOST_PATIENCE_S
    assert steps.numbers()["permit_wait_seconds"] == pytest.approx(waited, abs=0.05)
    steps.close()
    idle()


def test_a_frozen_holder_is_waited_for_once_and_not_again_until_it_moves(tmp_path: Path) -> None:
    steps = SharedSteps(tmp_path, "decode-0")
    steps.tell(Room(0.11, 0.2), 0.01)  # patience: twice what a slice and a layer may take
    with holder(tmp_path) as process:
        process.send_signal(signal.SIGSTOP)
        begun = time.monotonic()
        with steps.turn():
            first = time.monotonic() - begun
        for _ in range(20):
            with steps.turn():
                pass
        rest = time.monotonic() - begun - first
        assert steps.numbers()["permit_forced_count"] == 21
        assert first >= 0.2
        assert rest < 0.2
        process.send_signal(signal.SIGCONT)
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write("\n")
        process.stdin.flush()
        assert process.stdout.readline() == "free\n"
        soon(lambda: steps._cores.acquire(0.0))  # whoever stood in line for nobody has let go
        steps._cores.release()
        with steps.turn():
            pass
        assert steps.numbers()["permit_forced_count"] == 21
    steps.close()
    idle()


def test_a_prompt_goes_on_without_a_frozen_decode_worker(tmp_path: Path) -> None:
    prompts, other = SharedPrompts(tmp_path), TimedLock(tmp_path / "cores")
    assert other.acquire(0.0)
    begun = time.monotonic()
    with prompts.turn(0.05):
        prompts.between_layers()
        prompts.between_layers()
    assert MOST_PATIENCE_S <= time.monotonic() - begun < 3 * MOST_PATIENCE_S
    assert prompts.numbers()["permit_forced_count"] == 1
    other.release()
    prompts.close()
    other.close()
    idle()


def test_a_step_goes_before_the_rest_of_a_chunk_and_before_another_workers_prompt(tmp_path: Path) -> None:
    one, two, steps = SharedPrompts(tmp_path), SharedPrompts(tmp_path), SharedSteps(tmp_path, "decode-0")
    steps.tell(Room(0.5, 0.5), 0.01)
    order: list[str] = []
    begun = threading.Event()

    def second_prompt() -> None:
        with two.turn(0.0):
            order.append("two")

    def step() -> None:
        with steps.turn():
            order.append("step")

    others = [threading.Thread(target=second_prompt), threading.Thread(target=step)]
    with one.turn(0.0):
        begun.set()
        order.append("one")
        for thread in others:
            thread.start()
        soon(lambda: one._waited_for(time.monotonic()))
        one.between_layers()
        order.append("one again")
    for thread in others:
        thread.join(FOREVER_S)
    assert order == ["one", "step", "one again", "two"]
    assert one.numbers()["permit_passes_count"] == 1
    for each in (one, two, steps):
        each.close()
    idle()


def test_a_slice_lasts_while_it_may_although_a_step_waits(tmp_path: Path) -> None:
    prompts, steps = SharedPrompts(tmp_path), SharedSteps(tmp_path, "decode-0")
    steps.tell(Room(inf, inf), 0.01)
    stepped = threading.Event()

    def step() -> None:
        with steps.turn():
            stepped.set()

    thread = threading.Thread(target=step)
    with prompts.turn(0.2):
        thread.start()
        soon(lambda: prompts._waited_for(time.monotonic()))
        prompts.between_layers()
        assert not stepped.is_set()
        soon(lambda: time.monotonic() - prompts._since > 0.2)
        prompts.between_layers()
        assert stepped.is_set()
        thread.join(FOREVER_S)
        with prompts.pause(), steps.turn():  # while it waits for something else
            pass
    prompts.close()
    steps.close()
    idle()


def test_whoever_waits_for_another_worker_lets_other_prompts_of_its_host_go(tmp_path: Path) -> None:
    one, two = SharedPrompts(tmp_path), SharedPrompts(tmp_path)
    began, may_end = threading.Event(), threading.Event()

    def other() -> None:
        with two.turn(inf):
            began.set()
            may_end.wait(FOREVER_S)

    thread = threading.Thread(target=other)
    with one.turn(inf):
        with one.pause():
            assert not two._prompts.acquire(0.0), "it will be back in a moment"
        with one.pause(long=True):
            thread.start()
            assert began.wait(FOREVER_S)
            threading.Timer(0.05, may_end.set).start()
        assert may_end.is_set(), "the other prompt goes to the end of its chunk"
        assert not two._prompts.acquire(0.0)
        assert one.numbers()["permit_waits_count"] == 1
    thread.join(FOREVER_S)
    assert two._prompts.acquire(0.0), "free after the turn"
    two._prompts.release()
    for each in (one, two):
        each.close()
    idle()


def test_prompts_hear_what_answers_on_the_host_leave_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(permit, "LOOK_S", 0.0)
    prompts = SharedPrompts(tmp_path)
    assert prompts.beside() == Beside()
    steps = SharedSteps(tmp_path, "decode-0")
    steps.tell(Room(0.1, 0.3), 0.02)
    assert prompts.beside() == Beside(Room(pytest.approx(0.08), pytest.approx(0.28)), 0.02)
    steps.rest()
    assert prompts.beside() == Beside()
    steps.tell(Room(0.1, 0.3), 0.02)
    steps.close()
    assert prompts.beside() == Beside()
    prompts.close()


def test_prompts_go_on_where_the_folder_was_cleared_away_or_has_what_is_not_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(permit, "LOOK_S", 0.0)
    folder = tmp_path / "permit"
    steps, prompts = SharedSteps(folder, "decode-0"), SharedPrompts(folder)
    (folder / f"strange{permit.NOTE}").mkdir()
    steps.tell(Room(0.08, 0.4), 0.03)
    assert prompts.beside().step_s == 0.03
    shutil.rmtree(folder)
    with prompts.turn(1.0):
        prompts.between_layers()
    assert prompts.beside().step_s == 0.03
    steps.close()
    prompts.close()


def test_a_folder_that_cannot_be_is_named_and_without_permit_nobody_waits(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match=r'engine.permit: cannot lock in .*set engine.permit = "off"'):
        SharedSteps(file / "folder", "decode-0")
    config = Config()
    assert isinstance(step_turns(config, "decode-0"), Unshared)
    assert isinstance(prompt_turns(config), Unshared)
    shared = config.model_copy(
        update={
            "engine": config.engine.model_copy(update={"permit": "on"}),
            "cluster": config.cluster.model_copy(update={"state_dir": str(tmp_path)}),
        }
    )
    turns = step_turns(shared, "decode-0")
    assert (permit_folder(tmp_path) / "cores").exists()
    assert turns.numbers().keys() == Unshared().numbers().keys()
    turns.close()
    prompts = prompt_turns(shared)
    assert prompts.numbers().keys() == prompt_turns(config).numbers().keys() == {*turns.numbers(), "permit_passes_count"}
    prompts.close()
