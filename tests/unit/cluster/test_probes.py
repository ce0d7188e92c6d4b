from __future__ import annotations

import asyncio
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry, Counter
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from moonpool.cluster.probe.catalogue.declared import metrics
from moonpool.cluster.probe.exposition import Exposition, Growing
from moonpool.cluster.probe.facts import Facts, Phase, live, ready
from moonpool.cluster.probe.probe import Probe
from moonpool.cluster.probe.server import MAX_CONNECTIONS
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Member
from moonpool.core.progress import Progress

DOCS = Path(__file__).parents[3] / "docs" / "operations.md"
OPENMETRICS = {"accept": "application/openmetrics-text; version=1.0.0"}
STUCK = Progress("computing", 61.0, 60.0)
SLOW = Progress("computing", 59.0, 60.0)

# The states of the documented table, as a process knows them.
STATES = {
    "starts, or loads its model": Facts(Phase.STARTING),
    "serves": Facts(Phase.SERVING),
    "saturated: every queue full, every step slow": Facts(Phase.SERVING, parts=(SLOW,)),
    "leaves (SIGTERM, `Admin.Stop`, `restart`)": Facts(Phase.LEAVING),
    "fenced and coming back, or changing its role": Facts(Phase.CHANGING),
    "its engine hangs or has ended, or its own loop does": Facts(Phase.SERVING, parts=(STUCK,)),
    "registry or etcd lost": Facts(Phase.SERVING),
    "gateway: no conductor, or no whole path from prompt to tokens": Facts(Phase.SERVING, missing=("decode",)),
    "worker or store node: nobody of the other roles is there": Facts(Phase.SERVING),
}


def test_the_documented_table_is_what_probes_say() -> None:
    rows = re.findall(r"^\| ([^|]+) \| (200|503) \| (200|503) \| (200) \|", DOCS.read_text(), re.MULTILINE)
    told = {state.strip(): (int(alive), int(wanted)) for state, alive, wanted, _ in rows}
    fact = {name: (200 if live(f).good else 503, 200 if ready(f).good else 503) for name, f in STATES.items()}
    assert told == fact


@dataclass
class Service:
    registry: CollectorRegistry = field(default_factory=CollectorRegistry)
    values: dict[str, float] = field(default_factory=lambda: {"requests_live": 2.0, "tokens_count": 5.0, "bytes_sent": 7.0})
    parts: list[Progress] = field(default_factory=list)
    lacking: list[str] = field(default_factory=list)

    def progress(self, now: float) -> list[Progress]:
        return self.parts

    def missing(self) -> list[str]:
        return self.lacking

    def numbers(self) -> dict[str, float]:
        return self.values


@dataclass
class House:
    service: Service
    phase: Phase = Phase.SERVING
    role: Role = Role.DECODE
    dead: list[str] = field(default_factory=list)

    async def open(self, stuck_s: float) -> None:
        self.probe = Probe(
            "127.0.0.1",
            0,
            stuck_s,
            member=lambda: Member(MemberId("decode-0"), self.role, NodeId("a"), Incarnation(1), "127.0.0.1:1", 1, model="tiny"),
            phase=lambda: self.phase,
            service=lambda: self.service,
            numbers=lambda: self.service.numbers(),
            on_dead=self.dead.append,
        )
        self.client = httpx.AsyncClient(base_url=f"http://{self.probe.address}", timeout=10.0, trust_env=False)

    async def status(self, path: str) -> int:
        return (await self.client.get(path)).status_code


@asynccontextmanager
async def house(stuck_s: float = 60.0) -> AsyncIterator[House]:
    made = House(Service())
    await made.open(stuck_s)
    try:
        yield made
    finally:
        await made.client.aclose()
        await made.probe.close()


async def test_a_change_of_phase_is_told_at_once() -> None:
    async with house() as h:
        for phase, wanted in ((Phase.STARTING, 503), (Phase.SERVING, 200), (Phase.LEAVING, 503), (Phase.CHANGING, 503)):
            h.phase = phase
            h.probe.refresh()
            assert (await h.status("/live"), await h.status("/ready"), await h.status("/metrics")) == (200, wanted, 200)
        h.phase, h.service.lacking = Phase.SERVING, ["decode"]
        h.probe.refresh()
        told = await h.client.get("/ready")
        assert (told.status_code, told.text) == (503, "missing: decode\n")
        h.service.lacking, h.service.parts = [], [STUCK]
        h.probe.refresh()
        told = await h.client.get("/live")
        assert (told.status_code, told.text) == (503, "computing stands still for 61 s\n")


async def test_a_loop_that_hangs_is_told_by_its_silence_and_metrics_stay_readable() -> None:
    async with house(stuck_s=0.5) as h:
        assert await h.status("/metrics") == 200
        seen: dict[str, int | str] = {}

        def look() -> None:
            with httpx.Client(base_url=f"http://{h.probe.address}", timeout=10.0, trust_env=False) as client:
                until = time.monotonic() + 10.0
                while client.get("/live").status_code == 200 and time.monotonic() < until:
                    time.sleep(0.05)
                seen["live"], seen["ready"] = client.get("/live").status_code, client.get("/ready").status_code
                seen["metrics"] = client.get("/metrics").text
                released.set()

        released = threading.Event()
        looking = threading.Thread(target=look)
        looking.start()
        released.wait(20.0)  # the process's own loop does nothing meanwhile
        looking.join()
        assert (seen["live"], seen["ready"]) == (503, 503)
        assert "moonpool_decode_requests_live 2.0" in str(seen["metrics"])
        assert "moonpool_process_live 0.0" in str(seen["metrics"])
        h.probe.refresh()
        assert await h.status("/live") == 200


