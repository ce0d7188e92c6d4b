"""What ``moonpool trace generate`` and ``moonpool replay`` do: typed options in, plain functions, a summary out."""

from __future__ import annotations

import asyncio
import dataclasses
import secrets
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TextIO

from moonpool.core.errors import ConfigError
from moonpool.core.request import Targets
from moonpool.loadgen.client import HttpSender, open_session, served_model
from moonpool.loadgen.clock import Clock, MonotonicClock
from moonpool.loadgen.facts import TraceFacts, trace_facts
from moonpool.loadgen.generate import GeneratorConfig, generate_trace
from moonpool.loadgen.live import watch
from moonpool.loadgen.plan import Plan, Scaling, plan_sends
from moonpool.loadgen.prompts import DEFAULT_TOKEN_RANGE, Alphabet, PromptMaker, token_alphabet, word_alphabet
from moonpool.loadgen.replay import Replay, RequestShape
from moonpool.loadgen.report import write_report
from moonpool.loadgen.summary import RunFacts, Summary, summarise
from moonpool.loadgen.trace import BLOCK_TOKENS, Trace, read_trace, write_trace
from moonpool.loadgen.transport import fetch_cluster, transport_of

Describe = Callable[[], Mapping[str, Any] | None]


@dataclass(frozen=True, slots=True)
class GenerateOptions:
    """``moonpool trace generate``. ``out`` ending in .gz is written packed."""

    out: Path
    config: GeneratorConfig = field(default_factory=GeneratorConfig)


def generate(options: GenerateOptions) -> TraceFacts:
    """Write a trace; what it holds. ConfigError for values out of range or a path that cannot be written."""
    rows = generate_trace(options.config)
    write_trace(options.out, rows)
    return trace_facts(rows, options.config.block_tokens)


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """``moonpool replay``. Targets None: the requests carry none and no goodput is reported."""

    trace: Path | GeneratorConfig  # a file, or a trace made on the spot
    url: str = "http://127.0.0.1:8000"
    api_key: str = field(default="", repr=False)  # empty: the server asks for none
    model: str = ""  # empty: the first one the server lists
    scaling: Scaling = field(default_factory=Scaling)
    trace_block_tokens: int = BLOCK_TOKENS  # prompt tokens per hash id of the file
    adjust: bool = False  # repair and count odd rows instead of refusing the file
    prompts: Literal["tokens", "text"] = "tokens"
    tokenizer: Path | None = None  # model directory; needed for prompts as text
    token_range: tuple[int, int] = DEFAULT_TOKEN_RANGE  # for prompts as token ids
    salt: int = 0  # another salt, other prompts: a second replay then does not find the first one's cache
    fresh_loops: bool = False  # every loop with prompts of its own
    ttft_target_ms: float | None = None
    tbt_target_ms: float | None = None
    send_targets: bool = True  # in headers; the server may then refuse
    max_in_flight: int = 0  # 0: none. A cap makes the loop no longer open; what it holds back is counted
    timeout_s: float = 600.0  # of one request
    grace_s: float = 5.0  # for answers under way after the first Ctrl-C
    report: Path | None = None  # folder; None writes none
    show_progress: bool = True

    def check(self) -> None:
        """ConfigError naming the first value that cannot be meant."""
        self.scaling.check()
        for name in ("ttft_target_ms", "tbt_target_ms", "timeout_s"):
            value = getattr(self, name)
            if value is not None and not 0 < value < float("inf"):
                raise ConfigError(f"{name}: {value} is out of range; use a number above 0", param=name)
        if self.max_in_flight < 0:
            raise ConfigError(
                f"max_in_flight: {self.max_in_flight} is out of range; use 1 or more, or 0 for no cap", param="max_in_flight"
            )
        if self.prompts == "text" and self.tokenizer is None:
            raise ConfigError(
                "tokenizer: prompts as text need the model's directory; give one, or send token ids", param="tokenizer"
            )


def replay(options: ReplayOptions, *, cluster: Describe | None = None, out: TextIO = sys.stderr) -> Summary:
    """Replay a trace against a server and write the report folder.

    ``cluster`` is called in a thread after the run and says what is known of carriers and transports (members with their
    ``words``, as ``moonpool status --json`` has them); None asks the server (``GET /v1/cluster``). The first
    Ctrl-C sends nothing more and waits ``grace_s`` for answers under way, the second drops them; either way the report is
    written and ``Summary.interrupted`` is true. ConfigError: bad options, trace, url or report folder.
    """
    options.check()
    trace = _trace(options)
    plan = plan_sends(trace, options.scaling)
    prompts = PromptMaker(_alphabet(options), salt=options.salt, fresh_loops=options.fresh_loops)
    if options.report is not None:
        _probe_folder(options.report)
    return asyncio.run(_replay(options, trace, plan, prompts, cluster, out))


