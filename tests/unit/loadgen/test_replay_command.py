from __future__ import annotations

import asyncio
import io
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from aiohttp import web
from rich.console import Console
from support.openai_server import Body, VirtualClock, answer_at_once, serving_in_thread

from moonpool.core.errors import ConfigError
from moonpool.core.request import Targets
from moonpool.loadgen.client import Answer
from moonpool.loadgen.commands import GenerateOptions, ReplayOptions, generate, replay
from moonpool.loadgen.generate import GeneratorConfig
from moonpool.loadgen.live import line, table
from moonpool.loadgen.plan import Plan, Scaling
from moonpool.loadgen.prompts import PromptMaker, token_alphabet
from moonpool.loadgen.replay import Replay, RequestShape
from moonpool.loadgen.summary import Transport

SMALL = GeneratorConfig(requests=12, sessions_per_s=5.0)
FAST = Scaling(speed=100.0)


def test_a_generated_trace_replays_into_a_report(tmp_path: Path) -> None:
    facts = generate(GenerateOptions(tmp_path / "trace.jsonl.gz", SMALL))
    assert facts.requests == 12
    with serving_in_thread(answer_at_once, cluster={"carrier": "ucx", "ucx_transport": "tcp"}) as (url, seen):
        options = ReplayOptions(
            tmp_path / "trace.jsonl.gz", url, trace_block_tokens=64, scaling=FAST, ttft_target_ms=4_000, tbt_target_ms=500,
            report=tmp_path / "report", show_progress=False,
        )  # fmt: skip
        summary = replay(options)
    assert (summary.ok, summary.failed, summary.interrupted) == (12, 0, False)
    assert summary.prompt_length_mismatches == summary.output_length_mismatches == 0
    assert summary.goodput is not None
    assert summary.goodput.met == 12
    assert summary.transport == Transport("ucx", "tcp")
    assert {b["model"] for b in seen.bodies} == {"tiny"}
    assert json.loads((tmp_path / "report/summary.json").read_text())["options"]["equal_timestamps"] == "at once"


def test_a_trace_can_be_made_on_the_spot_and_the_cluster_described_by_the_caller() -> None:
    with serving_in_thread(answer_at_once) as (url, _):
        summary = replay(ReplayOptions(SMALL, url, scaling=FAST, show_progress=False), cluster=lambda: {"carrier": "segment"})
        assert summary.transport == Transport("segment", "unknown")
        assert replay(ReplayOptions(SMALL, url, scaling=FAST, show_progress=False)).transport == Transport()
    assert summary.goodput is None


@pytest.mark.model
def test_prompts_as_text_have_the_planned_number_of_tokens(model_dir: Path) -> None:
    with serving_in_thread(answer_at_once) as (url, seen):
        summary = replay(ReplayOptions(SMALL, url, scaling=FAST, prompts="text", tokenizer=model_dir, show_progress=False))
    assert summary.prompt_length_mismatches == 0
    assert all(isinstance(b["prompt"], str) for b in seen.bodies)


@pytest.mark.parametrize(
    ("options", "param"),
    [
        (ReplayOptions(SMALL, "ftp://nowhere", show_progress=False), "url"),
        (ReplayOptions(SMALL, "http://127.0.0.1:9", show_progress=False), "url"),
        (ReplayOptions(Path("/no/such/trace")), "trace"),
        (ReplayOptions(SMALL, ttft_target_ms=0), "ttft_target_ms"),
        (ReplayOptions(SMALL, tbt_target_ms=float("nan")), "tbt_target_ms"),
        (ReplayOptions(SMALL, max_in_flight=-1), "max_in_flight"),
        (ReplayOptions(SMALL, prompts="text"), "tokenizer"),
        (ReplayOptions(SMALL, report=Path("/proc/nothing")), "report"),
        (ReplayOptions(SMALL, scaling=Scaling(speed=-1)), "speed"),
    ],
)
def test_options_that_cannot_work_are_refused_before_anything_is_sent(options: ReplayOptions, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        replay(options)
    assert caught.value.param == param


CHILD = """
import sys
import threading
from pathlib import Path
from moonpool.loadgen.commands import ReplayOptions, replay
from moonpool.loadgen.generate import GeneratorConfig
config = GeneratorConfig(requests=500, sessions_per_s=50.0)
summary = replay(ReplayOptions(config, sys.argv[1], report=Path(sys.argv[2]), grace_s=600))
sys.exit(130 if summary.interrupted else 0)
"""


@pytest.mark.processes
@pytest.mark.parametrize("presses", [1, 2])
def test_ctrl_c_once_lets_answers_end_and_twice_drops_them(tmp_path: Path, presses: int) -> None:
    arrived = threading.Barrier(2)
    thaw = asyncio.Event()
    call: list[Callable[[], object]] = []

    async def script(request: web.Request, body: Body) -> web.StreamResponse:
        if not call:
            loop = asyncio.get_running_loop()
            call.append(lambda: loop.call_soon_threadsafe(thaw.set))
            await asyncio.to_thread(arrived.wait, 60)
        await thaw.wait()
        return await answer_at_once(request, body)

    with serving_in_thread(script) as (url, _):
        child = subprocess.Popen([sys.executable, "-c", CHILD, url, str(tmp_path)], stderr=subprocess.PIPE, text=True)
        assert child.stderr is not None
        try:
            arrived.wait(60)
            child.send_signal(signal.SIGINT)
            for said in child.stderr:
                if said.startswith("stopping:"):
                    break
            if presses == 1:
                call[0]()
            else:
                child.send_signal(signal.SIGINT)
            rest = child.communicate(timeout=60)[1]
        finally:
            child.kill()
            child.wait()
            call[0]()
    assert child.returncode == 130, rest
    assert "Traceback" not in rest
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["interrupted"]
    assert summary["planned"] == 500
    begun = len((tmp_path / "requests.jsonl").read_text().splitlines())
    assert begun < 500
    assert summary["cancelled" if presses == 2 else "ok"] == begun >= 1


class NoSender:
    async def send(self, body: bytes, headers: object, answer: Answer) -> None: ...


def test_the_live_view_is_a_table_and_elsewhere_a_line() -> None:
    run = Replay(Plan(()), PromptMaker(token_alphabet()), NoSender(), RequestShape("tiny", "run", Targets()), VirtualClock())
    assert line(run, 7.0, 120.0).startswith("7 of about 120 s, sent 0/0, in flight 0")
    out = io.StringIO()
    Console(file=out, width=100).print(table(run, 7.0, 120.0))
    assert "TTFT (ms)" in out.getvalue()
