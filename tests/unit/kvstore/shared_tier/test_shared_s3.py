"""The shared tier in object storage, against moto's HTTP server in a process of its own."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from support.shared import SOON_S, is_right, reads, shared_tier, untouched, writes
from support.store import LAYOUT, block_keys

from moonpool.core.config import StoreConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import NodeId
from moonpool.kvstore.shared_tier.form import object_bytes, object_name
from moonpool.kvstore.shared_tier.s3 import Bucket
from moonpool.kvstore.shared_tier.tier import SharedTier
from moonpool.kvstore.ssd.blocks import ReadEnd

pytest.importorskip("obstore")
pytest.importorskip("moto")
START_S = 60.0


@dataclass
class Storage:
    port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(self.port)]
        self.process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        end = time.monotonic() + START_S
        while True:
            try:
                self.make_bucket()
                return
            except urllib.error.HTTPError:
                raise
            except OSError:
                if time.monotonic() > end or self.process.poll() is not None:
                    raise
                time.sleep(0.05)

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None

    def make_bucket(self) -> None:
        with urllib.request.urlopen(urllib.request.Request(f"{self.url}/blocks", method="PUT"), timeout=10):
            pass


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture(scope="module")
def storage() -> Iterator[Storage]:
    one = Storage(free_port())
    try:
        one.start()
        yield one
    finally:
        one.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("AWS_"):
            monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")


async def test_blocks_travel_through_object_storage(storage: Storage) -> None:
    place = {"path": "s3://blocks/travel", "endpoint": storage.url}
    async with shared_tier(**place) as one, shared_tier(node="b", **place) as other:
        assert await one.write(writes("p", 6)) == [True] * 6
        assert await other.exists(LAYOUT, block_keys("p", 8), SOON_S) == 6
        wanted = reads("p", 7)
        assert await other.read(wanted, SOON_S) == [ReadEnd.OK] * 6 + [ReadEnd.GONE]
        assert all(is_right(read) for read in wanted[:6])
        assert await other.write(writes("p", 6)) == [True] * 6
        assert other.counted["blocks_there_already"] == 6
        assert await other.erase(LAYOUT, block_keys("p", 7)) == 6
        assert await one.read(reads("p", 6), SOON_S) == [ReadEnd.GONE] * 6


async def test_torn_and_foreign_objects_are_misses_and_are_written_anew(storage: Storage) -> None:
    async with shared_tier("s3://blocks/torn", endpoint=storage.url) as tier:
        await tier.write(writes("p", 4))
        bucket = Bucket(StoreConfig(shared_path="s3://blocks/torn", shared_endpoint=storage.url))
        names = [object_name(LAYOUT.fingerprint, key) for key in block_keys("p", 4)]
        whole = bucket.get(names[3], object_bytes(LAYOUT))
        assert whole is not None
        changed = whole.copy()
        changed[5_000] ^= 1
        for name, foreign in zip(names, (whole[:12], whole, changed), strict=False):
            bucket.put(name, foreign.copy())
        wanted = reads("p", 4)
        assert await tier.read(wanted, SOON_S) == [ReadEnd.TORN] * 3 + [ReadEnd.OK]
        assert all(untouched(read) for read in wanted[:3])
        assert await tier.write(writes("p", 4)) == [True] * 4
        assert await tier.read(reads("p", 4), SOON_S) == [ReadEnd.OK] * 4


async def test_the_endpoint_may_come_from_the_environment(storage: Storage, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", storage.url)
    async with shared_tier("s3://blocks") as tier:
        assert await tier.write(writes("e", 1)) == [True]
        assert await tier.exists(LAYOUT, block_keys("e", 1), SOON_S) == 1


async def test_storage_that_dies_is_a_miss_and_is_used_again_when_it_is_back() -> None:
    storage, now = Storage(free_port()), 100.0
    try:
        storage.start()
        async with shared_tier("s3://blocks/dies", endpoint=storage.url, clock=lambda: now) as tier:
            assert await tier.write(writes("p", 2)) == [True, True]
            storage.stop()
            assert await tier.read(reads("p", 2), SOON_S) == [ReadEnd.LATE] * 2
            assert await tier.exists(LAYOUT, block_keys("p", 2), SOON_S) == 0
            assert await tier.write(writes("q", 1)) == [False]
            assert tier.numbers()["shared_readable"] == tier.numbers()["shared_writable"] == 0
            storage.start()
            now += 1.0
            assert await tier.write(writes("q", 1)) == [True]
            assert await tier.read(reads("q", 1), SOON_S) == [ReadEnd.OK]
            assert tier.words() == {"shared_reads": "reachable", "shared_writes": "reachable"}
    finally:
        storage.stop()


async def test_storage_that_never_answers_is_given_up_by_the_deadline_and_by_the_client() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        endpoint = f"http://127.0.0.1:{mute.getsockname()[1]}"
        async with (
            shared_tier("s3://blocks", endpoint=endpoint, timeout_ms=60_000) as patient,
            shared_tier("s3://blocks", endpoint=endpoint, timeout_ms=100) as hasty,
        ):
            assert await patient.read(reads("p", 2), 0.05) == [ReadEnd.LATE] * 2
            assert patient.counted["faults"] == 0
            assert await hasty.read(reads("p", 1), SOON_S) == [ReadEnd.LATE]
            assert hasty.counted["faults"] == 1
            mute.close()  # what the patient client still waits for


async def test_a_bucket_that_does_not_exist_is_no_place_to_write(storage: Storage) -> None:
    async with shared_tier("s3://elsewhere", endpoint=storage.url) as tier:
        assert await tier.write(writes("p", 1)) == [False]
        assert tier.numbers()["shared_writable"] == 0


@pytest.mark.parametrize("url", ["s3://", "s3:///prefix", "s3://UPPER/x", "s3://a"])
async def test_a_url_without_a_bucket_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match=r"store\.shared_path: .* names no bucket; use s3://bucket/prefix"):
        await SharedTier.open(StoreConfig(shared_path=url), NodeId("a"))


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"store\.shared_endpoint"):
        Bucket(StoreConfig(shared_path="s3://blocks", shared_endpoint="not a url"))
