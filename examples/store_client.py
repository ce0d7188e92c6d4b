"""Keep arrays, tensors and bytes in a host's pool, from any process of this host.

Start a store node first, then run this file:

    moonpool store serve --pool 1GiB
    python examples/store_client.py

An argument names another socket or state folder than the one that `moonpool store serve` uses by default.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path

import numpy as np

from moonpool.kvstore import Put, StoreClient

WHERE = sys.argv[1] if len(sys.argv) > 1 else Path.home() / ".cache/moonpool/clusters/store"

# What another process does with the value that the first one leaves in the pool.
OTHER = """
import sys, numpy as np
from moonpool.kvstore import StoreClient
with StoreClient.connect_sync(sys.argv[1], namespace="example") as client:
    found = client.exists("features/1")
    equal = np.array_equal(client.get("features/1"), np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000))
    print("from another process: stored,", "found," if found else "missing,", "equal" if equal else "different")
"""


def blocking() -> None:
    """Without an event loop."""
    with StoreClient.connect_sync(WHERE, namespace="example") as client:
        client.remove("greeting", "features/1")

        print("put:", client.put("greeting", b"hello"))  # stored
        print("again:", client.put("greeting", b"other"))  # there: a value does not change
        print("get:", bytes(client.get("greeting")))
        print("nobody:", client.get("nobody"))  # None: a miss is no error

        array = np.arange(1_000_000, dtype=np.float32).reshape(1000, 1000)
        client.put("features/1", array)  # dtype and shape come back with it
        subprocess.run([sys.executable, "-c", OTHER, str(WHERE)], check=True)

        into = np.empty_like(array)
        client.get("features/1", into=into)  # one copy, checked, into memory of yours
        print("into:", np.array_equal(into, array))


async def concurrent() -> None:
    """With one. Calls in batches are the fastest: one message to the store node for many keys."""
    async with await StoreClient.connect(WHERE, namespace="example") as client:
        rows = {f"row/{i}": np.full(4096, i, dtype=np.int16) for i in range(100)}
        await client.remove(*rows)
        puts = await client.put_many(list(rows.items()))
        print("batch:", puts.count(Put.STORED), "stored,", sum(await client.exists_many(list(rows))), "found")
        found = await client.get_many([*rows, "row/100"])
        print("got:", sum(one is not None for one in found), "of", len(found))


if __name__ == "__main__":
    blocking()
    asyncio.run(concurrent())
