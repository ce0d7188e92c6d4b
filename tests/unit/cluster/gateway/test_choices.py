"""Several choices of one prompt at the gateway: one attempt for all until each has an id, then each by itself."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from support.gateway_front import Front, eventually
from support.scripted_cluster import Job

from moonpool.core.errors import Reason
from moonpool.core.request import FinishReason, PromptLogprobs, Sampled, TopLogprob

PROMPT = [65, 66, 67, 68]


def body(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "prompt": PROMPT, "max_tokens": 3, "return_token_ids": True, **fields}


async def by_seed(job: Job) -> None:
    """Ids that tell the seed, the rest of them where the attempt goes on."""
    seed = job.attempt.request.sampling.seed
    await job.say([seed, 90, 91][len(job.attempt.emitted) :], finish=FinishReason.LENGTH)


async def test_choices_are_placed_once_and_drawn_by_seeds_of_their_own(tiny: Front) -> None:
    tiny.decode.script = by_seed
    answer = (await tiny.client.post("/v1/completions", json=body(n=3, seed=70))).json()
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2]
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70, 90, 91], [71, 90, 91], [72, 90, 91]]
    assert answer["usage"]["prompt_tokens"] == 4 and answer["usage"]["completion_tokens"] == 9
    assert [asked.choices for asked in tiny.conductor.placed] == [3]
    assert [len(attempt.siblings) for attempt in tiny.decode.started] == [2]


async def test_every_prompt_has_its_choices_in_order(tiny: Front) -> None:
    tiny.decode.script = by_seed
    answer = (await tiny.client.post("/v1/completions", json=body(prompt=[PROMPT, [80]], n=2, seed=70))).json()
    shown = [(choice["index"], choice["token_ids"][0], choice["prompt_token_ids"]) for choice in answer["choices"]]
    assert shown == [(0, 70, PROMPT), (1, 71, PROMPT), (2, 70, [80]), (3, 71, [80])]
    assert answer["usage"]["prompt_tokens"] == 5
    assert len(tiny.conductor.placed) == 2


async def test_more_choices_than_a_request_may_have_are_refused_by_name(tiny: Front) -> None:
    for field, fields in (("n", {"n": 100_000}), ("best_of", {"n": 2, "best_of": 100_000})):
        answer = await tiny.client.post("/v1/completions", json=body(**fields))
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == field
    assert not tiny.decode.jobs


async def test_the_best_of_several_are_shown_and_all_are_counted(tiny: Front) -> None:
    async def script(job: Job) -> None:
        good = {70: -3.0, 71: -0.1, 72: -2.0, 73: -1.0}
        seed = job.attempt.request.sampling.seed
        assert job.attempt.request.sampling.logprobs == 0
        await job.emit(position=0, sampled=Sampled(seed, good[seed]), finish=FinishReason.LENGTH)

    tiny.decode.script = script
    answer = (await tiny.client.post("/v1/completions", json=body(n=2, best_of=4, seed=70))).json()
    assert [(c["index"], c["token_ids"], c["logprobs"]) for c in answer["choices"]] == [(0, [71], None), (1, [73], None)]
    assert answer["usage"] == {
        "prompt_tokens": 4, "completion_tokens": 4, "total_tokens": 8, "prompt_tokens_details": {"cached_tokens": 0}
    }  # fmt: skip


async def test_an_attempt_that_fails_before_the_first_id_is_followed_by_one_for_all(tiny: Front) -> None:
    async def script(job: Job) -> None:
        if job.attempt.number == 1:
            await job.fail(Reason.TRANSFER_FAILED, peer="prefill-0")
        else:
            await by_seed(job)

    tiny.decode.script = script
    answer = (await tiny.client.post("/v1/completions", json=body(n=3, seed=70))).json()
    assert [choice["token_ids"][0] for choice in answer["choices"]] == [70, 71, 72]
    assert [(a.number, len(a.siblings)) for a in tiny.decode.started] == [(1, 2), (2, 2)]
    assert len(tiny.conductor.placed) == 2
    assert tiny.conductor.placed[1].exclude == ("prefill-0",)


async def test_a_choice_that_fails_later_goes_on_by_itself_with_its_ids(tiny: Front) -> None:
    async def script(job: Job) -> None:
        if job.attempt.number == 1 and job.attempt.request.sampling.seed == 71:
            await job.say([71])
            await job.fail(Reason.PEER_SILENT)
        else:
            await by_seed(job)

    tiny.decode.script = script
    answer = (await tiny.client.post("/v1/completions", json=body(n=3, seed=70))).json()
    assert [choice["token_ids"] for choice in answer["choices"]] == [[70, 90, 91], [71, 90, 91], [72, 90, 91]]
    again = tiny.decode.started[-1]
    assert (again.number, again.emitted, again.siblings, again.request.sampling.seed) == (2, (71,), (), 71)


async def test_a_stream_that_is_left_after_its_first_chunk_cancels_every_choice(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.say([70])
        await job.cancelled.wait()

    tiny.decode.script = script
    async with tiny.client.stream("POST", "/v1/completions", json=body(n=3, stream=True)) as answer:
        async for _ in answer.aiter_lines():
            break
    async with asyncio.timeout(5):
        await asyncio.gather(*(job.cancelled.wait() for job in tiny.decode.jobs))
    assert len(tiny.decode.jobs) == 3
    await eventually(lambda: tiny.gateway.numbers()["requests_in_flight"] == 0)


async def test_a_request_that_is_left_while_it_is_placed_takes_nothing(tiny: Front) -> None:
    tiny.conductor.decide = lambda request: None  # never answers
    asking = asyncio.create_task(tiny.client.post("/v1/completions", json=body(n=3)))
    await eventually(lambda: tiny.conductor.placed)
    asking.cancel()
    await eventually(lambda: tiny.gateway.numbers()["requests_in_flight"] == 0)
    assert not tiny.decode.jobs


def scores(job: Job) -> PromptLogprobs:
    n = len(job.attempt.request.prompt) - 1
    width = job.attempt.prompt_logprobs or 0
    tops = tuple(range(70, 70 + width)) * n
    return PromptLogprobs(1, width, tuple(-0.5 * (i + 1) for i in range(n)), (3,) * n, tops, (-0.25,) * len(tops))


async def scored(job: Job) -> None:
    """The first choice brings the prompt's, the others none; they come first."""
    if not job.attempt.siblings and job.attempt.request.id.endswith(("-1", "-2")):
        await job.say([69], finish=FinishReason.LENGTH)
        return
    await asyncio.sleep(0.02)
    await job.emit(prompt_logprobs=scores(job))
    if job.attempt.request.sampling.max_tokens:
        await job.emit(position=0, sampled=Sampled(69, -1.0, (TopLogprob(69, -1.0),)), finish=FinishReason.LENGTH)
    else:
        await job.emit(finish=FinishReason.LENGTH)


