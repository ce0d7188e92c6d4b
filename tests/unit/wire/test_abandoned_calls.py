"""What a failed test or an aborted task leaves behind in gRPC holds nobody up."""

from __future__ import annotations

import subprocess
import sys

ABANDON = """
import asyncio, gc
from moonpool.wire import channels

async def main():
    server = channels.server()
    channels.bind(server, "127.0.0.1:0")
    await server.start()  # and waits for a call
    return server

abandoned = asyncio.run(main())
del abandoned
gc.collect()
print("goes on")
"""


def test_a_server_that_nobody_stopped_is_collected_without_waiting_for_its_calls() -> None:
    done = subprocess.run((sys.executable, "-c", ABANDON), capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "goes on"), done.stderr
