"""The host's agent with real processes: descriptors handed over, deaths proved, kills, and who is refused."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError, TransferFailed
from moonpool.core.ids import Incarnation, MemberId
from moonpool.kvstore.agent import PATH_LIMIT, Agent, hand_over, socket_path
from moonpool.kvstore.claims import Life
from moonpool.wire.frames import encode_hand_over

LIFE = Life(MemberId("prefill-0"), Incarnation(1))
CHILD = """
import sys
from moonpool.kvstore.agent import hand_over
hand_over(sys.argv[1], 7)
print("ok", flush=True)
sys.stdin.read()
"""

TWICE = CHILD.replace("hand_over(sys.argv[1], 7)", "[hand_over(sys.argv[1], session) for session in (7, 9, 8)]")


class Scene:
    def __init__(self, path: Path) -> None:
        self.dead: asyncio.Queue[Life] = asyncio.Queue()
        self.agent = Agent(path, {7: LIFE}.get, self.dead.put_nowait)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    made = Scene(tmp_path / "a.sock")
    made.agent.start()
    yield made
    made.agent.close()
    assert not made.agent.path.exists()


async def child_of(agent: Agent) -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", CHILD, str(agent.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert await asyncio.to_thread(process.stdout.readline) == b"ok\n"
    return process


async def test_a_workers_death_is_proved_by_its_descriptor(scene: Scene) -> None:
    with await child_of(scene.agent) as process:
        assert scene.agent.knows(LIFE)
        assert scene.dead.empty()
        process.send_signal(signal.SIGKILL)
        assert await asyncio.wait_for(scene.dead.get(), 5) == LIFE
    assert scene.agent.watched == 0


async def test_the_agent_kills_even_a_frozen_process(scene: Scene) -> None:
    with await child_of(scene.agent) as process:
        process.send_signal(signal.SIGSTOP)
        assert scene.agent.kill(LIFE)
        assert await asyncio.wait_for(scene.dead.get(), 5) == LIFE
        assert not scene.agent.kill(LIFE)


async def test_a_process_that_went_on_as_another_life_is_known_by_its_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where PID namespaces differ: numbers are all 0."""
    monkeypatch.setattr("moonpool.kvstore.agent.caller_of", lambda connection: 0)
    monkeypatch.setattr("moonpool.kvstore.agent._pid_of", lambda fd: 0)
    newer, namesake = Life(LIFE.member, Incarnation(2)), Life(MemberId("decode-0"), Incarnation(1))
    moved: list[Life] = []
    agent = Agent(tmp_path / "a.sock", {7: LIFE, 8: newer, 9: namesake}.get, lambda life: None, moved.append)
    agent.start()
    with subprocess.Popen(
        [sys.executable, "-c", TWICE, str(agent.path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as child:
        assert child.stdout is not None and child.stdin is not None
        numbered = os.fstat(own := os.pidfd_open(os.getpid())).st_ino != os.fstat(theirs := os.pidfd_open(child.pid)).st_ino
        os.close(own)
        os.close(theirs)
        assert await asyncio.to_thread(child.stdout.readline) == b"ok\n"
        assert agent.lives() == ({newer, namesake} if numbered else {LIFE, newer, namesake})
        assert moved == ([LIFE] if numbered else [])
        child.stdin.close()
    agent.close()


async def test_only_a_process_own_descriptor_for_a_known_session_is_taken(scene: Scene) -> None:
    other = subprocess.Popen(["sleep", "30"])
    pipe = os.pipe()
    theirs = os.pidfd_open(other.pid)
    mine = os.pidfd_open(os.getpid())
    try:
        for frame, fds in (
            (encode_hand_over(8), [mine]),  # no such session
            (encode_hand_over(7), [theirs]),
            (encode_hand_over(7), [pipe[0]]),
            (encode_hand_over(7), []),
            (encode_hand_over(7), [mine, theirs]),
            (encode_hand_over(7)[:-1], [mine]),
            (b"x" * len(encode_hand_over(7)), [mine]),
        ):
            assert await asyncio.to_thread(answer, str(scene.agent.path), frame, fds) == b""
        assert scene.agent.watched == 0
        assert scene.agent.refused == 7
        await asyncio.to_thread(hand_over, str(scene.agent.path), 7)
        await asyncio.to_thread(hand_over, str(scene.agent.path), 7)  # again: the same life
        assert scene.agent.watched == 1
    finally:
        other.kill()
        other.wait()
        for fd in (*pipe, theirs, mine):
            os.close(fd)


def answer(path: str, frame: bytes, fds: list[int]) -> bytes:
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as agent:
        agent.settimeout(5)
        agent.connect(path)
        socket.send_fds(agent, [frame], fds)
        return agent.recv(1)


async def test_descriptors_do_not_pile_up(scene: Scene) -> None:
    await asyncio.to_thread(hand_over, str(scene.agent.path), 7)
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(10):
        await asyncio.to_thread(hand_over, str(scene.agent.path), 7)
        with pytest.raises(TransferFailed):
            await asyncio.to_thread(hand_over, str(scene.agent.path), 8)
    assert len(os.listdir("/proc/self/fd")) <= before


async def test_the_socket_is_private_and_a_newer_life_takes_it_over(scene: Scene, tmp_path: Path) -> None:
    assert stat.S_IMODE(scene.agent.path.stat().st_mode) == 0o600
    newer = Scene(scene.agent.path)
    newer.agent.start()
    scene.agent.close()
    assert newer.agent.path.exists(), "closing the older one leaves the newer one's socket alone"
    await asyncio.to_thread(hand_over, str(newer.agent.path), 7)
    newer.agent.close()


async def test_a_folder_that_others_can_write_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o777)
    with pytest.raises(ConfigError, match="can be written by others"):
        Scene(tmp_path / "a.sock").agent.start()


def test_a_long_folder_name_gives_a_short_path_elsewhere(tmp_path: Path) -> None:
    assert socket_path(tmp_path, "a") == tmp_path / "a.agent.sock"
    long = socket_path(tmp_path / ("x" * 120), "a")
    assert len(os.fsencode(long)) <= PATH_LIMIT
    assert long != socket_path(tmp_path / ("x" * 120), "b")


def test_a_missing_agent_is_an_error_that_names_its_path(tmp_path: Path) -> None:
    with pytest.raises(TransferFailed, match=r"gone\.sock"):
        hand_over(str(tmp_path / "gone.sock"), 1)