@pytest.mark.parametrize("tokens", [0, 1])
async def test_an_echoed_prompt_comes_with_its_log_probabilities(tiny: Front, tokens: int) -> None:
    tiny.decode.script = scored
    answer = (await tiny.client.post("/v1/completions", json=body(echo=True, logprobs=1, max_tokens=tokens))).json()
    (choice,) = answer["choices"]
    lists = choice["logprobs"]
    assert lists["token_logprobs"] == [None, -0.5, -1.0, -1.5, *[-1.0] * tokens]
    assert lists["top_logprobs"][0] is None and [len(top) for top in lists["top_logprobs"][1:]] == [1] * (3 + tokens)
    assert len(lists["tokens"]) == len(lists["text_offset"]) == 4 + tokens
    for token, start in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert choice["text"].startswith(token, start)
    assert answer["usage"]["completion_tokens"] == tokens
    assert tiny.conductor.placed[0].keys == (), "what is cached of it is of no use"


@pytest.mark.parametrize("stream", [False, True])
async def test_a_prompt_whose_log_probabilities_never_come_is_given_up_at_its_deadline(tiny: Front, stream: bool) -> None:
    tiny.decode.script = by_seed
    fields = body(echo=True, logprobs=0, n=2, seed=70, stream=stream)
    async with asyncio.timeout(5):
        answer = await tiny.client.post("/v1/completions", json=fields, headers={"x-deadline-ms": "100"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (504, "deadline_passed")
    await eventually(lambda: tiny.gateway.numbers()["requests_in_flight"] == 0)


async def test_more_log_probabilities_than_an_answer_holds_are_refused_by_name(tiny: Front) -> None:
    prompts = [[65] * 200] * 60
    for field, fields in (
        ("prompt_logprobs", {"prompt_logprobs": 20, "n": 3}),
        ("logprobs", {"echo": True, "logprobs": 20, "n": 3}),
    ):
        answer = await tiny.client.post("/v1/completions", json=body(prompt=prompts, **fields))
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, field), answer.text
    assert not tiny.decode.jobs


async def test_one_id_is_a_prompt_without_log_probabilities(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.emit(finish=FinishReason.LENGTH)

    tiny.decode.script = script
    answer = await tiny.client.post("/v1/completions", json=body(prompt=[65], echo=True, logprobs=1, max_tokens=0))
    lists = answer.json()["choices"][0]["logprobs"]
    assert answer.status_code == 200
    assert (lists["token_logprobs"], lists["top_logprobs"], lists["text_offset"]) == ([None], [None], [0])


async def test_a_stream_opens_with_the_prompt_and_what_is_known_of_it(tiny: Front) -> None:
    tiny.decode.script = scored
    fields = body(echo=True, logprobs=0, max_tokens=1, n=3, stream=True)
    chunks: dict[int, list[Any]] = {}
    async with tiny.client.stream("POST", "/v1/completions", json=fields) as answer:
        async for line in answer.aiter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line[6:])["choices"]
                chunks.setdefault(choice["index"], []).append(choice["logprobs"])
    assert sorted(chunks) == [0, 1, 2]
    for first, *_ in chunks.values():
        assert first["token_logprobs"] == [None, -0.5, -1.0, -1.5]


@pytest.mark.parametrize("chat", [False, True])
async def test_prompt_logprobs_are_shaped_as_vllm_shapes_them(tiny: Front, chat: bool) -> None:
    tiny.decode.script = scored
    fields = {"prompt_logprobs": 2, "max_tokens": 1}
    if chat:
        asked: dict[str, Any] = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], **fields}
        told = (await tiny.client.post("/v1/chat/completions", json=asked)).json()["prompt_logprobs"]
    else:
        told = (await tiny.client.post("/v1/completions", json=body(**fields))).json()["choices"][0]["prompt_logprobs"]
    prompt = tiny.decode.jobs[0].attempt.request.prompt
    assert told[0] is None and len(told) == len(prompt)
    for token, entry in zip(prompt[1:], told[1:], strict=True):
        assert next(iter(entry)) == str(token)
        assert entry[str(token)]["rank"] == 3
        assert {int(name) for name in entry} == {token, 70, 71}
        assert set(entry["70"]) == {"logprob", "rank", "decoded_token"}


