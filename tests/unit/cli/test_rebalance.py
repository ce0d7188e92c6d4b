"""``moonpool rebalance`` with a cluster whose answers are given here."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from moonpool.cli.rebalance import _rebalance
from moonpool.cluster import survey
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange

SPLIT = {"prefill": 1, "decode": 1, "prefill_pressure": 0.9, "decode_pressure": 0.1}
FORECAST = {"requests": 1, "computed_tokens": 1, "prompt_tokens": 1, "output_tokens": 1, "prefill_work": 1, "decode_work": 1}


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """What the conductor was asked, which proposes what it is asked for."""
    heard: list[dict[str, str]] = []

    async def members(registry: str) -> list[MemberChange]:
        roles = {"prefill-0": Role.PREFILL, "decode-0": Role.DECODE, "conductor-0": Role.CONDUCTOR}
        return [MemberChange(Member(MemberId(n), r, NodeId("a"), 1, "a:1", 0), Liveness.LIVE) for n, r in roles.items()]

    async def rebalance(registry: str, apply: bool, wanted: dict[str, str], model: str) -> dict[str, Any]:
        heard.append(wanted)
        switches = [{"worker": worker, "role": role} for worker, role in wanted.items()]
        told = {"forecast": FORECAST, "loads": [], "now": SPLIT, "best": SPLIT, "needed_prefill": 1, "needed_decode": 1}
        return {**told, "switches": switches, "begun": {}, "held_back": "calm"}

    monkeypatch.setattr(survey, "members", members)
    monkeypatch.setattr(survey, "rebalance", rebalance)
    return heard


def test_a_switch_that_is_only_shown_says_how_it_is_done(asked: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert asyncio.run(_rebalance("r", False, {"prefill-0": "decode"}, 1.0, False)) == 0
    assert "switch prefill-0 to decode, with --apply" in capsys.readouterr().out
    assert asyncio.run(_rebalance("r", True, {"prefill-0": "decode"}, 1.0, False)) == 0
    assert "--apply" not in capsys.readouterr().out
    assert asked == [{"prefill-0": "decode"}] * 2


@pytest.mark.parametrize("worker", ["prefill-7", "conductor-0"])
def test_a_worker_that_cannot_switch_is_not_shown_as_if_it_could(worker: str, asked: list[Any]) -> None:
    with pytest.raises(ConfigError, match=f"'{worker}' is no worker that switches; they are decode-0, prefill-0"):
        asyncio.run(_rebalance("r", False, {worker: "decode"}, 1.0, False))
    assert not asked
