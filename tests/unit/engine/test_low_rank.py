"""What adapters and experts add, against one token at a time."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from moonpool.engine.backends import Span
from moonpool.engine.low_rank import Adapters, LowRank
from moonpool.engine.mlps import ExpertMlp
from moonpool.engine.recipe import Experts

NOWHERE = np.zeros(0, dtype=np.int64)
RANKS = {"a": 1, "b": 3}


def _pairs(draw: torch.Generator, outputs: int, inputs: int, names: set[str]) -> dict[str, LowRank]:
    return {
        name: LowRank(torch.randn((rank, inputs), generator=draw), torch.randn((outputs, rank), generator=draw))
        for name, rank in RANKS.items()
        if name in names
    }


@settings(max_examples=30, deadline=None)
@given(
    rows=st.lists(st.tuples(st.sampled_from(["", "a", "b"]), st.integers(1, 5)), min_size=1, max_size=6),
    targets=st.lists(st.sets(st.sampled_from(["a", "b"])), min_size=3, max_size=3),
    seed=st.integers(0, 1 << 30),
)
def test_every_row_gets_what_its_own_adapter_adds_to_the_parts_that_it_has(
    rows: list[tuple[str, int]], targets: list[set[str]], seed: int
) -> None:
    draw = torch.Generator().manual_seed(seed)
    parts = [nn.Linear(4, outputs) for outputs in (6, 2, 2)]
    of = {part: _pairs(draw, part.out_features, 4, names) for part, names in zip(parts, targets, strict=True)}
    adapters = Adapters(frozenset(RANKS), of)
    spans, first = [], 0
    for name, count in rows:
        spans.append(Span(first, count, 0, NOWHERE, name))
        first += count
    adapters.groups.begin(spans, torch.device("cpu"))
    x, before = torch.randn((first, 4), generator=draw), torch.randn((first, 10), generator=draw)
    merged = adapters.merged(parts)
    got = before.clone() if merged is None else merged.add(x, before.clone())
    for span in spans:
        for at in range(span.first, span.first + span.count):
            pairs = [of[part].get(span.adapter) for part in parts]
            added = [
                torch.zeros(part.out_features) if pair is None else pair.up @ (pair.down @ x[at])
                for part, pair in zip(parts, pairs, strict=True)
            ]
            torch.testing.assert_close(got[at], before[at] + torch.cat(added), atol=1e-4, rtol=1e-4)


@settings(max_examples=20, deadline=None)
@given(tokens=st.integers(1, 9), experts=st.integers(1, 5), normalised=st.booleans(), data=st.data())
def test_every_token_gets_what_its_own_experts_say(tokens: int, experts: int, normalised: bool, data: st.DataObject) -> None:
    top_k, seed = data.draw(st.integers(1, experts)), data.draw(st.integers(0, 1 << 30))
    draw = torch.Generator().manual_seed(seed)
    router, x = torch.randn((experts, 8), generator=draw), torch.randn((tokens, 8), generator=draw)
    gate_up, down = torch.randn((experts, 12, 8), generator=draw), torch.randn((experts, 8, 6), generator=draw)
    got = ExpertMlp(Experts(router, top_k, normalised, gate_up.clone(), down.clone()), None, "silu")(x)
    for at in range(tokens):
        shares = (router @ x[at]).softmax(0)
        chosen = shares.argsort(descending=True)[:top_k].tolist()
        whole = sum(float(shares[e]) for e in chosen) if normalised else 1.0
        want = torch.zeros(8)
        for e in chosen:
            gate, up = (gate_up[e] @ x[at]).chunk(2)
            want += float(shares[e]) / whole * (down[e] @ (functional.silu(gate) * up))
        torch.testing.assert_close(got[at], want, atol=1e-4, rtol=1e-4)
