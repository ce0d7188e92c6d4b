"""The store library against a real store node in this process: its calls run in threads, the node on the event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, block_keys, config, member, until

from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError, InvalidRequest, LayoutMismatch, PeerSilent
from moonpool.core.ids import Role
from moonpool.core.layout import KVLayout
from moonpool.kvstore import Put, StoreClient, SyncStoreClient
from moonpool.kvstore.library.objects import CHUNK, CLASSES, RAW_LAYOUTS, chunks_of
from moonpool.kvstore.node import StoreNode
from moonpool.wire import host_frames


@asynccontextmanager
async def node_at(folder: Path, *, pool_bytes: int = 16 * MIB, **store: Any) -> AsyncIterator[StoreNode]:
    store |= {"pool_bytes": pool_bytes, "region_bytes": min(pool_bytes, 32 * MIB)}
    me = member("store-a", Role.STORE, "a")
    node = await StoreNode.start(config(folder, store=store), me, LAYOUT, Roll())
    try:
        yield node
    finally:
        await node.close()


@asynccontextmanager
async def joined(folder: Path, **given: Any) -> AsyncIterator[tuple[StoreNode, StoreClient]]:
    async with node_at(folder, **given) as node, await StoreClient.connect(folder) as client:
        yield node, client


def bytes_of(size: int, seed: int = 0) -> bytes:
    return np.random.default_rng(seed + size).integers(0, 255, size, dtype=np.uint8).tobytes()


async def test_values_of_all_sizes_come_back_equal(tmp_path: Path) -> None:
    sizes = [0, 1, 4095, 4096, 4097, CHUNK - 1, CHUNK, CHUNK + 1, 2 * CHUNK, 5 * CHUNK + 17]
    async with joined(tmp_path, pool_bytes=64 * MIB) as (node, client):
        for size in sizes:
            name, value, into = f"v{size}", bytes_of(size), bytearray(size)
            assert await client.put(name, value) is Put.STORED
            assert await client.exists(name)
            assert await client.get(name) == value
            assert await client.get(name, into=into) is into
            assert into == value
        assert node.pool.numbers()["pins"] == 0


async def test_arrays_come_back_with_their_dtype_and_shape(tmp_path: Path) -> None:
    values = [
        np.arange(12, dtype="<i4").reshape(3, 4),
        np.array(2.5),
        np.zeros((0, 7), dtype=np.float16),
        np.arange(24).reshape(4, 6)[::2, ::3],
        np.array(["2026-01-01"], dtype="datetime64[D]"),
    ]
    async with joined(tmp_path) as (_, client):
        await client.put_many([(str(i), value) for i, value in enumerate(values)])
        found = await client.get_many([str(i) for i in range(len(values))])
    for value, mine in zip(values, found, strict=True):
        assert (mine.dtype, mine.shape) == (value.dtype, value.shape)
        assert np.array_equal(mine, value)


async def test_a_tensor_comes_back_with_its_dtype_and_shape(tmp_path: Path) -> None:
    import torch

    value = torch.randn(3, 5).to(torch.bfloat16)
    async with joined(tmp_path) as (_, client):
        await client.put_many([("t", value), ("view", value.T), ("none", torch.empty(0, 3))])
        found = await client.get_many(["t", "view", "none"])
        into = torch.empty(3, 5, dtype=torch.bfloat16)
        assert await client.get("t", into=into) is into
    assert found[0].dtype is torch.bfloat16
    assert torch.equal(found[0], value)
    assert torch.equal(into, value)
    assert torch.equal(found[1], value.T)
    assert found[2].shape == (0, 3)


async def test_pieces_are_stored_as_one_value_and_copied_out_into_pieces(tmp_path: Path) -> None:
    pieces = [np.frombuffer(bytes_of(4096, i), np.uint8) for i in range(600)]
    into = [np.zeros(n, np.uint8) for n in (1, 5000, 600 * 4096 - 5001)]
    async with joined(tmp_path) as (_, client):
        assert await client.put("v", pieces) is Put.STORED
        await client.get("v", into=into)
        assert await client.get("v") == b"".join(piece.tobytes() for piece in pieces)
    assert b"".join(part.tobytes() for part in into) == b"".join(piece.tobytes() for piece in pieces)


async def test_many_values_of_mixed_sizes_are_found_whole_in_any_order(tmp_path: Path) -> None:
    values = {f"k{i}": bytes_of(size, i) for i, size in enumerate([10, 70_000, 0, 2 * CHUNK + 3, 4096] * 20)}
    async with joined(tmp_path, pool_bytes=96 * MIB) as (_, client):
        assert set(await client.put_many(list(values.items()))) == {Put.STORED}
        names = ["nobody", *reversed(values), "nothing"]
        assert await client.exists_many(names) == [False, *[True] * len(values), False]
        assert await client.get_many(names) == [None, *[values[n] for n in reversed(values)], None]


async def test_values_whose_places_do_not_fit_into_one_answer_are_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_frames, "room_for_places", lambda objects: 5)
    values = {f"v{i}": bytes_of(2 * CHUNK + CHUNK // 2, i) for i in range(5)}  # of three chunks and more
    async with joined(tmp_path, pool_bytes=64 * MIB) as (node, client):
        await client.put_many(list(values.items()))
        assert await client.get_many(["nobody", *values]) == [None, *values.values()]
        assert node.pool.numbers()["pins"] == 0


async def test_a_value_stays_until_it_is_removed(tmp_path: Path) -> None:
    async with joined(tmp_path) as (node, client):
        await client.put("v", bytes_of(3 * CHUNK))
        assert await client.put("v", b"other") is Put.THERE
        assert await client.get("v") == bytes_of(3 * CHUNK)
        assert await client.remove("v", "never put") == 1
        assert not await client.exists("v")
        assert node.pool.numbers()["slots_sealed"] == 0  # all its chunks went
        assert await client.put("v", b"other") is Put.STORED
        assert await client.get("v") == b"other"


async def test_an_older_value_of_the_same_name_never_lends_a_chunk_to_a_newer_one(tmp_path: Path) -> None:
    """The newest chunks of the old value are evicted first; what is left of it must not be taken for the new one."""
    old, new = bytes_of(4 * CHUNK, 1), bytes_of(4 * CHUNK, 2)
    async with joined(tmp_path, pool_bytes=32 * MIB) as (_, client):
        await client.put("v", old)
        fillers = 0
        while await client.exists("v"):
            await client.put(f"filler {fillers}", bytes_of(CHUNK, fillers))
            fillers += 1
        assert await client.put("v", new) is Put.STORED
        assert await client.get("v") == new


async def test_what_is_found_is_there_whole_while_others_are_evicted(tmp_path: Path) -> None:
    async with joined(tmp_path, pool_bytes=64 * MIB) as (node, client):
        for i in range(40):
            assert await client.put(f"v{i}", bytes_of(2 * CHUNK + 100, i)) is Put.STORED
        found = [await client.exists(f"v{i}") for i in range(40)]
        assert 1 <= sum(found) < 40
        for i, here in enumerate(found):
            assert await client.get(f"v{i}") == (bytes_of(2 * CHUNK + 100, i) if here else None)
        assert node.pool.numbers()["evicted"] > 0


async def test_what_can_never_fit_is_refused_with_both_sizes_before_anything_is_evicted(tmp_path: Path) -> None:
    async with joined(tmp_path, pool_bytes=8 * MIB) as (node, client):
        assert await client.put("small", bytes_of(2 * CHUNK)) is Put.STORED
        size = 9 * CHUNK
        with pytest.raises(InvalidRequest, match=rf"value: {size} bytes .*'big'.* pool, which has {node.slots.total_bytes} "):
            await client.put("big", bytes_of(size))
        many = [(f"v{i}", bytes_of(CHUNK // 2)) for i in range(20)]
        with pytest.raises(InvalidRequest, match=rf"items: 20 values .* {node.slots.total_bytes} in all; put fewer"):
            await client.put_many(many)
        count = node.slots.total_bytes // LAYOUT.slot_bytes + 1
        blocks = [(key, np.zeros(LAYOUT.block_bytes, np.uint8)) for key in block_keys("k", count)]
        with pytest.raises(InvalidRequest, match=f"blocks: {count} take"):
            await client.put_blocks(LAYOUT, blocks)
        assert await client.get("small") == bytes_of(2 * CHUNK)
        assert (node.pool.numbers().get("evicted", 0), node.pool.numbers()["reservations"]) == (0, 0)


async def test_a_value_above_its_tenants_quota_has_no_room_and_nothing_goes_for_it(tmp_path: Path) -> None:
    async with node_at(tmp_path, quotas={"t": 4 * MIB}) as node, await StoreClient.connect(tmp_path, tenant="t") as client:
        assert await client.put("small", bytes_of(CHUNK)) is Put.STORED
        assert await client.put("big", bytes_of(6 * CHUNK)) is Put.NO_ROOM
        assert await client.exists("small")
        assert node.pool.numbers().get("evicted", 0) == 0


async def test_of_values_with_one_key_in_a_call_the_first_counts(tmp_path: Path) -> None:
    async with joined(tmp_path, pool_bytes=8 * MIB) as (_, client):
        items = [("a", b"1"), ("b", b"2"), (b"a", b"3"), *[(f"c{i}", b"4") for i in range(20)], ("a", b"5")]
        puts = await client.put_many(items)
        assert [i for i, put in enumerate(puts) if put is not Put.STORED] == [2, 23]
        assert {puts[2], puts[23]} == {Put.THERE}
        assert await client.get("a") == b"1"


async def test_namespaces_and_tenants_do_not_see_each_other(tmp_path: Path) -> None:
    async with node_at(tmp_path):
        faces = [("a", "t"), ("b", "t"), ("a", "u")]
        clients = [await StoreClient.connect(tmp_path, namespace=n, tenant=t) for n, t in faces]
        for i, client in enumerate(clients):
            assert await client.put("v", bytes([i])) is Put.STORED
        assert [await client.get("v") for client in clients] == [bytes([i]) for i in range(3)]
        for client in clients:
            await client.close()


async def test_a_flipped_bit_in_the_pool_is_a_miss_and_counted(tmp_path: Path) -> None:
    async with joined(tmp_path) as (node, client):
        for size, at in ((100, 50), (3 * CHUNK, CHUNK // 2), (3 * CHUNK, 3 * CHUNK - 1)):
            value = bytes_of(size)
            assert await client.put("v", value) is Put.STORED
            _flip(node, value, at)
            assert await client.get("v") is None
            assert not await client.exists("v")
            assert await client.put("v", value) is Put.STORED  # the key can be written again
            assert await client.get("v") == value
            await client.remove("v")
        assert node.pool.numbers()["digest_mismatches_library"] == 3


def _flip(node: StoreNode, value: bytes, at: int) -> None:
    """One bit of the byte ``at`` of a value, where it lies in the pool."""
    start = at // CHUNK * CHUNK
    part = value[start : start + 64]
    for view in node.regions.views:
        found = view.tobytes().find(part)
        if found >= 0:
            view[found + at - start] ^= 1
            return
    raise AssertionError("the value is not in the pool")


async def test_into_of_another_size_is_refused_and_the_client_goes_on(tmp_path: Path) -> None:
    async with joined(tmp_path) as (node, client):
        await client.put("v", b"12345")
        with pytest.raises(InvalidRequest, match="4 bytes for a value of 5"):
            await client.get("v", into=bytearray(4))
        with pytest.raises(InvalidRequest, match="writable"):
            await client.get("v", into=b"12345")
        assert await client.get("v") == b"12345"
        assert node.pool.numbers()["pins"] == 0


async def test_a_value_that_cannot_be_stored_is_named_by_its_key_and_none_of_its_call_is_stored(tmp_path: Path) -> None:
    async with joined(tmp_path) as (_, client):
        for value in ("text", 7, None, np.array([{}], dtype=object), [b"x", 3]):
            with pytest.raises(InvalidRequest, match=r"value: .*\(key 'bad'\)"):
                await client.put_many([("good", b"x"), ("bad", value)])
        assert await client.exists_many(["good", "bad"]) == [False, False]


async def test_memory_of_another_dtype_or_shape_is_refused_as_a_target_and_plain_bytes_are_not(tmp_path: Path) -> None:
    import torch

    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    async with joined(tmp_path) as (node, client):
        await client.put_many([("a", array), ("t", torch.from_numpy(array)), ("b", array.tobytes())])
        for into in (np.zeros(12, np.float32), np.zeros((3, 4), np.int32), torch.zeros(4, 3), np.zeros((3, 16), np.uint8)):
            for key in "at":
                with pytest.raises(InvalidRequest, match=r"into: .* where the value is <f4 of shape \(3, 4\)"):
                    await client.get(key, into=into)
            assert await client.get("b", into=into) is into  # plain bytes contradict nothing
        for into in (np.zeros((3, 4), np.float32), torch.zeros(3, 4), np.zeros(48, np.uint8), bytearray(48), [bytearray(48)]):
            for key in "atb":
                assert await client.get(key, into=into) is into
                mine = into[0] if isinstance(into, list) else into
                assert bytes(memoryview(mine.numpy() if isinstance(mine, torch.Tensor) else mine)) == array.tobytes()
        assert node.pool.numbers()["pins"] == 0
        assert node.numbers()["sessions"] == 1


async def test_a_target_of_the_wrong_size_among_many_costs_no_connection(tmp_path: Path) -> None:
    names = [f"v{i}" for i in range(600)]
    async with joined(tmp_path) as (node, client):
        await client.put_many([(name, b"12345") for name in names])
        link = client._client._link
        into = [bytearray(5) for _ in names]
        into[1] = bytearray(4)
        with pytest.raises(InvalidRequest, match="into: 4 bytes for a value of 5"):
            await client.get_many(names, into)
        assert await client.get("v0") == b"12345"
        assert client._client._link is link
        assert node.pool.numbers()["pins"] == 0


async def test_blocks_of_kv_are_stored_and_read_by_their_keys(tmp_path: Path) -> None:
    keys = block_keys("k", 70)
    blocks = [(key, block_bytes(key)) for key in keys]
    async with joined(tmp_path) as (_, client):
        assert await client.put_blocks(LAYOUT, blocks[:3]) == [Put.STORED] * 3
        assert await client.put_blocks(LAYOUT, blocks) == [Put.THERE] * 3 + [Put.STORED] * 67
        assert await client.put_blocks(LAYOUT, blocks[:1], parent=b"x" * 16) == [Put.THERE]
        assert await client.put_blocks(LAYOUT, [(b"y" * 16, blocks[0][1])], parent=b"x" * 16) == [Put.NO_PARENT]
        into = [np.zeros(LAYOUT.block_bytes, np.uint8) for _ in keys]
        assert await client.get_blocks(LAYOUT, keys, into) == 70
        assert all((mine == block).all() for mine, (_, block) in zip(into, blocks, strict=True))
        assert await client.lookup_blocks([*keys, b"z" * 16]) == 70
        assert await client.exists_blocks([keys[69], b"z" * 16, keys[0]]) == [True, False, True]
        assert await client.remove_blocks(keys[40:41]) == 1
        assert await client.lookup_blocks(keys) == 40  # those after it went with it
        assert await client.get_blocks(LAYOUT, keys, into) == 40


async def test_blocks_of_latents_are_stored_and_read_and_are_no_keys_and_values(tmp_path: Path) -> None:
    latents = KVLayout("cd" * 16, layers=3, kv_heads=1, head_dim=40, dtype="bfloat16", block_tokens=16, kind="mla")
    plain, keys, rng = replace(latents, kind="kv"), block_keys("l", 5), np.random.default_rng(1)
    blocks = [(key, rng.integers(0, 255, latents.block_bytes, dtype=np.uint8)) for key in keys]
    async with joined(tmp_path) as (_, client):
        assert await client.put_blocks(latents, blocks) == [Put.STORED] * 5
        into = [np.zeros(latents.block_bytes, np.uint8) for _ in keys]
        assert await client.get_blocks(latents, keys, into) == 5
        assert all((mine == block).all() for mine, (_, block) in zip(into, blocks, strict=True))
        with pytest.raises(LayoutMismatch, match="kind 'mla' here, 'kv'"):
            await client.put_blocks(plain, [(b"k" * 16, np.zeros(plain.block_bytes, np.uint8))])


async def test_a_second_shape_of_a_known_model_is_refused_by_name(tmp_path: Path) -> None:
    other = KVLayout(LAYOUT.model, LAYOUT.layers, LAYOUT.kv_heads, LAYOUT.head_dim, LAYOUT.dtype, block_tokens=32)
    async with joined(tmp_path) as (_, client):
        with pytest.raises(LayoutMismatch, match="block_tokens 16 here, 32"):
            await client.put_blocks(other, [(b"k" * 16, np.zeros(other.block_bytes, np.uint8))])
        assert await client.put("v", b"x") is Put.STORED


async def test_sixteen_writers_of_one_key_leave_one_copy(tmp_path: Path) -> None:
    value = bytes_of(2 * CHUNK + 9)
    async with node_at(tmp_path, pool_bytes=64 * MIB) as node:
        clients = [await StoreClient.connect(tmp_path) for _ in range(16)]
        puts = await asyncio.gather(*[client.put("v", value) for client in clients])
        assert puts.count(Put.STORED) == 1
        assert set(puts) <= {Put.STORED, Put.THERE, Put.COMING}
        assert [await client.get("v") for client in clients] == [value] * 16
        numbers = node.pool.numbers()
        assert (numbers["slots_sealed"], numbers["reservations"], numbers["pins"]) == (chunks_of(len(value)), 0, 0)
        for client in clients:
            await client.close()


async def test_a_cancelled_get_ends_before_the_cancellation_goes_on(tmp_path: Path) -> None:
    value = bytes_of(6 * CHUNK)
    async with joined(tmp_path) as (node, client):
        await client.put("v", value)
        into = bytearray(len(value))
        getting = asyncio.create_task(client.get("v", into=into))
        await asyncio.sleep(0)
        getting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await getting
        assert into == value  # nobody writes into it any more
        await until(lambda: node.pool.numbers()["pins"] == 0, "no pin")


async def test_after_the_node_came_back_the_next_call_connects_anew(tmp_path: Path) -> None:
    async with node_at(tmp_path):
        client = await StoreClient.connect(tmp_path)
        await client.put("v", b"1")
    with pytest.raises(PeerSilent):
        await client.get("v")
    with pytest.raises(PeerSilent, match="no store node answers"):
        await client.get("v")
    async with node_at(tmp_path):
        assert await client.get("v") is None
        assert await client.put("v", b"2") is Put.STORED
        await client.close()
        with pytest.raises(InvalidRequest, match="client: it was closed"):
            await client.get("v")


async def test_values_on_the_ssd_tier_are_there_after_a_restart(tmp_path: Path) -> None:
    ssd = {"ssd_path": str(tmp_path / "ssd"), "ssd_bytes": 64 * MIB, "ssd_write": "through"}
    values = {f"v{size}": bytes_of(size) for size in (10, 70_000, 2 * CHUNK + 5)}
    async with joined(tmp_path, pool_bytes=96 * MIB, **ssd) as (node, client):
        assert set(await client.put_many(list(values.items()))) == {Put.STORED}
        await until(lambda: node.pool.numbers()["blocks_on_ssd"] == len(node.pool.held.index), "all is on SSD")
    async with joined(tmp_path, pool_bytes=96 * MIB, **ssd) as (node, client):
        assert await client.get_many(list(values)) == list(values.values())
        assert await client.remove(*values) == 3
        assert await client.get_many(list(values)) == [None] * 3


async def test_a_closed_client_says_so(tmp_path: Path) -> None:
    async with node_at(tmp_path):
        client = await asyncio.to_thread(SyncStoreClient.connect, tmp_path)
        client.close()
        client.close()
        with pytest.raises(InvalidRequest, match="closed"):
            client.exists("v")


def test_a_folder_without_a_node_or_with_two_is_refused_with_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="moonpool store serve"):
        StoreClient.connect_sync(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.store.sock").touch()
    with pytest.raises(ConfigError, match=r"2 store sockets \(a\.store\.sock, b\.store\.sock\); name one"):
        StoreClient.connect_sync(tmp_path)


async def test_a_state_folder_whose_name_is_too_long_for_a_socket_leads_to_it_all_the_same(tmp_path: Path) -> None:
    folder = tmp_path / ("long" * 25)
    folder.mkdir()
    async with node_at(folder) as node:
        assert node.host_face is not None
        assert node.host_face.path.parent != folder
        async with await StoreClient.connect(folder) as client:
            assert await client.put("v", b"x") is Put.STORED
    assert not list(folder.glob("*.sock"))


def test_the_library_is_imported_without_torch_ray_and_grpc() -> None:
    code = (
        "import sys; from moonpool.kvstore import StoreClient; print([m for m in ('torch', 'ray', 'grpc') if m in sys.modules])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_forked_child_may_not_use_its_parents_client(tmp_path: Path) -> None:
    async with node_at(tmp_path):
        client = await asyncio.to_thread(SyncStoreClient.connect, tmp_path)
        link = client._link
        assert link is not None
        link._pid = os.getpid() + 1
        with pytest.raises(InvalidRequest, match="forked"):
            await asyncio.to_thread(client.exists, "v")
        client.close()


def test_every_class_of_chunks_fits_its_slot_with_little_waste() -> None:
    for size, layout in zip(CLASSES, RAW_LAYOUTS, strict=True):
        assert layout.slot_bytes == size + 4096
