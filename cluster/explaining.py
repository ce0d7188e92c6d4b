"""Asks a running cluster's conductors about their decisions, and fetches their records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from moonpool.cluster.survey import members
from moonpool.core.errors import ConfigError, InvalidRequest, NoPath
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member
from moonpool.wire import pb
from moonpool.wire.channels import dial

TIMEOUT_S = 3.0
RECORD_S = 60.0


async def of_request(registry: str, request: str) -> dict[str, Any] | None:
    """Every decision about ``request``, from whichever conductor has one. NoPath without a conductor."""
    for conductor in await _conductors(registry):
        if (told := await _explain(conductor, pb.conductor.ExplainRequest(request=request))) is not None:
            return told
    return None


async def newest(registry: str, last: int) -> list[dict[str, Any]]:
    """From each conductor its ``last`` newest decisions, as {conductor, decisions}. NoPath without a conductor."""
    told = [await _explain(one, pb.conductor.ExplainRequest(last=last)) for one in await _conductors(registry)]
    return [one for one in told if one is not None]


async def save_record(registry: str, path: Path, conductor: str = "") -> tuple[str, int]:
    """Write the record of ``conductor`` (else of the first that answers); its name and how many entries there are.

    InvalidRequest: no conductor of that name is live. ConfigError: the file cannot be written.
    """
    known = await _conductors(registry)
    chosen = [one for one in known if one.id == conductor] if conductor else known
    if not chosen:
        names = ", ".join(one.id for one in known)
        raise InvalidRequest(f"--conductor: {conductor!r} is no live conductor; use one of {names}", param="conductor")
    for one in chosen:
        try:
            return one.id, await _save(one, path)
        except grpc.aio.AioRpcError:
            continue
        except OSError as e:
            raise ConfigError(f"--record: cannot write {path}: {e.strerror}; give another file", param="record") from e
    raise NoPath("conductor: none answers; its record ends with it", retry_after_s=1.0)


async def _save(conductor: Member, path: Path) -> int:
    count = -1  # the first line is about the record
    async with dial(conductor.address) as channel:
        parts = pb.conductor_rpc.ConductorStub(channel).Record(pb.conductor.RecordRequest(), timeout=RECORD_S)
        with path.open("wb") as file:
            async for part in parts:
                file.write(part.lines)
                count += part.lines.count(b"\n")
    return count


async def _conductors(registry: str) -> list[Member]:
    live = [c.member for c in await members(registry) if c.liveness is Liveness.LIVE and c.member.role is Role.CONDUCTOR]
    if not live:
        raise NoPath("conductor: none is live; its records end with it", retry_after_s=1.0)
    return live


async def _explain(conductor: Member, request: pb.conductor.ExplainRequest) -> dict[str, Any] | None:
    """None: it remembers nothing of that, or does not answer."""
    async with dial(conductor.address, options=[("grpc.max_receive_message_length", -1)]) as channel:
        try:
            reply = await pb.conductor_rpc.ConductorStub(channel).Explain(request, timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return None
    if not reply.found:
        return None
    told: dict[str, Any] = json.loads(reply.json)
    return told
