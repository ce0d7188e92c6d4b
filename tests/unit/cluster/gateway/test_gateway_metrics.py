"""What a gateway counts of requests: gaps, targets met, predictions, attempts; and its line about each."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.parser import text_string_to_metric_families as parse_text
from structlog.testing import capture_logs
from support.gateway_front import Front, front, says
from support.scripted_cluster import Job
from support.tiny_tokenizer import ids_of

from moonpool.cluster.gateway.metrics import Gaps
from moonpool.cluster.probe.catalogue.of_gateway import GAPS, ITL
from moonpool.core.errors import Failure, Reason
from moonpool.core.placement import Placement
from moonpool.core.request import FinishReason

BODY: dict[str, Any] = {"model": "tiny", "prompt": "once", "max_tokens": 20}
LONG = {"x-ttft-target-ms": "60000", "x-tbt-target-ms": "60000"}


class Told:
    """Samples of one page, by name without ``moonpool_gateway_`` and label values in the order of their names."""

    def __init__(self, text: str) -> None:
        self._samples = {
            (
                sample.name.removeprefix("moonpool_gateway_"),
                *(value for _, value in sorted(sample.labels.items())),
            ): sample.value
            for family in parse_text(text)
            for sample in family.samples
        }

    def __call__(self, *name: str) -> float:
        return self._samples[name]


async def told(tiny: Front) -> Told:
    return Told((await tiny.client.get("/metrics")).text)


@given(st.lists(st.floats(0, 20, allow_nan=False), max_size=50))
def test_the_cheap_histogram_counts_as_the_library_s_own(gaps: list[float]) -> None:
    registry = CollectorRegistry()
    cheap = Gaps(ITL, ["m"], registry)
    right = Histogram("moonpool_gateway_itl_seconds", ITL.text, ["model"], buckets=GAPS, registry=CollectorRegistry())
    for gap in gaps:
        cheap.of["m"].observe(gap)
        right.labels("m").observe(gap)
    (ours,), theirs = list(registry.collect()), next(iter(right.collect()))
    right.labels("m")
    found = {(s.name, *sorted(s.labels.items())): s.value for s in ours.samples}
    wanted = {(s.name, *sorted(s.labels.items())): s.value for s in theirs.samples if not s.name.endswith("_created")}
    assert not gaps or found == pytest.approx(wanted)


async def test_every_gap_between_tokens_is_counted_and_the_slowest_tenth_is_the_answer_s(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abcdef"))
    for _ in range(2):
        await tiny.client.post("/v1/completions", json=BODY)
    tiny.decode.script = says(*ids_of(tiny.model_dir, "a"))
    await tiny.client.post("/v1/completions", json=BODY)
    page = await told(tiny)
    assert page("itl_seconds_count", "tiny") == 10
    assert (page("tbt_seconds_count", "tiny"), page("ttft_seconds_count", "tiny")) == (2, 3)
    assert 2 * page("tbt_seconds_sum", "tiny") >= page("itl_seconds_sum", "tiny") / 5 - 1e-9, "no less than the mean gap"


async def test_requests_with_targets_meet_or_miss_them_are_refused_fail_or_leave(tiny: Front) -> None:
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
    await tiny.client.post("/v1/completions", json=BODY)  # without targets it is in nobody's share
    await tiny.client.post("/v1/completions", json=BODY, headers=LONG)
    await tiny.client.post("/v1/completions", json=BODY, headers={"x-ttft-target-ms": "0.01"})
    await tiny.client.post("/v1/completions", json=BODY, headers={"x-tbt-target-ms": "0.0011"})

    async def goes_wrong(job: Job) -> None:
        await job.emit(position=7, finish=FinishReason.LENGTH)

    tiny.decode.script = goes_wrong
    assert (await tiny.client.post("/v1/completions", json=BODY, headers=LONG)).status_code == 503
    tiny.conductor.decide = lambda request: Failure(Reason.TARGETS_MISSED, "no worker is fast enough", retry_after_s=1.0)
    assert (await tiny.client.post("/v1/completions", json=BODY, headers=LONG)).status_code == 429
    page = await told(tiny)
    results = {result: page("targeted_requests_total", "tiny", result) for result in ("met", "missed", "refused", "failed")}
    assert results == {"met": 1, "missed": 2, "refused": 1, "failed": 1}
    assert page("refusals_total", "tiny", "targets_missed") == 1


async def test_an_answer_that_goes_on_elsewhere_is_counted_and_told_without_its_text(tiny: Front) -> None:
    ids = ids_of(tiny.model_dir, "hello")

    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.say(ids[:2])
            await job.fail(Reason.PEER_SILENT, peer="decode-9")
        else:
            await job.say(ids[2:], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    with capture_logs() as lines:
        answer = await tiny.client.post("/v1/completions", json=BODY)
    request = answer.headers["x-moonpool-request-id"]
    assert answer.json()["choices"][0]["text"] == "hello"
    page = await told(tiny)
    assert page("resumes_total") == 1
    assert (page("attempts_total"), page("attempt_failures_total", "peer_silent")) == (2, 1)
    assert page("attempts_per_request_sum") == 2
    assert page("itl_seconds_count", "tiny") == 4, "the gap between two attempts is one that the client sees"
    failed, over = (next(line for line in lines if line["event"] == event) for event in ("attempt failed", "request over"))
    assert (failed["request"], failed["attempt"], failed["peer"], failed["streamed"]) == (request, 1, "decode-9", 2)
    wanted = {"request": request, "outcome": "ok", "model": "tiny", "tenant": "default", "attempts": 2, "output_tokens": 5}
    assert wanted.items() <= over.items()
    assert "hello" not in str(lines) and "once" not in str(lines)


@pytest.mark.parametrize(("predicted_ms", "count"), [(0.0, 0), (1.0, 1)])
async def test_predictions_are_compared_with_what_happened(tiny: Front, predicted_ms: float, count: int) -> None:
    placement = Placement(tiny.decode_server.ref, tiny.decode_server.ref, (), predicted_ms, predicted_ms)
    tiny.conductor.decide = lambda request: placement
    tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
    await tiny.client.post("/v1/completions", json=BODY)
    page = await told(tiny)
    for of in ("ttft", "tbt"):
        assert page("prediction_ratio_count", of) == count
        assert (page("prediction_ratio_sum", of) > 0) == bool(count)


async def test_lines_about_requests_can_be_left_out(tiny_dir: Path) -> None:
    async with front(tiny_dir) as tiny:
        settings = tiny.gateway._endpoints._config
        quiet = settings.model_copy(update={"observe": settings.observe.model_copy(update={"log_requests": False})})
        tiny.gateway._endpoints._config = quiet
        tiny.decode.script = says(*ids_of(tiny.model_dir, "abc"))
        with capture_logs() as lines:
            assert (await tiny.client.post("/v1/completions", json=BODY)).status_code == 200
            await asyncio.sleep(0)
        assert not [line for line in lines if line["event"] == "request over"]
