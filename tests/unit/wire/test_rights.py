"""Every RPC of every schema has its row in the one table, and the page shows the table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from grpc_health.v1 import health_pb2

from moonpool.core.principal import Party
from moonpool.wire import pb
from moonpool.wire.rights import EVERYBODY, MEMBERS, RIGHTS, WORKERS, may, name_of

PAGE = Path(__file__).parents[3] / "docs/security.md"
SCHEMAS = (pb.admin, pb.conductor, pb.decode, pb.prefill, pb.registry, pb.store, pb.store_admin, pb.types, health_pb2)
CHANGES = ("Admin.Stop", "Admin.Restart", "Admin.SwitchRole", "Conductor.Rebalance", "Store.Clear", "Store.MoveOut")


def all_rpcs() -> dict[str, str]:
    """``Service.Method`` -> path, of all generated schemas."""
    return {
        f"{service.name}.{method.name}": f"/{service.full_name}/{method.name}"
        for schema in SCHEMAS
        for service in schema.DESCRIPTOR.services_by_name.values()
        for method in service.methods
    }


def test_every_schema_is_looked_at() -> None:
    generated = Path(pb.__file__).parent / "generated"
    assert {path.name.removesuffix(".py") for path in generated.glob("*_pb2.py")} == {
        schema.__name__.rpartition(".")[2] for schema in SCHEMAS if schema is not health_pb2
    }


def test_every_rpc_has_its_row_and_no_row_is_left_over() -> None:
    rpcs = {name for name in all_rpcs() if not name.startswith("Health.")} | {"Health.Check", "Health.Watch"}
    assert rpcs - set(RIGHTS) == set(), "say in wire/rights.py who may call these"
    assert set(RIGHTS) - rpcs == set()


def test_paths_are_read_as_the_table_writes_them() -> None:
    for name, path in all_rpcs().items():
        assert name_of(path) == name


def test_nobody_may_call_what_the_table_does_not_know() -> None:
    assert not any(may(party, path) for party in Party for path in ("/moonpool.v1.Store/Burn", "", "/", "Store.Grant.x"))


@pytest.mark.parametrize("name", CHANGES)
def test_what_ends_or_changes_a_cluster_is_for_those_who_look_after_it(name: str) -> None:
    assert RIGHTS[name] <= {Party.OPERATOR, Party.LAUNCHER, Party.CONDUCTOR}
    assert Party.OPERATOR in RIGHTS[name]


def test_the_stores_administration_is_the_operators() -> None:
    assert all(parties == {Party.OPERATOR} for name, parties in RIGHTS.items() if name.startswith("StoreAdmin."))


def test_a_gateway_reads_and_writes_no_kv() -> None:
    assert {name for name, parties in RIGHTS.items() if Party.GATEWAY in parties and name.startswith("Store.")} <= {
        "Store.Stats"
    }


def shown(parties: frozenset[Party]) -> str:
    groups = (("everybody", EVERYBODY), ("members", MEMBERS), ("workers", WORKERS))
    words, left = [], set(parties)
    for word, group in groups:
        if group <= left:
            words.append(word)
            left -= group
    return ", ".join([*words, *(party.value for party in Party if party in left)])


def test_the_page_shows_the_table() -> None:
    rows = re.findall(r"^\| `(\w+)` \| (.+?) \| (.+?) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    told: dict[str, str] = {}
    for service, methods, callers in rows:
        for method in re.findall(r"`(\w+)`", methods):
            told[f"{service}.{method}"] = callers
    wanted = {name: shown(parties) for name, parties in RIGHTS.items()}
    assert told == wanted, "\n".join(table())


def table() -> list[str]:
    """The page's rows: one per service and set of callers."""
    rows: dict[tuple[str, str], list[str]] = {}
    for name, parties in RIGHTS.items():
        service, _, method = name.partition(".")
        rows.setdefault((service, shown(parties)), []).append(f"`{method}`")
    return [f"| `{service}` | {', '.join(methods)} | {callers} |" for (service, callers), methods in rows.items()]
