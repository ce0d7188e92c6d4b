"""Every family on every backend against the library: cold, in chunks, behind a cached prefix, and with K/V from elsewhere.

In float32 the ids are the library's own greedy ids and logits differ by rounding alone. In bfloat16, fed those ids, no way
leads further from the library's float32 logits than the library's own bfloat16 does, up to half as much again; that is
stated in parts of the logits' spread. With experts rounding may choose another one where two nearly tie, so that only the
fixed bound holds. Every byte that nobody wrote is NaN.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from compiled_runner import rounded_tiny
from engine_runner import Runner, Transcript, hand_over, library_run, load_tiny
from known_families import KNOWN

from moonpool.engine.compiled.cpu import unfit_cpu
from moonpool.engine.engine import Engine, Row
from moonpool.engine.trial import difference

LENGTHS = (50, 32, 16, 3)  # with and without a last block that is not full; over and within the windows
OUTPUTS = 18  # over a border of blocks
ROUNDING = 5e-5  # of float32 logits
MOST_APART = 0.15  # of the spread: what the library's own bfloat16 stays within
IN_BFLOAT16 = ("llama", "mistral", "qwen2", "qwen3", "gemma2", "gemma3", "qwen3_moe")
RUNS = [(kind, "float32") for kind in KNOWN] + [(kind, "bfloat16") for kind in IN_BFLOAT16]
CHUNKS = (1 << 30, 13)


@dataclass
class Served:
    engines: dict[str, Engine]  # by backend
    dtype: str
    prompts: list[list[int]]
    outputs: list[list[int]]  # the library's greedy ids
    want: list[torch.Tensor]  # its float32 logits, [OUTPUTS, vocabulary] each
    bound: float  # of bfloat16

    def run(self, engine: Engine, *, reuse: bool = False, chunk: int = 1 << 30) -> list[Transcript]:
        forced = None if self.dtype == "float32" else self.outputs
        return Runner(engine, reuse=reuse).run(self.prompts, OUTPUTS, chunk=lambda start: chunk, forced=forced)

    def check(self, got: list[Transcript], what: str) -> None:
        for one, ids, want in zip(got, self.outputs, self.want, strict=True):
            assert one.tokens == ids, what
            logits = torch.stack(one.logits)
            if self.dtype == "float32":
                torch.testing.assert_close(logits, want, atol=ROUNDING, rtol=1e-5, msg=lambda said: f"{what}: {said}")
            else:
                assert difference(logits, want) < self.bound, what


def _load(directory: Path, dtype: str) -> dict[str, Engine]:
    engines = {name: load_tiny(directory, poison=True, dtype=dtype, backend=name) for name in ("fused", "torch")}
    if dtype == "bfloat16" and unfit_cpu() is None:
        best = load_tiny(directory, poison=True, dtype=dtype)
        if best.backend_name == "compiled":
            return engines | {"compiled": best}
        assert "layers of experts" in best.backend_note
        best.close()
    return engines


def _served(directory: Path, dtype: str) -> Served:
    library = library_run(directory, dtype, LENGTHS, OUTPUTS)
    if dtype == "bfloat16":
        assert max(library.theirs) < MOST_APART
    chooses = any("expert" in name for name in library.parameters)
    bound = MOST_APART if chooses else 1.5 * max(library.theirs, default=0.0)
    return Served(_load(directory, dtype), dtype, library.prompts, library.outputs, library.want, bound)


@pytest.fixture(scope="module", params=RUNS, ids="-".join)
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    kind, dtype = request.param
    found = _served(rounded_tiny(tmp_path_factory.mktemp("family"), KNOWN[kind]), dtype)
    yield found
    for engine in found.engines.values():
        engine.pages.clear_cached()
        assert engine.pages.free == engine.pages.total
        engine.close()


def test_cold_prompts_and_chunks_beside_decode_rows(served: Served) -> None:
    for name, engine in served.engines.items():
        for chunk in CHUNKS:
            served.check(served.run(engine, chunk=chunk), f"{name}, chunks of {chunk}")


def test_behind_a_cached_prefix(served: Served) -> None:
    for name, engine in served.engines.items():
        for cached in (False, True):
            got = served.run(engine, reuse=True, chunk=13)
            assert [one.cached for one in got] == [min(n // 16 * 16, n - 1) if cached else 0 for n in LENGTHS]
            served.check(got, f"{name}, cached: {cached}")


def test_with_keys_and_values_that_another_backend_computed_elsewhere(served: Served) -> None:
    """Pages and a last block that is not full are handed over in the one order of bytes that all backends share."""
    names = list(served.engines)
    for name, other in zip(names, names[1:] + names[:1], strict=True):
        got = [_split(served, i, served.engines[name], served.engines[other]) for i in range(len(LENGTHS))]
        served.check(got, f"{name} prefills, {other} decodes")


@pytest.mark.skipif(not os.environ.get("MOONPOOL_LONG_TESTS"), reason="takes minutes: every kernel is interpreted")
@pytest.mark.parametrize("kind", KNOWN)
def test_triton_kernels_answer_as_the_library_does_behind_prefixes_and_pages_of_another_backend(
    kind: str, tmp_path: Path
) -> None:
    served = _served(rounded_tiny(tmp_path, KNOWN[kind]), "float32")
    engine = load_tiny(tmp_path, poison=True, backend="triton")
    assert engine.backend_name == "triton"
    for cached in (False, True):
        got = served.run(engine, reuse=True, chunk=20)
        assert [one.cached for one in got] == [min(n // 16 * 16, n - 1) if cached else 0 for n in LENGTHS]
        served.check(got, f"cached: {cached}")
    for prefill, decode in ((engine, served.engines["fused"]), (served.engines["fused"], engine)):
        got = [_split(served, i, prefill, decode) for i in range(len(LENGTHS))]
        served.check(got, f"{prefill.backend_name} prefills, {decode.backend_name} decodes")


def _split(served: Served, i: int, prefill: Engine, decode: Engine) -> Transcript:
    prompt, seen = served.prompts[i], Transcript()
    there = prefill.pages.allocate(-(-len(prompt) // 16))
    logits = prefill.forward([Row(prompt, 0, there, True)])[0].clone()
    here = hand_over(prefill, there, decode, len(prompt))
    prefill.pages.release(there)
    here += decode.pages.allocate(-(-(len(prompt) + OUTPUTS) // 16) - len(here))
    for position in range(OUTPUTS):
        seen.logits.append(logits)
        seen.tokens.append(int(logits.argmax()) if served.dtype == "float32" else served.outputs[i][position])
        logits = decode.forward([Row(seen.tokens[-1:], len(prompt) + position, here, True)])[0].clone()
    decode.pages.release(here)
    return seen
