"""What callers get wrong: said by name before anything is sent, and the connection goes on."""

from __future__ import annotations

import asyncio
import socket
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.store import LAYOUT, Roll, block_bytes, config, member

from moonpool.core.config import MIB
from moonpool.core.errors import ConfigError, InvalidRequest, PeerSilent
from moonpool.core.ids import Role
from moonpool.kvstore import Put, StoreClient, SyncStoreClient
from moonpool.kvstore.library import arguments, values
from moonpool.kvstore.library.objects import CLASSES, MAX_BYTES
from moonpool.kvstore.node import StoreNode

KEY = b"k" * 16
BLOCK = block_bytes(KEY)
WRONG: dict[str, tuple[str, Callable[[Any], object]]] = {
    "text for a list": (r"keys: 'tw' is str; give a list, as in get_many", lambda c: c.get_many("tw")),
    "bytes for a list": ("keys: b'tw' is bytes; give a list", lambda c: c.exists_many(b"tw")),
    "a number for a list": ("keys: 7 is int", lambda c: c.get_many(7)),
    "a number for a key": ("key: 7 is int; give a str or bytes", lambda c: c.get(7)),
    "nothing for a key": ("key: None is NoneType", lambda c: c.put(None, b"x")),
    "a list for a key": ("key: .* is list", lambda c: c.remove(["a", "b"])),
    "half a character": ("key: .* is no text that UTF-8 can hold", lambda c: c.get("\ud800")),
    "no pair": (r"items\[1\]: 'ab' is str; give pairs", lambda c: c.put_many([("a", b"x"), "ab"])),
    "a triple": (r"items\[0\]: .* is tuple; give pairs", lambda c: c.put_many([("a", b"x", 1)])),
    "bytes for items": ("items: b'ab' is bytes", lambda c: c.put_many(b"ab")),
    "text for a value": ("value: str is no buffer", lambda c: c.put("a", "text")),
    "a masked array": ("value: a masked array", lambda c: c.put("a", np.ma.array([1, 2], mask=[0, 1], dtype=np.uint8))),
    "a target that is none": ("into: .*no buffer", lambda c: c.get("a", into=7)),
    "a target that is read-only": ("into: .*writable", lambda c: c.get("a", into=b"123")),
    "too few targets": ("into: 1 targets for 2 keys", lambda c: c.get_many(["a", "b"], [bytearray(1)])),
    "a short block key": ("keys: a block key has 16 bytes, b'k' has 1", lambda c: c.lookup_blocks([b"k"])),
    "a block key to remove": ("keys: a block key has 16 bytes", lambda c: c.remove_blocks([KEY, b"kk"])),
    "text for a block key": ("keys: .* is str; a block key is bytes", lambda c: c.exists_blocks(["k" * 16])),
    "one block key for a list": ("keys: .* is bytes; give a list", lambda c: c.lookup_blocks(KEY)),
    "no layout": ("layout: 'float32' is str", lambda c: c.put_blocks("float32", [(KEY, BLOCK)])),
    "bytes for a block": ("blocks: .* is bytes; give numpy arrays", lambda c: c.put_blocks(LAYOUT, [(KEY, BLOCK.tobytes())])),
    "a block too short": ("blocks: uint8 of shape", lambda c: c.put_blocks(LAYOUT, [(KEY, BLOCK[:-1])])),
    "keys alone for blocks": (r"blocks\[0\]: .* give pairs", lambda c: c.put_blocks(LAYOUT, [KEY])),
    "a short parent": ("parent: a block key has 16", lambda c: c.put_blocks(LAYOUT, [(KEY, BLOCK)], parent=b"")),
    "a block to read into": ("into: .* is bytearray", lambda c: c.get_blocks(LAYOUT, [KEY], [bytearray(BLOCK.size)])),
}


