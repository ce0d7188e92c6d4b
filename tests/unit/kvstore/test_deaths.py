"""Workers in processes of their own that die, freeze and wake while they hold slots of a store node."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from support.store import Roll, block_bytes, block_keys, config, member, store_node, until, worker, writer

from moonpool.core.errors import Reason
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import Liveness
from moonpool.kvstore.node import StoreNode
from moonpool.wire import pb

pytestmark = pytest.mark.processes
TESTS = Path(__file__).parents[2]


@asynccontextmanager
async def process(node: StoreNode, what: str, *, incarnation: int = 1) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A ready worker process "prefill-0" on the node's host."""
    command = [
        sys.executable, "-m", "support.store_worker", node.member.address, "a", "prefill-0", str(incarnation), what,
    ]  # fmt: skip
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as child:
        try:
            assert child.stdout is not None
            assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
            yield child
        finally:
            if child.poll() is None:
                child.send_signal(signal.SIGCONT)
                child.kill()


async def test_slots_of_a_writer_killed_in_mid_landing_come_free_by_its_descriptor(tmp_path: Path) -> None:
    gone: list[tuple[MemberId, Incarnation, str]] = []
    settings = config(tmp_path)
    async with store_node(settings, Roll(), on_gone=lambda *proof: gone.append(proof)) as node:
        async with worker(node) as (client, heard), process(node, "land") as child:
            assert node.numbers()["slots_reserved"] == 3
            child.kill()
            await until(lambda: bool(heard.failed), "the reader hears")
            (failure,) = heard.failed
            assert failure.error.reason is Reason.PEER_SILENT
            assert "prefill-0 is gone" in failure.error.message
            assert gone == [(MemberId("prefill-0"), Incarnation(1), "its process ended (pidfd)")]
            await client.end_landing(failure.landing)
            assert node.numbers()["slots_free"] == 16
            assert await client.lookup(block_keys("p", 3)) == 0, "never partial"
            assert node.numbers()["pidfds"] == 1, "the reader's own"


async def test_blocks_that_a_killed_publisher_had_begun_are_misses_and_can_be_written_again_at_once(tmp_path: Path) -> None:
    async with store_node(config(tmp_path), Roll()) as node, worker(node) as (client, _), process(node, "reserve") as child:
        stub = client._stub
        assert node.numbers()["slots_reserved"] == 4
        reply = await stub.Reserve(pb.store.KeysRequest(session=client._number, keys=block_keys("k", 4)))
        assert {one.state for one in reply.reservations} == {"in_flight"}
        cleared = await stub.Clear(pb.store.KeysRequest(keys=block_keys("k", 4)))
        assert (cleared.cleared, node.numbers()["slots_free"]) == (0, 12), "clearing takes no slot from its writer"
        assert await client.lookup(block_keys("k", 4)) == 0, "never partial"
        child.kill()
        await until(lambda: node.numbers()["slots_free"] == 16, "its slots come free")
        assert await client.lookup(block_keys("k", 4)) == 0
        reply = await stub.Reserve(pb.store.KeysRequest(session=client._number, keys=block_keys("k", 4)))
        assert {one.state for one in reply.reservations} == {"new"}


async def test_a_frozen_workers_pins_go_and_what_it_was_writing_is_fenced_until_it_is_killed(tmp_path: Path) -> None:
    settings = config(tmp_path, timing={"kill_after_ms": 300})
    roll = Roll()
    async with store_node(settings, roll) as node, process(node, "pin") as pinning:
        assert node.numbers()["pins"] == 2
        pinning.send_signal(signal.SIGSTOP)
        await until(lambda: node.numbers()["pins"] == 0, "a silent reader loses its pins")
        roll.say(member("prefill-0", Role.PREFILL, "a"), Liveness.SILENT)
        await until(lambda: pinning.poll() == -signal.SIGKILL, "the agent kills it")
        await until(lambda: node.numbers()["pidfds"] == 0, "and sees it dead")
    async with store_node(settings, Roll(), "a") as node, process(node, "reserve") as writing:
        writing.send_signal(signal.SIGSTOP)
        await until(lambda: node.numbers()["slots_fenced"] == 4, "its slots are fenced")
        await asyncio.sleep(0.5)
        assert node.numbers()["slots_fenced"] == 4, "nobody said that it is silent in the cluster: it is not killed"
        writing.kill()
        await until(lambda: node.numbers()["slots_free"] == 16, "its death frees them")


