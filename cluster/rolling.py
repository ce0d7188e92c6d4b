"""Restarting the processes of a cluster one after the other: in which order, and what a restart would leave without. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from moonpool.cluster.groups import belongs
from moonpool.core.ids import MemberId, Role
from moonpool.core.membership import Member

# A store node first: what it moves out lies with others before workers of its host are away, too. Gateways last: they are
# what clients are connected to.
ORDER = (Role.STORE, Role.PREFILL, Role.DECODE, Role.BOTH, Role.CONDUCTOR, Role.GATEWAY)


def in_order(members: Iterable[Member]) -> list[Member]:
    return sorted(members, key=lambda m: (ORDER.index(m.role), m.id))


def gap(members: Sequence[Member], away: MemberId) -> str:
    """What clients would miss while ``away`` is restarted; empty: the others serve meanwhile. ``members``: all live ones.

    Others are those of its model. What is missing anyway is not this restart's doing.
    """
    model = next((m.model for m in members if m.id == away), "")
    group = [m for m in members if belongs(m, model)]
    before, after = _serving(group), _serving([m for m in group if m.id != away])
    told = next((told for part, told in _TOLD.items() if before[part] and not after[part]), "")
    several = len({m.model for m in members if m.model}) > 1
    return f"of model {model!r}: {told}" if told and model and several else told


_TOLD = {
    "gateway": "it is the only gateway: connections are refused until it listens again",
    "conductor": "it is the only ready conductor: new requests wait until it is back",
    "prefill": "no other prefill worker is ready: new prompts wait, or get 503, until it is back",
    "landing": "no other decode worker with a ready store node is there: new requests wait, or get 503, until it is back",
}


def _serving(members: Sequence[Member]) -> dict[str, bool]:
    ready = [m for m in members if m.ready]
    roles = {m.role for m in ready}
    stores = {m.node for m in ready if m.role is Role.STORE}
    landing = any(m.role is Role.BOTH or (m.role is Role.DECODE and m.node in stores) for m in ready)
    return {
        "gateway": Role.GATEWAY in roles,
        "conductor": Role.CONDUCTOR in roles,
        "prefill": bool(roles & {Role.PREFILL, Role.BOTH}),
        "landing": landing,
    }