async def test_a_wrong_argument_is_said_by_name_and_the_connection_goes_on(tmp_path: Path) -> None:
    settings = config(tmp_path, store={"pool_bytes": 16 * MIB, "region_bytes": 16 * MIB})
    node = await StoreNode.start(settings, member("store-a", Role.STORE, "a"), LAYOUT, Roll())
    try:
        client = await asyncio.to_thread(SyncStoreClient.connect, tmp_path)
        link = client._link
        for case, (words, call) in WRONG.items():
            with pytest.raises(InvalidRequest, match=words):
                await asyncio.to_thread(call, client)
            assert client._link is link, case
        assert await asyncio.to_thread(client.put, "a", b"x") is Put.STORED
        assert await asyncio.to_thread(client.get_many, iter(["a"])) == [b"x"]
        assert (node.numbers()["library_malformed"], client._link) == (0, link)
        client.close()
    finally:
        await node.close()


def test_tensors_that_are_more_than_their_memory_are_refused_by_name() -> None:
    import torch

    plain = torch.ones(2, 2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch is about to drop such tensors
        quantized = torch.quantize_per_tensor(plain, 0.1, 0, torch.qint8)
    wrong = {
        "sparse": plain.to_sparse(),
        "meta": torch.ones(2, device="meta"),
        "conjugate": torch.ones(2, dtype=torch.complex64).conj(),
        "quantized": quantized,
    }
    for words, value in wrong.items():
        with pytest.raises(InvalidRequest, match=f"value: .*{words}"):
            values.size_of(value)
        with pytest.raises(InvalidRequest, match=f"into: .*{words}"):
            values.target(value)
    assert values.size_of(plain) == 16


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"namespace": 7}, "namespace: 7 is int"),
        ({"tenant": ""}, "tenant: .* has 0 bytes; give 1 to 256"),
        ({"tenant": "t" * 257}, "tenant: .* has 257 bytes; give 1 to 256"),
        ({"namespace": "\ud800"}, "namespace: .* UTF-8"),
        ({"fetch_ms": -1}, "fetch_ms: -1 is int; give whole milliseconds"),
        ({"fetch_ms": 1.5}, "fetch_ms: 1.5 is float"),
    ],
)
def test_names_and_times_of_a_client_are_checked(tmp_path: Path, given: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidRequest, match=words):
        StoreClient.connect_sync(tmp_path, **given)


def test_a_wrong_path_is_named_with_what_to_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "file").touch()
    wrong: list[Any] = [tmp_path / "nowhere", tmp_path / "file", "", 7, b"bytes", "nul\0", "~/nowhere", tmp_path / ("x" * 300)]
    for path in wrong:
        with pytest.raises(ConfigError, match=r"path: .*moonpool store serve"):
            StoreClient.connect_sync(path)
    with pytest.raises(ConfigError, match=f"path: {tmp_path} has no"):
        StoreClient.connect_sync("~")


def test_a_socket_of_another_kind_is_a_wrong_path_and_one_without_a_listener_is_not(tmp_path: Path) -> None:
    def bound(name: str, kind: socket.SocketKind) -> Path:
        with socket.socket(socket.AF_UNIX, kind) as one:
            one.bind(str(tmp_path / name))
            one.listen()
            if name != "left.sock":
                with pytest.raises(ConfigError, match=r"path: .*moonpool store serve"):
                    StoreClient.connect_sync(tmp_path / name)
        return tmp_path / name

    bound("stream.sock", socket.SOCK_STREAM)
    bound("a.agent.sock", socket.SOCK_SEQPACKET)
    with pytest.raises(PeerSilent, match="no store node answers"):
        StoreClient.connect_sync(bound("left.sock", socket.SOCK_SEQPACKET))


def test_a_value_above_the_largest_is_refused_before_it_is_read() -> None:
    class Large(np.ndarray[Any, Any]):
        nbytes = MAX_BYTES + 1

    with pytest.raises(InvalidRequest, match=f"value: {MAX_BYTES + 1} bytes .* give at most {MAX_BYTES}"):
        arguments.named_values([("a", np.zeros(1).view(Large))])


def test_room_is_counted_in_slots_and_regions() -> None:
    slot = CLASSES[-1] + 4096
    one = arguments.Named(b"a", b"", CLASSES[-1])
    arguments.require_room([one, one], [2 * slot])
    for regions, items in (([slot, slot - 1], [one, one]), ([slot - 1, slot - 1], [one])):
        with pytest.raises(InvalidRequest):
            arguments.require_room(items, regions)
