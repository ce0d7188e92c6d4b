"""Asks a running cluster who is there and what each process says about itself."""

from __future__ import annotations

import asyncio
import json
from dataclasses import asdict, dataclass, field
from typing import Any

import grpc

from moonpool.cluster.etcd.address import is_etcd
from moonpool.cluster.groups import belongs
from moonpool.core.errors import InvalidRequest, NoPath
from moonpool.core.ids import Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.wire import pb
from moonpool.wire.channels import dial
from moonpool.wire.convert import from_wire
from moonpool.wire.status import why_unreachable

TIMEOUT_S = 3.0


@dataclass(frozen=True, slots=True)
class Answer:
    """``numbers`` and ``words`` are empty for whoever is not live, or did not answer (``trouble`` says why)."""

    change: MemberChange
    numbers: dict[str, float] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    trouble: str = ""

    def to_json(self) -> dict[str, Any]:
        return {
            **asdict(self.change.member),
            "liveness": self.change.liveness.value,
            "proof": self.change.proof,
            "numbers": self.numbers,
            "words": self.words,
            "trouble": self.trouble,
        }


async def members(registry: str) -> list[MemberChange]:
    """Everybody the registry knows, by id. NoPath when it does not answer."""
    if is_etcd(registry):
        from moonpool.cluster.etcd import listing  # heavy, and not everybody's

        return sorted(await listing.members(registry), key=lambda c: c.member.id)
    async with dial(registry) as channel:
        try:
            known = await pb.registry_rpc.RegistryStub(channel).List(pb.types.Empty(), timeout=TIMEOUT_S)
        except grpc.aio.AioRpcError as e:
            why = why_unreachable(e.details()) if e.code() is grpc.StatusCode.UNAVAILABLE else e.details()
            raise NoPath(f"registry: {registry} does not answer ({why}); is the cluster up?", retry_after_s=1.0) from e
    return sorted((from_wire(m, MemberChange) for m in known.members), key=lambda c: c.member.id)


async def survey(registry: str) -> list[Answer]:
    return list(await asyncio.gather(*(_ask(change) for change in await members(registry))))


def leaders_of(answers: list[Answer]) -> dict[str, Member]:
    """By model the conductor that acts in the background, where one does."""
    live = [a.change.member for a in answers if a.change.liveness is Liveness.LIVE and a.change.member.term]
    return {member.model: member for member in sorted(live, key=lambda member: (member.model, member.term))}


def leader_of(answers: list[Answer]) -> Member | None:
    """Of the only model, or of the first; None where nobody leads."""
    return next(iter(leaders_of(answers).values()), None)


def carriers_between_nodes(answers: list[Answer]) -> set[str]:
    """Carriers that really moved bytes from one node id to another, by what the senders say.

    A store node sends to other nodes only. A worker on a node that also has a decode worker may have sent to its own
    node: its words do not tell these apart, so they count only where they cannot be local.
    """
    decoding = {a.change.member.node for a in answers if a.change.member.role in (Role.DECODE, Role.BOTH)}
    used: set[str] = set()
    for answer in answers:
        member = answer.change.member
        sent = answer.words.get("carriers_sent" if member.role is Role.STORE else "carriers", "")
        if member.role is Role.STORE or member.node not in decoding:
            used |= {part.split("(")[0].strip() for part in sent.split(",") if part.strip()}
    return used


async def _ask(change: MemberChange) -> Answer:
    if change.liveness is not Liveness.LIVE:
        return Answer(change)
    async with dial(change.member.address) as channel:
        return await ask(change, channel, TIMEOUT_S)


async def ask(change: MemberChange, channel: grpc.aio.Channel, timeout_s: float) -> Answer:
    """What a live member says about itself over ``channel``; ``trouble`` where it does not."""
    try:
        stats = await pb.admin_rpc.AdminStub(channel).Stats(pb.types.Empty(), timeout=timeout_s)
    except grpc.aio.AioRpcError as e:
        return Answer(change, trouble=trouble_of(e))
    return Answer(change, dict(stats.numbers), dict(stats.words))


def trouble_of(error: grpc.aio.AioRpcError) -> str:
    down = error.code() is grpc.StatusCode.UNAVAILABLE
    return f"{error.code().name}: {why_unreachable(error.details()) if down else error.details()}"


async def rebalance(registry: str, apply: bool, switches: dict[str, str], model: str = "") -> dict[str, Any]:
    """What a conductor of ``model`` would do about the split of roles, or begins to do.

    NoPath without a conductor that answers; InvalidRequest where the cluster has several models and none is named.
    """
    conductors = [c.member for c in await members(registry) if c.liveness is Liveness.LIVE and c.member.role is Role.CONDUCTOR]
    served = sorted({conductor.model for conductor in conductors if conductor.model})
    if (model and model not in served) or (not model and len(served) > 1):
        what = f"{model!r} has no conductor" if model else "this cluster serves several"
        raise InvalidRequest(f"--model: {what}; give one of {', '.join(served) or 'none'}", param="model")
    conductors = [conductor for conductor in conductors if belongs(conductor, model)]
    if apply and conductors and not any(conductor.term for conductor in conductors):
        raise NoPath("conductor: none leads at this moment; ask again in a few seconds", retry_after_s=2.0)
    for conductor in sorted(conductors, key=lambda member: -member.term):  # the leading one first
        async with dial(conductor.address) as channel:
            request = pb.conductor.RebalanceRequest(apply=apply, switches=switches)
            try:
                reply = await pb.conductor_rpc.ConductorStub(channel).Rebalance(
                    request, timeout=TIMEOUT_S * (1 + len(switches))
                )
            except grpc.aio.AioRpcError as e:
                if e.code() is grpc.StatusCode.INVALID_ARGUMENT:
                    raise InvalidRequest(e.details() or "refused") from e
                continue
        told: dict[str, Any] = json.loads(reply.json)
        return told
    raise NoPath("conductor: none answers; it is the one that knows the load", retry_after_s=1.0)
