"""Decisions as people read them."""

from __future__ import annotations

import copy
from typing import Any

from moonpool.cli.explain_text import comparison_text, decision_line, request_text

ROW = {"ttft_ms": 20.0, "ttft_high_ms": 25.0, "wait_ms": 1.0, "work_ms": 15.0, "cached_tokens": 64, "sure": 1}
WORKER = {"id": "prefill-0", "incarnation": 1, "node": "a", "address": "h:1"}
TOLD: dict[str, Any] = {
    "request": "req-1",
    "policy": "moonpool",
    "admission": "none",
    "asked": {"attempt": 1, "prompt_tokens": 200, "max_tokens": 8, "blocks": 3},
    "held": {"deepest_blocks": 2, "holders": ["b"]},
    "waited_ms": 12.0,
    "prefill_candidates": [
        {"worker": "prefill-0", **ROW, "own_blocks": 1, "node_blocks": 0},
        {"worker": "prefill-1", **ROW, "own_blocks": 0, "node_blocks": 0},
    ],
    "prefill_considered": 3,
    "decode_candidates": [{"worker": "decode-0", "tbt_ms": 9.0, "batch": 2, "context_tokens": 300, "roomy": 1}],
    "decode_considered": 1,
    "placed": {
        "prefill": WORKER,
        "decode": {**WORKER, "id": "decode-0"},
        "segments": [
            {"first": 0, "count": 2, "source": "fetch", "node": "b"},
            {"first": 2, "count": 1, "source": "recompute", "node": None},
        ],
    },
    "predicted": {
        "ttft_ms": 32.0, "ttft_high_ms": 37.0, "ttft_sure": True, "tbt_ms": 9.0, "tbt_high_ms": 10.0, "cached_tokens": 128,
    },
    "transfer": {"source": "b", "blocks": 2, "computed_meanwhile": 0, "ms": 3.0, "flows_under_way": 1},
    "actual": {"ttft_ms": 40.0, "tbt_ms": 9.5, "cached_tokens": 128, "output_tokens": 8, "outcome": "ok"},
    "regret_ms": 8.0,
}  # fmt: skip


def test_a_request_shows_where_it_went_who_else_was_there_and_how_it_came_out() -> None:
    text = request_text({"request": "req-1", "conductor": "conductor-0", "decisions": [TOLD]})
    assert "req-1, decided by conductor-0" in text
    assert "placed on prefill-0 -> decode-0, after waiting 12 ms" in text
    assert "2 fetch from b, 1 recompute" in text
    assert "* prefill-0" in text and "* decode-0" in text
    assert "and 1 more" in text
    assert "predicted  ttft 32 ms, up to 37;" in text
    assert "actual     ttft 40 ms" in text
    assert "regret     8 ms later" in text


def test_a_prompt_that_several_compute_shows_who_computes_what() -> None:
    share = {"worker": "prefill-1", "begin": 0, "end": 128, "begins_ms": 0.0, "ends_ms": 25.0}
    text = request_text({"request": "req-1", "conductor": "c", "decisions": [TOLD | {"group": [share]}]})
    assert "computed together: tokens 0 to 128 at prefill-1, from 0 to 25 ms" in text


def test_a_line_of_a_prompt_that_several_compute_names_them_all() -> None:
    shares = [{"worker": f"prefill-{i}", "begin": i, "end": i + 1, "begins_ms": 0.0, "ends_ms": 1.0} for i in (1, 0)]
    assert "placed on prefill-1 + prefill-0 -> decode-0" in decision_line(TOLD | {"group": shares})


def test_refused_and_still_waiting_requests_say_so() -> None:
    refused = copy.deepcopy(TOLD) | {"actual": None, "regret_ms": None}
    del refused["placed"]
    refused["refused"] = {"reason": "targets_missed", "message": "too late", "retry_after_s": 1.5}
    text = request_text({"request": "req-1", "conductor": "c", "decisions": [refused]})
    assert "refused: targets_missed" in text
    assert "too late; try again after 1.5 s" in text
    assert "refused: targets_missed" in decision_line(refused)
    del refused["refused"]
    assert "still waiting for a worker" in decision_line(refused)
    assert decision_line(TOLD).endswith("was 40 ms, ok")


def test_a_comparison_of_policies_names_sums_and_differences() -> None:
    spread = {"mean": 1.0, "p50": 2.0, "p90": 3.0}
    one = {"prefill": "prefill-0", "decode": "decode-0", "cached_blocks": 2}
    figures: dict[str, Any] = {
        "policy": "random", "recorded_policy": "moonpool", "conductor": "c", "decisions": 9, "differ": 4, "refused": 1,
        "compared": 8, "recorded_ttft_ms": spread, "other_ttft_ms": spread, "predicted_gain_ms": spread, "actual_ttft_ms": {},
        "cut": True, "index_resets": 0,
        "largest_differences": [
            {"request": "req-1", "recorded": one, "other": one, "recorded_ttft_ms": 5.0, "other_ttft_ms": 7.0}
        ],
    }  # fmt: skip
    text = comparison_text(figures)
    assert "4 differ, 1 were refused, 8 can be compared" in text
    assert "prefill-0/2 -> prefill-0/2: 5 -> 7 ms predicted" in text
    assert "begins in the middle" in text
