"""Who may call which RPC: the one table. Pure.

It holds where security.tls is on; without it nobody knows who calls. An RPC that is not in it is refused to everybody, and
a test holds it against all services. docs/security.md shows it.
"""

from __future__ import annotations

from moonpool.core.principal import Party

WORKERS = frozenset({Party.PREFILL, Party.DECODE, Party.BOTH})  # one process may change between them
MEMBERS = WORKERS | {Party.STORE, Party.CONDUCTOR, Party.GATEWAY}
KEEPERS = frozenset({Party.OPERATOR, Party.LAUNCHER})
EVERYBODY = MEMBERS | KEEPERS | {Party.REGISTRY}
OPERATOR = frozenset({Party.OPERATOR})
GATEWAY = frozenset({Party.GATEWAY})
CONDUCTOR = frozenset({Party.CONDUCTOR})
STORE = frozenset({Party.STORE})

RIGHTS: dict[str, frozenset[Party]] = {
    "Registry.Join": MEMBERS,  # under the name of its own certificate
    "Registry.Watch": MEMBERS | KEEPERS,
    "Registry.List": MEMBERS | KEEPERS,
    "Registry.Lead": CONDUCTOR,
    "Registry.ReportGone": STORE | {Party.LAUNCHER},  # they hold the proof
    "Admin.Stats": MEMBERS | KEEPERS,
    "Admin.ClearDevicePages": OPERATOR,
    "Admin.Lives": OPERATOR | GATEWAY,  # the console shows where a request spent its time
    "Admin.Stop": KEEPERS,
    "Admin.Restart": KEEPERS,
    "Admin.SwitchRole": KEEPERS | CONDUCTOR,
    "Conductor.Place": GATEWAY,
    "Conductor.Finished": GATEWAY,
    "Conductor.Alive": GATEWAY,
    "Conductor.Report": WORKERS | STORE,  # about the member of its own certificate
    "Conductor.Explain": OPERATOR | GATEWAY,  # and why it went there
    "Conductor.Rebalance": OPERATOR,
    "Conductor.Record": OPERATOR,
    "Decode.Tokens": GATEWAY,
    "Prefill.Run": WORKERS,
    "Store.Session": WORKERS,  # as the member of its own certificate
    "Store.Grant": WORKERS | STORE,
    "Store.Notify": WORKERS | STORE,
    "Store.Drain": WORKERS | STORE,
    "Store.LandingState": WORKERS | STORE,
    "Store.EndLanding": WORKERS | STORE,
    "Store.Lookup": WORKERS | STORE | OPERATOR,
    "Store.Pin": WORKERS,
    "Store.Unpin": WORKERS,
    "Store.Quarantine": WORKERS,
    "Store.Reserve": WORKERS,
    "Store.Seal": WORKERS,
    "Store.Abandon": WORKERS,
    "Store.Ended": WORKERS,
    "Store.Fetch": WORKERS,
    "Store.PushTo": STORE,
    "Store.Replicate": STORE | CONDUCTOR | OPERATOR,
    "Store.Exists": STORE | CONDUCTOR | OPERATOR,
    "Store.Paths": STORE | OPERATOR,
    "Store.Warm": CONDUCTOR | OPERATOR,
    "Store.Cool": STORE | CONDUCTOR,
    "Store.MoveOut": KEEPERS,
    "Store.Endpoint": WORKERS | STORE,
    "Store.RemakeEndpoint": STORE | OPERATOR,
    "Store.Watch": CONDUCTOR | OPERATOR,
    "Store.Clear": OPERATOR,
    "Store.Stats": MEMBERS | KEEPERS,
    "StoreAdmin.Inspect": OPERATOR,
    "StoreAdmin.Hold": OPERATOR,
    "StoreAdmin.Unhold": OPERATOR,
    "StoreAdmin.Sequences": OPERATOR,
    "StoreAdmin.Drop": OPERATOR,
    "StoreAdmin.Clean": OPERATOR,
    "StoreAdmin.Compress": OPERATOR,
    "StoreAdmin.Quotas": OPERATOR,
    "StoreAdmin.SetQuota": OPERATOR,
    "StoreAdmin.Describe": OPERATOR,
    "Health.Check": EVERYBODY,
    "Health.Watch": EVERYBODY,
}


def name_of(path: str) -> str:
    """``/moonpool.v1.Store/Grant`` -> ``Store.Grant``."""
    service, _, method = path.lstrip("/").rpartition("/")
    return f"{service.rpartition('.')[2]}.{method}"


def may(party: Party, path: str) -> bool:
    return party in RIGHTS.get(name_of(path), frozenset())


def alike(one: str, other: str) -> bool:
    """Whether who is ``one`` (a role or a party) may become ``other``: workers change between their roles, nobody else does."""
    return one == other or {one, other} <= WORKERS
