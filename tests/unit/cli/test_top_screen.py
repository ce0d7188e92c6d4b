"""Frames of `moonpool top`, from a picture as a live cluster gave it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from moonpool.cli.top.screen import screen
from moonpool.cluster.overview.picture import (
    ConductorLine,
    Flow,
    GatewayLine,
    MemberLine,
    Picture,
    PoolLine,
    Refusal,
    Share,
    WorkerLine,
)

GOLDEN = Path(__file__).with_name("golden")


def member(
    name: str, role: str, node: str, state: str = "live", ready: bool = True, leads: int = 0, note: str = ""
) -> MemberLine:
    return MemberLine(name, role, node, "smollm2", state, ready, "1", leads, "0.1.0", note)


PICTURE = Picture(
    seconds=2.0,
    in_flight=12,
    waiting=3,
    output_rate=412.4,
    prompt_rate=3_210.0,
    members=(
        member("conductor-0", "conductor", "b", leads=3),
        member("decode-0", "decode", "b"),
        member("decode-1", "decode", "c", "gone", False, note="pidfd: killed by signal 9"),
        member("gateway-0", "gateway", "b"),
        member("prefill-0", "prefill", "a"),
        member("prefill-1", "prefill", "a", ready=False),
        member("store-a", "store", "a"),
        member("store-b", "store", "b", "silent", False, note="no heartbeat for 1.2 s"),
    ),
    pools=(
        PoolLine("store-a", "a", 4 << 30, 0.62, {"sealed": 620, "reserved": 8, "fenced": 0, "free": 372}, 12, 620, 0, None),
        PoolLine("store-b", "b", 4 << 30, 1.0, {"sealed": 980, "reserved": 16, "fenced": 4, "free": 0}, 3, 1_220, 240, 0.3),
    ),
    workers=(
        WorkerLine("prefill-0", "a", "prefill", 3, 1, 0, 91, 41, 40, 1_204.0),
        WorkerLine("prefill-1", "a", "prefill", 0, 0, 0, 91, 0, 0, None),
        WorkerLine("decode-0", "b", "decode", 0, 8, 1, 91, 91, 0, 412.4),
    ),
    gateways=(GatewayLine("gateway-0", 12, 14, (120.4, 15_400.0), (12.25, 20.0), 34, 60.0),),
    conductors=(ConductorLine("conductor-0", 3, 3, 12, 5.5),),
    carriers=(Flow("tcp", 1 << 20, 0.0), Flow("ucx", 3 << 30, 12_345_678.0)),
    links=(Flow("ucx", 3 << 30, 12_345_678.0, "a", "b"), Flow("tcp", 1 << 20, 0.0, "", "a"), Flow("tcp", 99, 0.0, "a", "a")),
    sources=(Share("device", 200, 0.2), Share("pool", 300, 0.3), Share("remote", 130, 0.13), Share("computed", 370, 0.37)),
    tiers=(Share("dram", 250, 0.83), Share("ssd", 50, 0.17), Share("shared", 0, 0.0)),
    refusals=(Refusal("targets_missed", 7, 0.5), Refusal("overloaded", 2, 0.0)),
    models=("smollm2",),
)


@pytest.mark.parametrize("width", [80, 140])
def test_a_frame_looks_as_it_did(width: int) -> None:
    lines = [line.plain for line in screen(PICTURE, "red", width, 0)]
    assert max(map(len, lines)) <= width
    assert "\n".join(lines) + "\n" == (GOLDEN / f"top-{width}.txt").read_text(encoding="utf-8")


def test_a_low_terminal_says_how_much_it_does_not_show() -> None:
    whole = screen(PICTURE, "red", 80, 0)
    cut = screen(PICTURE, "red", 80, 10)
    assert len(cut) == 10
    assert [line.plain for line in cut[:9]] == [line.plain for line in whole[:9]]
    assert cut[-1].plain == f"... {len(whole) - 9} more lines: a taller terminal shows them"
    assert len(screen(PICTURE, "red", 80, len(whole))) == len(whole)


def test_an_empty_cluster_and_a_tiny_terminal_are_no_errors() -> None:
    assert [line.plain for line in screen(Picture(0.0), "red", 80, 24)][1:] == [
        "0 in flight  0 waiting  out -  in -  hits -",
        "prompts  none yet",
    ]
    for width in (1, 40, 400):
        assert screen(PICTURE, "a cluster with a name that is far too long for any terminal", width, 3)


def test_what_a_name_holds_is_text_and_no_markup() -> None:
    odd = replace(PICTURE.members[2], id="[red]x[/red]", note="[bold]")
    lines = screen(replace(PICTURE, members=(odd,)), "[blink]", 80, 0)
    assert any("[red]x[/red]" in line.plain and "[bold]" in line.plain for line in lines)
    assert "[blink]" in lines[0].plain
