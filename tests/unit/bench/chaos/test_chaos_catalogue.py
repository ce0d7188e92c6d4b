"""What the clients of a chaos run ask, and what the oracle says to it."""

from __future__ import annotations

import math
from pathlib import Path

import torch
from support.workers import config_for, generate

from moonpool.bench.chaos.catalogue import PREFIXES, Conversation, Sizes, Turn, conversations
from moonpool.bench.chaos.oracle import TIE, answer_all, drawn
from moonpool.core.ids import RequestId
from moonpool.core.request import Request, SamplingParams
from moonpool.engine.engine import load_engine
from moonpool.engine.sampler import uniform

SIZES = Sizes(prefix=(16, 40), words=(1, 20), answer=(1, 12), context=256)


def test_conversations_follow_from_their_seed_and_fit_the_context() -> None:
    made = conversations(60, (5, 90), 3, SIZES)
    assert made == conversations(60, (5, 90), 3, SIZES)
    assert made != conversations(60, (5, 90), 4, SIZES)
    assert len({c.prefix for c in made}) <= PREFIXES
    assert {len(c.turns) for c in made} == {1, 2, 3}
    turns = [turn for c in made for turn in c.turns]
    assert {turn.stream for turn in turns} == {True, False}
    assert {turn.temperature for turn in turns} == {0.0, 0.8}
    for c in made:
        assert len(c.prefix) + sum(len(t.words) + t.max_tokens for t in c.turns) <= SIZES.context
        assert all(5 <= token < 90 for token in (*c.prefix, *c.turns[0].words))


def test_a_later_prompt_holds_what_was_said_before() -> None:
    turns = tuple(Turn((n, n), 2, 0.0, 0, False) for n in (1, 2))
    talk = Conversation((9,), turns, [(7, 8)])
    assert talk.prompt(0) == (9, 1, 1)
    assert talk.prompt(1) == (9, 1, 1, 7, 8, 2, 2)


def test_the_oracle_says_what_single_engine_calls_say(tiny_model: Path) -> None:
    config = config_for(tiny_model)
    engine = load_engine(config, tiny_model, threads=1, pages=200)
    asked = conversations(10, (0, 128), 5, SIZES)
    answer_all(engine, asked)
    assert engine.pages.used == 0
    answered = [(c, turn) for c in asked for turn in range(len(c.answers))]
    assert len(answered) >= 12
    for c, turn in answered:
        what = c.turns[turn]
        params = SamplingParams(what.max_tokens, temperature=what.temperature, seed=what.seed, ignore_eos=True)
        request = Request(RequestId("r"), c.prompt(turn), params, bytes(16), ())
        assert tuple(generate(engine, request)) == c.answers[turn]
    engine.close()


def test_the_oracle_says_nothing_where_two_ids_are_as_good() -> None:
    greedy, sampled = (Turn((1,), 1, temperature, 3, False) for temperature in (0.0, 1.0))
    logits = torch.tensor([0.0, 2.0, 2.0 - 3 * TIE])
    assert drawn(logits, greedy, (1,), ()) == 1
    logits[2] = 2.0 - TIE
    assert drawn(logits, greedy, (1,), ()) is None
    clear = torch.tensor([0.0, 20.0, 0.0])
    assert drawn(clear, sampled, (1,), ()) == 1
    share = uniform(sampled.seed, 0)
    edge = torch.zeros(1_000)  # the drawn number is where the first id's share ends
    edge[0] = math.log(999 * share / (1 - share))
    assert drawn(edge, sampled, (1,), ()) is None