async def test_a_reader_that_was_frozen_over_the_end_of_its_ticket_wakes_to_misses(tmp_path: Path) -> None:
    async with store_node(config(tmp_path, slots=4), Roll()) as node, worker(node) as (client, _):
        await client.publish([(key, block_bytes(key)) for key in block_keys("k", 4)])
        async with process(node, "read") as reading:
            await asyncio.sleep(0.1)
            reading.send_signal(signal.SIGSTOP)
            await until(lambda: node.numbers()["pins"] == 0, "its ticket ends")
            assert await client.publish([(key, block_bytes(key)) for key in block_keys("n", 4)]) == 4
            reading.send_signal(signal.SIGCONT)
            await asyncio.sleep(0.05)
            out, _ = await asyncio.to_thread(reading.communicate)
        seen = dict(part.split("=") for part in out.decode().split() if "=" in part)
        assert seen["wrong"] == "0"
        assert int(seen["right"]) > 0 and int(seen["miss"]) > 0


async def test_a_frozen_worker_is_left_alone_where_killing_is_off(tmp_path: Path) -> None:
    roll = Roll()
    async with store_node(config(tmp_path), roll) as node, process(node, "reserve") as child:
        child.send_signal(signal.SIGSTOP)
        roll.say(member("prefill-0", Role.PREFILL, "a"), Liveness.SILENT)
        await asyncio.sleep(0.6)
        assert child.poll() is None
        assert node.numbers()["slots_fenced"] == 4
        roll.say(member("prefill-0", Role.PREFILL, "a"), Liveness.GONE, "replaced by a newer life")
        await asyncio.sleep(0.1)
        assert node.numbers()["slots_fenced"] == 4, "its process is still there: only its end is a proof"
        child.send_signal(signal.SIGCONT)
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"lost\n", "a worker that wakes hears that it is over"


async def test_a_frozen_writer_of_another_node_stays_fenced_until_the_endpoint_is_made_anew(tmp_path: Path) -> None:
    """Here "another node" is what the roll says: the process itself only grants and freezes."""
    roll = Roll()
    async with store_node(config(tmp_path, slots=4), roll) as node, worker(node) as (client, heard):
        elsewhere = member("prefill-9", Role.PREFILL, "b")
        roll.say(elsewhere)
        async with writer(node, "prefill-9") as remote:
            landing = await remote.grant("r1", block_keys("p", 4), reader="decode-0", reader_incarnation=1)
            roll.say(elsewhere, Liveness.SILENT)
            await until(lambda: bool(heard.failed), "the reader hears")
            await client.end_landing(landing.id)
            assert node.numbers()["slots_fenced"] == 4
            await node.remake()
            assert node.numbers()["slots_free"] == 4
            await remote.drain(landing)  # it wakes and says so: nobody listens
            assert node.numbers()["drains_ignored"] == 1


async def test_a_restarted_worker_takes_its_name_over_and_the_dead_ones_slots_with_it(tmp_path: Path) -> None:
    settings = config(tmp_path, timing={"kill_after_ms": 5_000})
    async with store_node(settings, Roll()) as node, process(node, "reserve") as old:
        old.send_signal(signal.SIGSTOP)
        async with process(node, "pin", incarnation=2):
            await until(lambda: old.poll() == -signal.SIGKILL, "the older process under that name is killed at once")
            await until(lambda: node.numbers()["slots_fenced"] == 0, "its slots are free")
            assert node.numbers()["slots_sealed"] == 2


async def test_a_killed_store_nodes_files_are_reclaimed_by_its_next_life(tmp_path: Path) -> None:
    code = (
        "import asyncio, sys\n"
        "from pathlib import Path\n"
        "from support.store import Roll, config, store_node\n"
        "async def main():\n"
        "    async with store_node(config(Path(sys.argv[1]), cluster={'name': 'same', 'state_dir': sys.argv[1]}), Roll()):\n"
        "        print('ready', flush=True)\n"
        "        await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    environment = os.environ | {"PYTHONPATH": str(TESTS)}
    with subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, env=environment) as child:
        assert child.stdout is not None
        assert await asyncio.to_thread(child.stdout.readline) == b"ready\n"
        child.kill()
    assert len(list(tmp_path.glob("moonpool+same+a+*"))) == 1
    async with store_node(config(tmp_path, cluster={"name": "same", "state_dir": str(tmp_path)}), Roll()) as node:
        async with worker(node):
            (file,) = tmp_path.glob("moonpool+same+a+*")
            assert f"+{os.getpid()}+" in file.name
