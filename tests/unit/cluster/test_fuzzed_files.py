"""Files and records that the cluster reads, gone wrong: a value, or an error of ours; what only helps is passed over."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.mutations import fuzzing, mutated, odd_json, stands

from moonpool.cluster.configure import load_config
from moonpool.cluster.etcd import records
from moonpool.cluster.gateway.facts import read_facts
from moonpool.cluster.gateway.tenants.book import parse as parse_keys
from moonpool.cluster.launch.state import ClusterState, ProcessRecord, StateDir
from moonpool.cluster.record_file import read_record
from moonpool.cluster.role_switch import in_kept_role
from moonpool.cluster.spec import RoleSpec
from moonpool.core.config import Config
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.sim.cluster import read_cluster

MEMBER = Member(MemberId("prefill-0"), Role.PREFILL, NodeId("a"), Incarnation(5), "127.0.0.1:1", 7, details={"a": "b"})
SPEC = RoleSpec(MEMBER.id, MEMBER.role, MEMBER.node, Config(), "127.0.0.1:1", Path("/nowhere"))
STATE = ClusterState(ProcessRecord(os.getpid(), 1.0), "moonpool", "process", "127.0.0.1:1", "ready", "http://x")
TOML = b"""
[model]
path = "smollm2"
[engine]
pages = 64
[store]
pool_bytes = "1 GiB"
quotas = { a = 5 }
[scheduler]
policy_settings = { lookahead_s = 0.1 }
[[cluster.nodes]]
name = "a"
both = 1
conductor = 1
gateway = 1
"""
KEYS = f"""
[tenants.acme]
[[keys]]
id = "{"0" * 12}"
name = "one"
tenant = "acme"
roles = ["user"]
salt = "{"ab" * 16}"
hash = "{"cd" * 32}"
expires = 2030-01-01T00:00:00Z
""".encode()
RECORD = b"\n".join(
    (
        b'{"moonpool_record":1,"conductor":"c","policy":"p","admission":"a","booking_s":1.0,"cut":false}',
        b'{"at":1.0,"finished":{"request":"r"}}',
        b'{"at":2.0,"snapshot":{"holder":"s","incarnation":1,"number":1,"entries":[]}}',
    )
)


@pytest.fixture
def file(tmp_path: Path) -> Callable[[bytes, str], Path]:
    def written(data: bytes, name: str) -> Path:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
        return path

    return written


File = Callable[[bytes, str], Path]


@fuzzing(50)
@given(mutated(records.encode(MemberChange(MEMBER, Liveness.LIVE)), b""))
def test_records_in_etcd(data: bytes) -> None:
    stands(lambda: records.decode("prefill-0", data))
    stands(lambda: records.name_in(data, b"lives/"))


@fuzzing(35)
@given(st.one_of(mutated(SPEC.to_json().encode()), odd_json(json.loads(SPEC.to_json()))))
def test_role_specifications(data: bytes) -> None:
    stands(lambda: RoleSpec.from_json(data.decode(errors="replace")))


@fuzzing(35)
@given(data=st.one_of(mutated(json.dumps(asdict(STATE)).encode()), odd_json(asdict(STATE))))
def test_state_of_a_cluster_and_its_processes(file: File, data: bytes) -> None:
    """Asked by every verb: what cannot be read is no cluster. A record never names a process that it does not fit."""
    folder = file(data, "cluster.json").parent
    stands(StateDir(folder).read)
    file(data, "pids/one.json")
    file(json.dumps(asdict(ProcessRecord(os.getpid(), time.time()))).encode(), "pids/two.json")
    assert stands(StateDir(folder).recorded) == {}


@fuzzing(40)
@given(data=st.one_of(st.binary(max_size=20), mutated(b"decode", b"prefill", b"both")))
def test_roles_that_were_kept(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("kept")
    (folder / "roles").mkdir()
    (folder / "roles" / MEMBER.id).write_bytes(data)
    cluster = SPEC.config.cluster.model_copy(update={"state_dir": str(folder)})
    spec = RoleSpec(
        MEMBER.id, MEMBER.role, MEMBER.node, SPEC.config.model_copy(update={"cluster": cluster}), "r", Path("/nowhere")
    )
    assert stands(lambda: in_kept_role(spec)).role in (Role.PREFILL, Role.DECODE)  # type: ignore[attr-defined]


@fuzzing(40)
@given(data=mutated(TOML))
def test_configuration_files(file: File, data: bytes) -> None:
    path = file(data, "m.toml")
    stands(partial(load_config, path, {}, {}))


@fuzzing(35)
@given(st.sampled_from(["store.quotas", "cluster.nodes", "engine.pages", "store.pool_bytes", "scheduler.policy"]), st.data())
def test_values_of_the_environment_and_the_command_line(key: str, data: st.DataObject) -> None:
    seed = {"store.quotas": b'{"a": 5}', "cluster.nodes": b'[{"name": "a", "both": 1}]', "store.pool_bytes": b"1 GiB"}.get(
        key, b"64"
    )
    text = data.draw(st.one_of(mutated(seed), odd_json(json.loads(seed) if seed[:1] in b"[{" else 64))).decode(errors="replace")
    stands(partial(load_config, None, {}, {key: text}))


@fuzzing(40)
@given(mutated(KEYS))
def test_files_of_api_keys(data: bytes) -> None:
    told = stands(lambda: parse_keys(data.decode(errors="replace"), "keys.toml"))
    if isinstance(told, Exception):
        assert "cd" * 32 not in str(told) and "ab" * 16 not in str(told)


@fuzzing(35)
@given(data=st.one_of(mutated(RECORD), odd_json(json.loads(RECORD.split(b"\n")[0]))))
def test_records_of_a_conductor(file: File, data: bytes) -> None:
    path = file(data, "record")
    stands(lambda: read_record(path))


@fuzzing(35)
@given(
    data=st.one_of(
        mutated(b'{"vocab_size": 128, "max_position_embeddings": 64}'),
        odd_json({"vocab_size": 128, "text_config": {"n_positions": 3}}),
    )
)
def test_facts_of_a_model(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    folder = tmp_path_factory.mktemp("model")
    (folder / "config.json").write_bytes(data)
    stands(lambda: read_facts(folder, max_context=0))


@fuzzing(35)
@given(data=st.one_of(mutated(TOML), st.just(b"x = " + b"[" * 5_000)))
def test_clusters_of_the_simulator(file: File, data: bytes) -> None:
    path = file(data, "c.toml")
    stands(lambda: read_cluster(path))