async def _replay(
    options: ReplayOptions, trace: Trace, plan: Plan, prompts: PromptMaker, cluster: Describe | None, out: TextIO
) -> Summary:
    clock = MonotonicClock()
    async with open_session(options.url, timeout_s=options.timeout_s, api_key=options.api_key) as session:
        shape = RequestShape(
            model=options.model or await served_model(session, options.url),
            run_id=f"replay-{secrets.token_hex(4)}",
            targets=Targets(options.ttft_target_ms, options.tbt_target_ms),
            send_targets=options.send_targets,
        )
        run = Replay(plan, prompts, HttpSender(session, clock), shape, clock, cap=options.max_in_flight)
        await _run_watched(run, options, plan, clock, out)
        known = await asyncio.to_thread(cluster) if cluster is not None else await fetch_cluster(session)
    summary = summarise(run.records, _facts(options, trace, plan, run, shape, known))
    if options.report is not None:
        await asyncio.to_thread(write_report, options.report, run.records, summary)
    return summary


async def _run_watched(run: Replay, options: ReplayOptions, plan: Plan, clock: Clock, out: TextIO) -> None:
    shown = asyncio.create_task(watch(run, clock, plan.span_s, out)) if options.show_progress else None
    try:
        with _interrupts(run, options.grace_s, out):
            await run.run()
    finally:
        if shown is not None:
            shown.cancel()
            await asyncio.wait([shown])


@contextmanager
def _interrupts(run: Replay, grace_s: float, out: TextIO) -> Iterator[None]:
    """Ctrl-C stops the replay in two steps. Outside the main thread signals are not ours, and nothing is done."""
    loop = asyncio.get_running_loop()
    presses = 0

    def pressed() -> None:
        nonlocal presses
        presses += 1
        run.stop()
        if presses > 1 or not run.progress.in_flight:
            run.drop()
        else:
            print(
                f"stopping: {run.progress.in_flight} answers have {grace_s:g} s to end; Ctrl-C drops them", file=out, flush=True
            )
            loop.call_later(grace_s, run.drop)

    try:
        loop.add_signal_handler(signal.SIGINT, pressed)
    except (RuntimeError, ValueError, NotImplementedError):
        yield
        return
    try:
        yield
    finally:
        loop.remove_signal_handler(signal.SIGINT)


def _facts(
    options: ReplayOptions, trace: Trace, plan: Plan, run: Replay, shape: RequestShape, cluster: Mapping[str, Any] | None
) -> RunFacts:
    scaling = options.scaling
    return RunFacts(
        planned=len(plan.sends),
        span_s=plan.span_s,
        targets=shape.targets,
        cap=options.max_in_flight,
        held_back=run.progress.held_back,
        most_in_flight=run.progress.most_in_flight,
        outputs_raised=plan.outputs_raised,
        interrupted=run.stopped,
        transport=transport_of(cluster),
        trace=dataclasses.asdict(trace.notes),
        options={
            "trace": str(options.trace) if isinstance(options.trace, Path) else f"generated, seed {options.trace.seed}",
            "url": options.url,
            "model": shape.model,
            "prompts": options.prompts,
            "trace_block_tokens": trace.block_tokens,
            "block_tokens": scaling.block_tokens or trace.block_tokens,
            "speed": scaling.speed,
            "output_divisor": scaling.output_divisor,
            "limit": scaling.limit,
            "loops": scaling.loops,
            "equal_timestamps": "spread" if scaling.spread else "at once",
            "salt": options.salt,
            "fresh_loops": options.fresh_loops,
            "send_targets": options.send_targets,
        },
    )


def _trace(options: ReplayOptions) -> Trace:
    if isinstance(options.trace, GeneratorConfig):
        return Trace(tuple(generate_trace(options.trace)), options.trace.block_tokens)
    return read_trace(options.trace, block_tokens=options.trace_block_tokens, adjust=options.adjust)


def _alphabet(options: ReplayOptions) -> Alphabet:
    if options.prompts == "text" and options.tokenizer is not None:
        return word_alphabet(options.tokenizer)
    return token_alphabet(options.token_range)


def _probe_folder(folder: Path) -> None:
    """Find out before a long replay, not after it, that its report has no place."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".writable"
        probe.touch()
        probe.unlink()
    except OSError as e:
        raise ConfigError(f"report: cannot write to {folder}: {e.strerror}; give a writable folder", param="report") from e
