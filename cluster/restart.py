"""Asks one process after the other to restart, and waits for each one's new life to serve before the next one leaves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass

import grpc

from moonpool.cluster import survey
from moonpool.cluster.leaving import WORKERS
from moonpool.core.errors import InvalidRequest, NoPath
from moonpool.core.ids import Incarnation, MemberId, Role
from moonpool.core.membership import Liveness, Member
from moonpool.wire import pb
from moonpool.wire.channels import dial

LOOK_S = 0.2
SETTLE_S = 0.5  # for everybody to hear of the new life
ASK_S = 3.0
BACK = "is back, not ready yet"


@dataclass(frozen=True, slots=True)
class Restarted:
    """``left_s``: until the old life was gone; ``seconds``: until the new one served."""

    member: MemberId
    role: str
    seconds: float
    left_s: float
    life: Incarnation


async def live_members(registry: str) -> list[Member]:
    return [c.member for c in await survey.members(registry) if c.liveness is Liveness.LIVE]


async def restart(registry: str, member: Member, limit_s: float, say: Callable[[str], None], trust: str = "") -> Restarted:
    """Returns once its new life serves. NoPath where it does not within ``limit_s``, InvalidRequest where it is too old.

    ``trust``: PEM file of the gateways' own HTTPS certificate, or of who signed it, where that is not for the system to say.
    """
    began, left_s, stage = time.monotonic(), 0.0, ""
    await _ask(member)
    while time.monotonic() - began < limit_s:
        now = await _life_of(registry, member.id)
        newer = now is not None and now.incarnation > member.incarnation
        if not left_s and (now is None or newer):
            left_s = time.monotonic() - began
        told = BACK if newer else "leaves" if now is not None else "left"
        if newer and now is not None and now.ready and await _serves(registry, now, trust):
            await asyncio.sleep(SETTLE_S)
            return Restarted(member.id, now.role.value, time.monotonic() - began, left_s, now.incarnation)
        if told != stage:
            stage = told
            say(f"{member.id} {told}")
        await asyncio.sleep(LOOK_S)
    if stage == BACK:
        why = "it is back, but does not serve; its log says why"
    else:
        why = "is it kept by a launcher that starts it again?"
    raise NoPath(f"{member.id}: does not serve again after {limit_s:.0f} s (--timeout); {why}", retry_after_s=1.0)


async def _ask(member: Member) -> None:
    async with dial(member.address) as channel:
        try:
            await pb.admin_rpc.AdminStub(channel).Restart(pb.types.Empty(), timeout=ASK_S)
        except grpc.aio.AioRpcError as e:
            raise InvalidRequest(f"{member.id}: does not take the request to restart: {e.code().name}: {e.details()}") from e


async def _life_of(registry: str, member: MemberId) -> Member | None:
    try:
        return next((m for m in await live_members(registry) if m.id == member), None)
    except NoPath:  # the registry is busy: it is asked again
        return None


async def _serves(registry: str, member: Member, trust: str) -> bool:
    """Ready by its own word is not all: a gateway sees a path, a store node has its host's workers back."""
    if member.role is Role.GATEWAY:
        return await asyncio.to_thread(_answers, member.details.get("url", ""), trust)
    if member.role is not Role.STORE:
        return True
    workers = [m.id for m in await live_members(registry) if m.role in WORKERS and m.node == member.node]
    answers = {a.change.member.id: a.numbers for a in await survey.survey(registry)}
    return all(answers.get(worker, {}).get("store_connected") for worker in workers)


def _answers(url: str, trust: str) -> bool:
    import urllib.request

    from moonpool.cluster.identity.https import trusting

    context = trusting(trust, names=False) if trust and url.startswith("https") else None
    try:
        with urllib.request.urlopen(f"{url}/ready", timeout=2.0, context=context) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
