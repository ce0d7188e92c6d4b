"""A user of the store library, for tests: python -m support.library_user FOLDER WHAT. Prints a line, then obeys standard input.

``half``: begins to put a value of eight chunks under "v" and stops in the middle. Told "hang up", it loses its connection
there; it writes nothing more, but the store node cannot know. ``put`` and ``get``: say what came of it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

from moonpool.kvstore import SyncStoreClient
from moonpool.kvstore.library.chunks import Fill, fill
from moonpool.kvstore.library.items import ValueItem
from moonpool.kvstore.library.objects import CHUNK
from moonpool.kvstore.library.putting import Putting

VALUE = bytes(range(256)) * (8 * CHUNK // 256)


class HalfWay(ValueItem):
    """Writes each chunk at once, and waits before its fifth one, for ever."""

    __slots__ = ("client",)
    client: SyncStoreClient

    def fills(self, index: int, memory: memoryview, offset: int) -> Sequence[Fill]:
        if index == 4:
            obey(self.client)
        fill(super().fills(index, memory, offset))
        return ()


def obey(client: SyncStoreClient) -> None:
    print("half", flush=True)
    for line in sys.stdin:
        if line.strip() == "hang up" and client._link is not None:
            client._link.close()
            print("hung up", flush=True)
    sys.exit()


def half(client: SyncStoreClient) -> Any:
    item = HalfWay(client.key("v"), VALUE, 1, {})
    item.client = client
    return client._call(lambda link: Putting(link).run([item]))


def main(folder: str, what: str) -> None:
    client = SyncStoreClient.connect(folder)
    match what:
        case "half":
            half(client)
        case "put":
            print(client.put("v", VALUE), flush=True)
        case "get":
            print(client.exists("v"), client.get("v") == VALUE, flush=True)
    client.close()


if __name__ == "__main__":
    main(*sys.argv[1:])