async def test_one_that_goes_on_standing_still_ends_itself_and_a_pause_does_not() -> None:
    async with house(stuck_s=1.0) as h:
        h.service.parts = [STUCK]
        await asyncio.sleep(0.5)
        h.service.parts = [SLOW]
        await asyncio.sleep(1.0)
        assert not h.dead
        h.service.parts = [STUCK]
        async with asyncio.timeout(20.0):
            while not h.dead:  # noqa: ASYNC110  it is told in another thread
                await asyncio.sleep(0.05)
        assert h.dead == ["computing stands still for 61 s"]


async def test_numbers_that_cannot_be_read_break_nothing_and_are_counted() -> None:
    async with house() as h:
        await h.status("/metrics")

        def fails() -> dict[str, float]:
            raise RuntimeError("a gauge is broken")

        h.service.numbers = fails  # type: ignore[method-assign]
        h.service.progress = lambda now: 1 / 0  # type: ignore[method-assign,assignment,return-value]
        told = await h.client.get("/metrics")
        assert told.status_code == 200
        assert "moonpool_decode_requests_live 2.0" in told.text, "the newest there are"
        errors = next(f for f in parse_text(told.text) if f.name == "moonpool_process_metrics_errors")
        assert errors.samples[0].value >= 1
        assert await h.status("/live") == 200


async def test_a_broken_metric_of_the_service_s_own_leaves_the_others() -> None:
    async with house() as h:

        class Broken:
            def collect(self) -> None:
                raise RuntimeError("no")

        h.service.registry.register(Broken())  # type: ignore[arg-type]
        told = await h.client.get("/metrics")
        assert told.status_code == 200 and "moonpool_decode_tokens_total 5.0" in told.text


async def test_both_forms_parse_and_name_what_they_tell() -> None:
    async with house() as h:
        Counter("moonpool_own", "of the service", registry=h.service.registry).inc()
        text, strict = await h.client.get("/metrics"), await h.client.get("/metrics", headers=OPENMETRICS)
        assert strict.headers["content-type"].startswith("application/openmetrics-text")
        for families in (list(parse_text(text.text)), list(parse_openmetrics(strict.text))):
            kinds = {family.name: family.type for family in families}
            assert kinds["moonpool_decode_tokens"] == kinds["moonpool_own"] == "counter"
            assert kinds["moonpool_decode_requests_live"] == "gauge"
            assert all(family.documentation for family in families)
            labels = {name for family in families for sample in family.samples for name in sample.labels}
            assert labels <= {label for _, metric in metrics() for label in metric.labels}


async def test_scrapes_side_by_side_all_get_a_whole_page() -> None:
    async with house() as h:
        pages = await asyncio.gather(*(h.client.get("/metrics", headers=OPENMETRICS) for _ in range(20)))
        assert all(page.text.endswith("# EOF\n") for page in pages)


async def test_what_is_no_probe_is_refused_and_silent_clients_keep_nobody_out() -> None:
    async with house() as h:
        host, _, port = h.probe.address.rpartition(":")
        silent = [await asyncio.open_connection(host, int(port)) for _ in range(MAX_CONNECTIONS // 2)]
        try:
            assert await h.status("/nothing") == 404
            assert (await h.client.post("/live")).status_code == 405
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write(b"\x80\x04pickle" * 2_000)
            assert await reader.read() == b""
            writer.close()
            assert await h.status("/live") == 200
        finally:
            for _, writer in silent:
                writer.close()


@given(st.lists(st.lists(st.integers(0, 50), min_size=1, max_size=5), min_size=1, max_size=4))
def test_counters_grow_over_the_lives_of_what_counts_them(lives: list[list[int]]) -> None:
    growing, told, ended = Growing(), [], 0
    for steps in lives:
        count = 0
        for step in steps:
            count += step
            told.append(growing.total("tokens", float(count)))
        ended += count
    assert told == sorted(told)
    assert told[-1] <= ended, "a life that begins above the last one's end cannot be told from it"


def test_another_role_tells_other_names_and_old_ones_go_on_where_they_were() -> None:
    page = Exposition()
    decode = Member(MemberId("decode-0"), Role.DECODE, NodeId("a"), Incarnation(1), "", 1)
    prefill = Member(MemberId("decode-0"), Role.PREFILL, NodeId("a"), Incarnation(2), "", 1)
    told = [page.render(member, {"tokens_count": 5.0}, [], "")[0].decode() for member in (decode, prefill)]
    assert "moonpool_decode_tokens_total 5.0" in told[0] and "moonpool_decode_tokens" not in told[1]
    missing = page.render(decode, {}, [], "")[0].decode()
    assert "moonpool_decode_tokens_total 5.0" in missing, "it is not told for a moment, and does not begin anew"
    assert "moonpool_decode_tokens_total 7.0" in page.render(decode, {"tokens_count": 2.0}, [], "")[0].decode()


@pytest.mark.parametrize("name", ["probe_port", "probe_host"])
async def test_a_port_that_is_taken_is_named(name: str) -> None:
    from moonpool.core.errors import ConfigError

    async with house() as h:
        host, _, port = h.probe.address.rpartition(":")
        with pytest.raises(ConfigError, match=r"cluster\.probe_port: cannot listen"):
            Probe(
                host if name == "probe_port" else "203.0.113.1",
                int(port) if name == "probe_port" else 0,
                1.0,
                member=lambda: None,  # type: ignore[arg-type,return-value]
                phase=lambda: Phase.STARTING,
                service=lambda: None,
                numbers=dict,
                on_dead=lambda why: None,
            )
