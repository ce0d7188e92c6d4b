"""What the OpenAPI document says may be sent, and what it says may not, from a generator: an answer or a clear refusal."""

from __future__ import annotations

import asyncio
import os
import sys

from support.gateway_front import Front, eventually, says

EXAMPLES = os.environ.get("MOONPOOL_HTTP_EXAMPLES", "5")  # of each route
IDLE = ("requests_in_flight", "placing", "waiting_at_conductors")


async def test_generated_requests_meet_no_server_error_and_leave_nothing(tiny: Front) -> None:
    tiny.decode.script = says(5, 6, 7)
    command = [sys.executable, "-m", "schemathesis.cli", "run", f"{tiny.gateway.url}/openapi.json", "--no-color"]
    command += ["--checks", "not_a_server_error", "--max-examples", EXAMPLES, "--seed", "1", "--generation-database", "none"]
    command += ["--request-timeout", "20", "--suppress-health-check", "all"]
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT)
    said, _ = await process.communicate()
    assert process.returncode == 0, said.decode(errors="replace")[-4000:]
    await eventually(lambda: not any(tiny.gateway.numbers()[name] for name in IDLE), seconds=10)
    answer = await tiny.client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 3})
    assert answer.status_code == 200
