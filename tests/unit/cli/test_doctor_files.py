from __future__ import annotations

from pathlib import Path

from moonpool.cli.doctor.files import files_named
from moonpool.cluster.gateway.tenants.file import edit_book
from moonpool.core.config import Config, SecurityConfig


def test_the_doctor_reads_what_a_start_would_read(tmp_path: Path) -> None:
    book, key = tmp_path / "keys.toml", tmp_path / "kv.key"
    edit_book(book, lambda given: given.model_dump())
    key.write_bytes(bytes(31))
    key.chmod(0o600)
    missing = str(tmp_path / "missing.pem")
    security = SecurityConfig(
        https_cert=missing, https_key=missing, api_keys_file=str(book), kv_encryption="aes-gcm", kv_key_file=str(key)
    )
    https, keys, kv = files_named(Config(security=security))
    assert (https.grade, keys.grade, kv.grade) == ("fail", "ok", "fail")
    assert f"security.https_key: cannot read {missing}" in https.what
    assert "certs make --https" in https.fix
    assert "31 bytes" in kv.what
    book.chmod(0o644)
    _, keys, _ = files_named(Config(security=security))
    assert (keys.grade, "chmod 600" in keys.fix) == ("fail", True)
    assert not list(files_named(Config()))
