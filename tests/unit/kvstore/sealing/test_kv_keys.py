"""Key files of KV bytes: made once, private, rotated, and never shown."""

from __future__ import annotations

import os
import stat
from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.cluster.roster import require_agreement
from moonpool.core.config import ClusterConfig, Config, SecurityConfig
from moonpool.core.errors import ConfigError, InvalidRequest, LayoutMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.kvstore.sealing.handshake import OFFER, Handshake
from moonpool.kvstore.sealing.keys import KvKey, kv_keys


def config(folder: Path, encryption: str = "aes-gcm") -> Config:
    security = SecurityConfig.model_validate({"kv_encryption": encryption})
    return Config(security=security, cluster=ClusterConfig(key_file=str(folder / "hash.key")))


def test_the_first_start_makes_a_private_file_beside_the_hash_key_and_the_next_ones_read_it(tmp_path: Path) -> None:
    keys = kv_keys(config(tmp_path), tmp_path)
    path = tmp_path / "kv.key"
    assert keys is not None and keys.previous is None
    assert stat.S_IMODE(path.stat().st_mode) == 0o600 and path.read_bytes() == keys.current.secret
    assert kv_keys(config(tmp_path), tmp_path) == keys
    assert keys.current.secret.hex() not in repr(keys) and str(keys.current.secret) not in repr(keys)


def test_nothing_is_made_where_kv_bytes_are_not_encrypted(tmp_path: Path) -> None:
    assert kv_keys(config(tmp_path, "off"), tmp_path) is None
    assert not list(tmp_path.iterdir())


def test_a_file_that_others_may_read_or_of_another_size_is_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "kv.key"
    path.write_bytes(bytes(32))
    path.chmod(0o640)
    with pytest.raises(ConfigError, match=rf"security.kv_key_file: {path} has mode 0640"):
        kv_keys(config(tmp_path), tmp_path)
    other = os.geteuid() + 1
    with monkeypatch.context() as patched:  # a mounted secret is root's, and its group's to read
        patched.setattr(os, "geteuid", lambda: other)
        path.chmod(0o440)
        assert kv_keys(config(tmp_path), tmp_path) is not None
        path.chmod(0o460)
        with pytest.raises(ConfigError, match="mode 0460"):
            kv_keys(config(tmp_path), tmp_path)
    path.chmod(0o600)
    path.write_bytes(bytes(31))
    with pytest.raises(ConfigError, match="holds 31 bytes, 32 needed"):
        kv_keys(config(tmp_path), tmp_path)


def test_the_key_before_lies_beside_the_new_one(tmp_path: Path) -> None:
    first = kv_keys(config(tmp_path), tmp_path)
    assert first is not None
    (tmp_path / "kv.key").rename(tmp_path / "kv.key.previous")
    second = kv_keys(config(tmp_path), tmp_path)
    assert second is not None and second.previous == first.current and second.current != first.current
    assert second.find(first.current.id_bytes) == first.current and second.find(bytes(8)) is None
    (tmp_path / "kv.key").write_bytes(first.current.secret)
    with pytest.raises(ConfigError, match="hold the same key"):
        kv_keys(config(tmp_path), tmp_path)


def test_members_with_different_keys_or_without_one_are_refused_with_both_named() -> None:
    one = Member(MemberId("store-a"), Role.STORE, NodeId("a"), Incarnation(1), "h:1", 1, hash_key_id="h", kv_key_id="k1")
    other = replace(one, id=MemberId("store-b"), kv_key_id="k2")
    for theirs, named in ((other, "k2 at store-b"), (replace(other, kv_key_id=""), r"none \(kv_encryption = off\) at store-b")):
        with pytest.raises(LayoutMismatch, match=rf"kv key differs: k1 at store-a, {named}"):
            require_agreement(one, [MemberChange(theirs, Liveness.LIVE)])
    require_agreement(one, [MemberChange(replace(other, kv_key_id="k1"), Liveness.LIVE)])


def test_only_holders_of_one_key_agree_and_both_get_the_same_streams() -> None:
    key = KvKey.of(bytes(32))
    caller, called = Handshake(key), Handshake(key)
    here, there = caller.meet(called.offer, caller=True), called.meet(caller.offer, caller=False)
    assert there.hears.open(here.sends.seal(b"hello", b"m"), b"m") == b"hello"
    assert here.hears.open(there.sends.seal(b"welcome", b"m"), b"m") == b"welcome"
    with pytest.raises(LayoutMismatch):
        caller.meet(Handshake(KvKey.of(bytes(range(32)))).offer, caller=True)
    with pytest.raises(InvalidRequest, match="its public key is unfit"):
        caller.meet(called.offer[: OFFER.size - 32] + bytes(32), caller=True)
