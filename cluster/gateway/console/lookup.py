"""Everything the cluster remembers of one request: its instants in every process, and its conductor's decisions."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import grpc
import grpc.aio

from moonpool.cluster.gateway.console.waterfall import Part, waterfall
from moonpool.cluster.gateway.endpoints import Endpoints
from moonpool.cluster.gateway.flights import Flight
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime
from moonpool.core.membership import Member, Peers
from moonpool.wire import pb
from moonpool.wire.channels import dial

TIMEOUT_S = 2.0
MOST_ASKED = 64  # processes, where nobody says which of them had the request
MOST_PARTS = 64
WORKERS = (Role.PREFILL, Role.DECODE, Role.BOTH)


class Lookup:
    """At one gateway. Of requests that came by another gateway it knows what that one still remembers."""

    def __init__(self, me: Member, peers: Peers, endpoints: Endpoints) -> None:
        self._me, self._peers, self._endpoints = me, peers, endpoints
        self._now = asyncio.get_running_loop().time

    async def of(self, name: str) -> dict[str, Any]:
        """``name``: our id, or a choice's. {"found": false} where nobody remembers it."""
        flight, gateway, now = self._here(name)
        runs = flight.runs if flight is not None else ()
        choice = name if name in runs or not runs else runs[0]
        decisions = await self._decisions(choice)
        if gateway is None:
            gateway = await self._elsewhere(choice)
        parts = await self._parts(choice, decisions)
        told: dict[str, Any] = {
            "found": gateway is not None or decisions is not None,
            "request": name,
            "choice": choice,
            "choices": list(runs),
            "flight": asdict(flight) if flight is not None else None,
            "decision": decisions,
            "waterfall": waterfall(gateway, parts, now) if gateway is not None else None,
        }
        return told

    def _here(self, name: str) -> tuple[Flight | None, Part | None, float | None]:
        """As far as this gateway knows it; the time of its clock where it is under way."""
        visit, now = self._endpoints.running(name), self._now()
        if visit is not None:
            runs = visit.generation.runs if visit.generation is not None else ()
            life = next((run.lifetime for run in runs if name in (run.ledger.request.id, visit.id)), visit.lifetime)
            return self._endpoints.flight(visit), self._part(life), now
        flight = self._endpoints.recent.find(name)
        names = (name, *(flight.runs[:1] if flight is not None and name == flight.id else ()))
        life_of = [self._endpoints.lifetimes.of(one) for one in names]
        found = next((lives[-1][1] for lives in reversed(life_of) if lives), None)
        return flight, self._part(found) if found is not None else None, None

    def _part(self, life: Lifetime) -> Part:
        return Part(self._me.id, Role.GATEWAY, self._me.node, _host(self._me.address), 0, life)

    async def _elsewhere(self, choice: str) -> Part | None:
        """As another gateway remembers it."""
        others = [member for member in self._peers.live(Role.GATEWAY) if member.id != self._me.id]
        found = await self._ask(others, choice)
        return next((part for part in found if Instant.ARRIVED in part.life.at), None)

    async def _parts(self, choice: str, decisions: dict[str, Any] | None) -> list[Part]:
        known = [member for role in (*WORKERS, Role.STORE) for member in self._peers.live(role)]
        if decisions is not None:
            named, nodes = _placed(decisions)
            known = [m for m in known if m.id in named or (m.role is Role.STORE and m.node in nodes)]
        return (await self._ask(known[:MOST_ASKED], choice))[:MOST_PARTS]

    async def _ask(self, members: Iterable[Member], choice: str) -> list[Part]:
        told = await asyncio.gather(*(self._lives(member, choice) for member in members))
        return [part for parts in told for part in parts]

    async def _lives(self, member: Member, choice: str) -> list[Part]:
        """Nothing where it does not answer, or says what cannot be read."""
        asked = pb.admin.LivesRequest(request=choice)
        try:
            async with dial(member.address) as channel:
                reply = await pb.admin_rpc.AdminStub(channel).Lives(asked, timeout=TIMEOUT_S)
            lives = json.loads(reply.json)
            return [
                Part(
                    member.id,
                    member.role,
                    member.node,
                    _host(member.address),
                    int(attempt),
                    Lifetime({Instant(name): float(at) for name, at in instants.items()}),
                )
                for request, attempt, instants in lives
                if request == choice
            ]
        except (grpc.aio.AioRpcError, ValueError, TypeError, AttributeError):
            return []

    async def _decisions(self, choice: str) -> dict[str, Any] | None:
        """Of whichever conductor remembers it, the leading one first."""
        conductors = sorted(self._peers.live(Role.CONDUCTOR), key=lambda member: -member.term)
        told = await asyncio.gather(*(self._explain(member, choice) for member in conductors))
        return next((one for one in told if one is not None), None)

    async def _explain(self, conductor: Member, choice: str) -> dict[str, Any] | None:
        asked = pb.conductor.ExplainRequest(request=choice)
        try:
            async with dial(conductor.address) as channel:
                reply = await pb.conductor_rpc.ConductorStub(channel).Explain(asked, timeout=TIMEOUT_S)
            told = json.loads(reply.json) if reply.found else None
        except (grpc.aio.AioRpcError, ValueError):
            return None
        return told if isinstance(told, dict) else None


def _placed(decisions: dict[str, Any]) -> tuple[set[str], set[str]]:
    """Workers and nodes that were chosen, in any attempt."""
    placed = [one["placed"] for one in decisions.get("decisions", ()) if one.get("placed")]
    chosen = [one[end] for one in placed for end in ("prefill", "decode")]
    return {worker["id"] for worker in chosen}, {worker["node"] for worker in chosen}


def _host(address: str) -> str:
    return address.rpartition(":")[0]
