from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role
from moonpool.core.principal import Party, Principal

names = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True)


@settings(max_examples=50)
@given(names, st.sampled_from(Party), names)
def test_whoever_is_written_is_read_again(cluster: str, party: Party, member: str) -> None:
    who = Principal(cluster, party, member)
    assert Principal.parse(who.uri) == who


@pytest.mark.parametrize(
    "uri",
    [
        "",
        "moonpool://c/gateway",
        "moonpool://c/gateway/g/more",
        "moonpool://c/king/k",
        "https://c/gateway/g",
        "moonpool://../gateway/g",
        "moonpool://c/gateway/a b",
        "moonpool://c/gateway/g\n",
    ],
)
def test_what_names_nobody_is_refused(uri: str) -> None:
    with pytest.raises(ConfigError, match="certificate"):
        Principal.parse(uri)


def test_every_role_is_a_party() -> None:
    assert {role.value for role in Role} < {party.value for party in Party}
