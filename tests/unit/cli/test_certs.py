"""``moonpool certs`` as an operator uses it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.certificates import OVER, Certificates
from typer.testing import CliRunner, Result

from moonpool.cli.main import Choices, build
from moonpool.core.principal import Party
from moonpool.wire.identity import Identity


def certs(folder: Path, *words: str) -> Result:
    where = ("--set", f"cluster.state_dir={folder}", "--name", "test")
    return CliRunner().invoke(build(Choices()), ["certs", *words, *where])


def test_what_is_made_is_shown_and_good_for_its_process(tmp_path: Path) -> None:
    made = certs(tmp_path, "make", "--role", "prefill", "--id", "prefill-7", "--days", "3")
    assert made.exit_code == 0, made.output
    assert Identity.read(tmp_path / "tls/prefill-7").says.principal.uri == "moonpool://test/prefill/prefill-7"
    assert certs(tmp_path, "make", "--out", str(tmp_path / "tls/me")).exit_code == 0
    shown = certs(tmp_path, "show", "--json")
    assert shown.exit_code == 0
    rows = json.loads(shown.stdout)
    assert [row["uri"].rpartition("/")[2] for row in rows] == ["operator", "prefill-7"]
    assert 2.9 < rows[1]["left_s"] / 86_400 <= 3


def test_an_expired_certificate_is_told_and_renewed(tmp_path: Path) -> None:
    late = Certificates(tmp_path / "tls").of(Party.GATEWAY, "gateway-0", OVER)
    assert certs(tmp_path, "show").exit_code == 1
    assert "expired" in certs(tmp_path, "show", str(late)).output
    assert certs(tmp_path, "renew").exit_code == 0
    assert certs(tmp_path, "show").exit_code == 0


def test_https_certificates_lie_apart_from_those_of_processes(tmp_path: Path) -> None:
    made = certs(tmp_path, "make", "--https", "gateway.example", "--https", "10.0.0.1")
    assert made.exit_code == 0 and (tmp_path / "https/cert.pem").is_file()
    assert not list((tmp_path / "tls").glob("*/cert.pem"))


@pytest.mark.parametrize(
    ("words", "wrong"),
    [
        (("make", "--role", "king"), "--role"),
        (("make", "--id", "a b"), "--id"),
        (("make", "--https", "https://gateway.example"), "--https: 'https://gateway.example' is no host name"),
        (("make", "--https", "b\u00fccher.example"), "is no host name"),
        (("show",), "there is none"),
        (("renew", "nowhere"), "cannot read"),
    ],
)
def test_mistakes_are_told(tmp_path: Path, words: tuple[str, ...], wrong: str) -> None:
    refused = certs(tmp_path, *words)
    assert refused.exit_code == 1 and refused.exception is not None
    assert wrong in str(refused.exception)
