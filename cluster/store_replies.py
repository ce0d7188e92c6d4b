"""What one store node answers to each call of the control API, as named values."""

from __future__ import annotations

from collections.abc import Awaitable, Sequence
from dataclasses import dataclass, field
from typing import Any

from moonpool.wire import pb

CALL_S = 10.0
KEYS_AT_ONCE = 1 << 15

Facts = dict[str, int | float | str]


@dataclass(frozen=True, slots=True)
class Reply:
    """What one node said: named values, or why it said nothing. ``rows`` where the answer is a list.

    ``wrong``: the trouble is that the call itself cannot be, and nothing changed.
    """

    node: str
    facts: Facts = field(default_factory=dict)
    rows: tuple[Facts, ...] = ()
    trouble: str = ""
    wrong: bool = False

    def to_json(self) -> dict[str, Any]:
        out: dict[str, Any] = {"node": self.node, **self.facts}
        if self.rows:
            out["rows"] = list(self.rows)
        return out | ({"trouble": self.trouble} if self.trouble else {})


async def here(stub: Any, keys: Sequence[bytes]) -> set[bytes]:
    """Which of ``keys`` a node has, in any tier."""
    found: set[bytes] = set()
    for i in range(0, len(keys), KEYS_AT_ONCE):
        part = keys[i : i + KEYS_AT_ONCE]
        bits = (await stub.Exists(pb.store.KeysRequest(keys=part), timeout=CALL_S)).bits
        found |= {key for at, key in enumerate(part) if bits[at // 8] >> at % 8 & 1}
    return found


async def inspect(stub: Any, keys: Sequence[bytes]) -> Reply:
    found = await stub.Inspect(pb.store_admin.InspectRequest(keys=keys), timeout=CALL_S)
    rows: list[Facts] = [
        {
            "block": i,
            "key": one.key.hex(),
            "tiers": "+".join(one.tiers),
            "codec": one.codec,
            "layout": one.layout,
            "tenant": one.tenant,
            "held": one.held,
            "bytes": one.bytes,
        }
        for i, one in enumerate(found.blocks)
        if one.tiers
    ]
    return Reply("", {"asked": len(keys), "leading": found.leading, "found": len(rows)}, tuple(rows))


async def describe(stub: Any) -> Reply:
    found = await stub.Describe(pb.types.Empty(), timeout=CALL_S)
    facts: Facts = {name: int(value) if value.is_integer() else value for name, value in found.numbers.items()}
    return Reply("", dict(sorted({**facts, **found.words}.items())), tuple(map(tenant, found.tenants)))


async def quotas(stub: Any) -> Reply:
    found = await stub.Quotas(pb.types.Empty(), timeout=CALL_S)
    return Reply("", {"pool_bytes": found.pool_bytes}, tuple(map(tenant, found.tenants)))


def tenant(use: Any) -> Facts:
    return {
        "tenant": use.tenant,
        "blocks": use.blocks,
        "used": use.used,
        "quota": use.quota,
        "soft": use.soft,
        "hard": use.hard,
    }


async def hold(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"held": done.held, "missing": done.missing})


async def unheld(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"released": done.held, "missing": done.missing})


async def cleaned(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply("", {"cleared": done.cleared, "kept": done.kept, "bytes": done.bytes})


async def compressed(call: Awaitable[Any]) -> Reply:
    done = await call
    return Reply(
        "",
        {
            "compressed": done.compressed,
            "kept": done.kept,
            "bytes_before": done.bytes_before,
            "bytes_after": done.bytes_after,
        },
    )


async def set_quota(stub: Any, request: pb.store_admin.SetQuotaRequest) -> Reply:
    done = await stub.SetQuota(request, timeout=CALL_S)
    pool = (await stub.Quotas(pb.types.Empty(), timeout=CALL_S)).pool_bytes
    facts: Facts = {"quota": request.bytes, "before": done.before, "used": done.used, "above": done.above}
    return Reply("", facts | {"pool_bytes": pool})
