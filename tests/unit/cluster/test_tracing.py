"""Ids of traces, and what is sent of a life."""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moonpool.cluster.tracing.ids import ClientSpan, client_span, request_id, span_id, trace_of
from moonpool.cluster.tracing.make import traces_of
from moonpool.core.config import ObserveConfig
from moonpool.core.errors import ConfigError
from moonpool.core.ids import MemberId, Role
from moonpool.core.lifetime import Instant, Lifetime

HEX = st.text("0123456789abcdef", min_size=24, max_size=24)
TRACE, SPAN = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"


@pytest.mark.parametrize(
    "header",
    [
        "",
        "00",
        f"00-{TRACE}-{SPAN}-00",  # the client does not record it
        f"ff-{TRACE}-{SPAN}-01",  # no such version
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE.upper()}-{SPAN}-01",
        f"00-{TRACE}-{SPAN}-01x",
        f"00-{TRACE}{SPAN}-01",
        "00-" + "-" * 5_000,
    ],
)
def test_what_is_no_traceparent_of_a_recorded_trace_is_none(header: str) -> None:
    assert client_span(header) is None


def test_a_traceparent_is_read_as_the_standard_says() -> None:
    assert client_span(f"00-{TRACE}-{SPAN}-01") == ClientSpan(TRACE, SPAN)
    assert client_span(f"01-{TRACE}-{SPAN}-03-what later versions add") == ClientSpan(TRACE, SPAN)


@given(HEX, st.booleans(), st.integers(0, 200) | st.none())
def test_every_process_finds_the_same_trace_in_a_request_s_id(digits: str, client: bool, choice: int | None) -> None:
    base = request_id(digits, ClientSpan(TRACE, SPAN) if client else None)
    found = trace_of(base if choice is None else f"{base}-{choice}")
    assert found is not None
    assert (found.base, found.choice, found.by_client) == (base, choice, client)
    assert 0 < found.trace < 1 << 128
    assert (found.trace == int(TRACE, 16)) == client
    assert 0 < found.root == span_id(base, 0, "request") < 1 << 64
    assert found.sampled(1.0) and (client or not found.sampled(0.0))


@pytest.mark.parametrize(
    "name", ["", "fetch-1", "req-12", "req-" + "g" * 24, f"req-{'a' * 24}-t{'b' * 31}", f"req-{'a' * 24}-0-0"]
)
def test_names_that_no_gateway_gave_have_no_trace(name: str) -> None:
    assert trace_of(name) is None


def test_about_the_wanted_share_is_sampled() -> None:
    traces = [trace_of(request_id(f"{i:024x}", None)) for i in range(4_000)]
    assert 800 < sum(trace is not None and trace.sampled(0.25) for trace in traces) < 1_200


def test_without_an_endpoint_nothing_of_opentelemetry_is_imported() -> None:
    assert traces_of(ObserveConfig(), "c", MemberId("gateway-0")) is None
    code = (
        "import sys, moonpool.cluster.process, moonpool.cluster.gateway.endpoints\n"
        "print([name for name in sys.modules if name.split('.')[0] == 'opentelemetry'])"
    )
    done = subprocess.run((sys.executable, "-c", code), capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_an_endpoint_that_is_no_url_is_named() -> None:
    with pytest.raises(ConfigError, match=r"observe\.otlp_endpoint: 'collector:4318' is no URL"):
        traces_of(ObserveConfig(otlp_endpoint="collector:4318"), "c", MemberId("gateway-0"))


@pytest.mark.parametrize("endpoint", ["http://", "https://:4318", "http://h:port", "http://h:99999", "ftp://h:21"])
def test_an_endpoint_without_a_host_or_with_no_port_is_named(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="is no URL; write http://HOST:4318"):
        traces_of(ObserveConfig(otlp_endpoint=endpoint), "c", MemberId("gateway-0"))


@pytest.mark.parametrize("endpoint", ["http://user:hush@h:4318", "user:hush@h:4318"])
def test_an_endpoint_with_a_password_is_refused_and_not_repeated(endpoint: str) -> None:
    with pytest.raises(ConfigError, match="OTEL_EXPORTER_OTLP_HEADERS") as refused:
        traces_of(ObserveConfig(otlp_endpoint=endpoint), "c", MemberId("gateway-0"))
    assert "hush" not in str(refused.value)


def test_a_collector_that_is_away_costs_spans_and_nothing_else() -> None:
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens there
        spans = traces_of(ObserveConfig(otlp_endpoint=f"http://127.0.0.1:{taken.getsockname()[1]}"), "c", MemberId("gateway-0"))
        assert spans is not None
        now = time.monotonic()
        spans.ended(Role.DECODE, request_id("ab" * 12, None), 1, Lifetime({Instant.ADMITTED: now, Instant.QUEUED: now + 1}))
        spans.ended(Role.DECODE, "a copy between nodes", 1, Lifetime({Instant.ADMITTED: now}))
        spans.close()
    assert spans.numbers() == {"trace_batches_lost": 1.0}
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("Otel")]


def test_a_request_with_several_choices_is_one_span_with_one_below_for_each() -> None:
    pytest.importorskip("opentelemetry.sdk.trace")
    pytest.importorskip("opentelemetry.exporter.otlp.proto.http")
    from moonpool.cluster.tracing.spans import Spans, _Given

    sent: list[tuple[object, ...]] = []

    class Kept(Spans):
        def __init__(self) -> None:
            self._share, self._wall = 1.0, time.time

        def send(self, trace: int, span: int, parent: int, name: str, *rest: object) -> None:
            sent.append((name, span, parent))

    assert _Given().generate_span_id() == 0
    base = request_id("ab" * 12, None)
    now = time.monotonic()
    for choice in range(2):
        life = Lifetime({Instant.ARRIVED: now, Instant.TOKENISED: now + 1, Instant.FINISHED: now + 2}, {"outcome": "ok"})
        life.begin_try(1, now + 1).ended = now + 2
        Kept().ended(Role.GATEWAY, f"{base}-{choice}", 1, life)
    parents = {name: parent for name, _, parent in sent if str(name) in ("request", "choice 0", "choice 1")}
    root = span_id(base, 0, "request")
    assert parents == {"request": 0, "choice 0": root, "choice 1": root}
    assert len({span for _, span, _ in sent}) == len(sent)