async def test_a_prompt_counts_once_for_all_its_choices(tiny: Front) -> None:
    tiny.decode.script = by_seed
    await tiny.client.post("/v1/completions", json=body(n=3, seed=70))
    page = (await tiny.client.get("/metrics")).text
    counted = {line.split("{")[0]: float(line.rsplit(" ", 1)[1]) for line in page.splitlines() if 'model="tiny"' in line}
    assert counted["moonpool_gateway_prompt_tokens_total"] == len(PROMPT)
    assert counted["moonpool_gateway_output_tokens_total"] == 9


async def test_a_prompt_is_cut_from_the_left_and_echoed_as_it_was_used(tiny: Front) -> None:
    tiny.decode.script = by_seed
    fields = body(prompt="hello", truncate_prompt_tokens=2, echo=True, seed=70)
    answer = (await tiny.client.post("/v1/completions", json=fields)).json()
    assert answer["choices"][0]["text"].startswith("lo")
    assert answer["usage"]["prompt_tokens"] == len(tiny.decode.jobs[0].attempt.request.prompt) == 2


async def test_a_string_may_be_taken_without_what_the_tokenizer_adds(tiny: Front) -> None:
    tiny.decode.script = by_seed
    for added in (True, False):
        await tiny.client.post("/v1/completions", json=body(prompt="hello", add_special_tokens=added, seed=70))
    with_bos, without = (job.attempt.request.prompt for job in tiny.decode.jobs)
    assert with_bos[1:] == without and with_bos[0] == 0


async def test_special_tokens_have_their_names_for_text_where_that_is_asked_for(tiny: Front) -> None:
    async def script(job: Job) -> None:
        await job.say([69, 2, 69], finish=FinishReason.LENGTH)

    tiny.decode.script = script
    texts = []
    for skip in (True, False):
        answer = await tiny.client.post("/v1/completions", json=body(skip_special_tokens=skip, n=2))
        texts.append({choice["text"] for choice in answer.json()["choices"]})
    ((hidden,), (shown,)) = texts
    assert shown == f"{hidden[0]}<|im_start|>{hidden[1]}"


async def test_biases_and_least_shares_reach_the_workers(tiny: Front) -> None:
    tiny.decode.script = by_seed
    await tiny.client.post("/v1/completions", json=body(logit_bias={"5": -3, "7": 0, "9": 1.5}, min_p=0.25, seed=70))
    sampling = tiny.decode.jobs[0].attempt.request.sampling
    assert [(one.token, one.bias) for one in sampling.logit_bias] == [(5, -3.0), (9, 1.5)]
    assert sampling.min_p == 0.25
    refused = await tiny.client.post("/v1/completions", json=body(logit_bias={"70000": 1}))
    assert refused.status_code == 400 and refused.json()["error"]["param"] == "logit_bias"
