"""Who is in a struck cluster: two sides (node ids) with one process of every role each. Pure."""

from __future__ import annotations

from moonpool.bench.chaos.kinds import REGISTRY, ROLES, Kind
from moonpool.core.ids import Role

SIDES = ("a", "b")


def of_role(side: str, role: str) -> str:
    """The member of ``role`` on ``side``, as the launcher numbers them."""
    return f"store-{side}" if role == Role.STORE else f"{role}-{SIDES.index(side)}"


NAMES = {side: tuple(of_role(side, role) for role in ROLES) for side in SIDES}
MEMBERS = tuple(name for side in SIDES for name in NAMES[side])


def possible(kind: Kind, side: str) -> frozenset[str]:
    """Members that a strike of ``kind`` on ``side`` may name as its targets."""
    if not kind.role:
        return frozenset(NAMES[side])
    if kind.role == REGISTRY:
        return frozenset()
    ends = {of_role(side, kind.role)}
    if kind.peer and kind.peer != REGISTRY:
        ends |= {of_role(other, kind.peer) for other in SIDES}
    return frozenset(ends)
