"""One prompt over several prefill workers: the same ids and the same K/V as from one, whatever is cached where."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.groups import SIZE, answered, check, count, group, ids
from support.workers import ref

from moonpool.core.errors import InvalidRequest, Reason, TransferFailed
from moonpool.core.ids import Incarnation, MemberId, NodeId
from moonpool.core.placement import MOST_IN_GROUP, Helper, Placement, Segment, Source, WorkerRef
from moonpool.prefill_worker.chunk_planner import ChunkPlanner
from moonpool.prefill_worker.pace import worth_waiting
from moonpool.prefill_worker.spans import require_spans


@pytest.mark.parametrize(
    ("tokens", "ends"),
    [(20 * SIZE + 5, [11]), (20 * SIZE, [19]), (30 * SIZE + 15, [12, 22])],
    ids=["tail", "whole blocks", "three workers"],
)
async def test_spans_of_a_group_make_the_same_prompt(tmp_path: Path, tiny_model: Path, tokens: int, ends: list[int]) -> None:
    workers = len(ends) + 1
    async with group(tmp_path, tiny_model, workers) as split:
        split.place(workers - 1, ends=ends)
        request = split.asker.request(ids(tokens, tokens))
        answer = await answered(split, request)
        check(split, request, answer)
        assert answer.cached_tokens == 0
        for i, end in enumerate([*ends, None]):
            before = ends[i - 1] * SIZE if i else 0
            assert count(split, i, "prefix_tokens_computed") == (tokens if end is None else end * SIZE) - before
            assert count(split, i, "span_tokens") == before
            assert count(split, i, "spans_alone") == 0


async def test_what_a_worker_of_the_group_has_is_neither_computed_nor_sent(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model) as split:
        prompt = ids(20 * SIZE + 3, 1)

        async def asked(name: str, cached: int, computed: tuple[int, int], sent: int) -> None:
            """``computed``: by each worker, ``sent`` by the first one, in tokens."""
            before = [count(split, i, "prefix_tokens_computed") for i in (0, 1)], count(split, 1, "span_tokens")
            bytes_before = split.prefills[0]._pusher.bytes_sent()
            request = split.asker.request(prompt)
            answer = await answered(split, request)
            check(split, request, answer)
            after = [count(split, i, "prefix_tokens_computed") for i in (0, 1)], count(split, 1, "span_tokens")
            assert tuple(b - a for a, b in zip(before[0], after[0], strict=True)) == computed, name
            assert after[1] - before[1] == sent, name
            assert answer.cached_tokens == cached, name
            bytes_sent = split.prefills[0]._pusher.bytes_sent() - bytes_before
            assert (bytes_sent > 0) == (sent > 0), name

        split.place(0)
        await answered(split, split.asker.request(prompt[: 6 * SIZE]))
        await split.decode.clear_device_pages()
        split.place(1, ends=[12])
        await asked("the first has six blocks in its pages", 6 * SIZE, (6 * SIZE, 8 * SIZE + 3), 12 * SIZE)
        await split.clear_device_pages()
        await asked("the pool of the second has all that lies before", 12 * SIZE, (0, 8 * SIZE + 3), 0)
        await split.clear_device_pages()
        for node in "ab":
            split.stores[node].pool.clear()
        split.place(1, [Segment(0, 20, Source.FETCH, NodeId("c"))], ends=[12])
        await asked("the first fetches it from another node", 12 * SIZE - 1, (1, 8 * SIZE + 3), 12 * SIZE)
        split.place(1, ends=[12])
        await asked("the second has it in its pages", 20 * SIZE, (0, 3), 0)


async def test_workers_of_one_host_hand_spans_on_within_its_pool(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model, 3, names="aaaa") as split:
        split.place(2, ends=[5, 11])
        for seed in (5, 6):
            request = split.asker.request(ids(20 * SIZE + 9, seed))
            answer = await answered(split, request)
            check(split, request, answer)
        assert [count(split, i, "span_tokens") for i in range(3)] == [0, 2 * 5 * SIZE, 2 * 11 * SIZE]
        assert split.stores["a"].numbers()["digest_mismatches"] == 0


async def test_a_private_copy_that_fails_costs_the_attempt_and_no_page(
    tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(source: int, target: int) -> None:
        raise TransferFailed("another rank of this worker: out of memory")

    async with group(tmp_path, tiny_model) as split:
        split.place(0)
        prompt = ids(6 * SIZE, 8)
        await answered(split, split.asker.request(prompt))
        await split.decode.clear_device_pages()
        with monkeypatch.context() as patched:
            patched.setattr(split.prefill_engines[0], "copy_page", fail)
            answer = await split.gateway.ask(split.asker.request(prompt))
            assert answer.error is not None and answer.error.reason is Reason.TRANSFER_FAILED
            await split.idle()
        assert split.prefill_engines[0].pages.used == 0
        request = split.asker.request(prompt)
        check(split, request, await answered(split, request))


async def test_without_reuse_spans_are_sent_under_names_that_nobody_finds(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model, reuse=False) as split:
        split.place(1, ends=[4])
        for _ in range(2):
            request = split.asker.request(ids(9 * SIZE + 1, 2))
            answer = await answered(split, request)
            assert answer.ids == split.oracle(request)
        assert count(split, 0, "prefix_tokens_computed") == 2 * 4 * SIZE
        assert count(split, 1, "span_tokens") == 2 * 4 * SIZE


async def test_log_probabilities_of_a_prompt_need_one_worker(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model) as split:
        split.place(1, ends=[4])
        request = split.asker.request(ids(9 * SIZE, 3), prompt_logprobs=0)
        answer = await answered(split, request)
        assert answer.ids == split.oracle(request)
        assert count(split, 0, "jobs") == 0
        assert count(split, 1, "prefix_tokens_computed") == 9 * SIZE


async def test_spans_that_make_no_sense_are_refused(tmp_path: Path, tiny_model: Path) -> None:
    async with group(tmp_path, tiny_model) as split:
        helper, prefill = (ref(member) for member in split.prefill_members)
        split.gateway.placement = Placement(prefill, ref(split.decode_member), helpers=(Helper(helper, 9),))
        answer = await split.gateway.ask(split.asker.request(ids(9 * SIZE, 4)))
        assert answer.error is not None and answer.error.reason is Reason.INVALID_REQUEST
        await split.idle()


@given(st.lists(st.integers(0, 12), max_size=4), st.integers(1, 200))
def test_spans_follow_one_another_and_leave_a_token(ends: list[int], tokens: int) -> None:
    good = all(a < b for a, b in zip([0, *ends], ends, strict=False)) and (not ends or ends[-1] * SIZE < tokens)
    helpers = [Helper(worker(f"p{i}"), end) for i, end in enumerate(ends)]
    if good:
        require_spans(helpers, tokens, SIZE, MemberId("p"))
    else:
        with pytest.raises(InvalidRequest, match="helpers"):
            require_spans(helpers, tokens, SIZE, MemberId("p"))


def worker(name: str) -> WorkerRef:
    return WorkerRef(MemberId(name), Incarnation(1), NodeId("a"), "")


@pytest.mark.parametrize(
    ("names", "what"),
    [
        (["a", "p"], "p would compute several spans"),
        (["a", "b", "a"], "a would compute several spans"),
        ([f"h{i}" for i in range(MOST_IN_GROUP)], "16 of them and p are more than the 16 workers"),
        (["a"] * 100_000, "100000 of them"),
    ],
    ids=["itself", "twice", "one too many", "far too many"],
)
def test_a_group_has_each_worker_once_and_no_more_than_it_may(names: list[str], what: str) -> None:
    helpers = [Helper(worker(name), i + 1) for i, name in enumerate(names)]
    with pytest.raises(InvalidRequest, match=f"helpers: .*{what}"):
        require_spans(helpers, 10_000_000, SIZE, MemberId("p"))
    most = [Helper(worker(f"h{i}"), i + 1) for i in range(MOST_IN_GROUP - 1)]
    require_spans(most, 10_000_000, SIZE, MemberId("p"))


def test_one_pass_takes_the_whole_span_up_to_its_bound() -> None:
    planner = ChunkPlanner(queue_limit=9, age_ms=1_000, chunk_tokens=64, block_tokens=SIZE, span_tokens=256)
    planner.submit(("r", 1), 1_000, "a", 0.0)
    assert planner.next(0.0) == ("r", 1)
    planner.granted(("r", 1), 100)
    assert planner.chunk(("r", 1)).end == 160
    assert planner.chunk(("r", 1), tokens=16, one_pass=True).end == 352
    planner.computed(("r", 1), planner.chunk(("r", 1), one_pass=True))
    planner.computed(("r", 1), planner.chunk(("r", 1), one_pass=True))
    assert planner.chunk(("r", 1), one_pass=True).end == 864


@pytest.mark.parametrize(
    ("still_s", "since_first_s", "came", "worth"),
    [
        (4.9, 0.0, 0.0, True),
        (5.1, 0.0, 0.0, False),  # half of what computing takes
        (0.1, 1.0, 0.05, True),  # too few to tell
        (0.1, 2.4, 0.11, True),
        (0.1, 2.6, 0.11, False),  # 21 s more
        (0.1, 20.0, 0.9, True),
        (5.1, 20.0, 0.99, False),
    ],
)
def test_who_is_slower_than_computing_would_be_is_not_waited_for(
    still_s: float, since_first_s: float, came: float, worth: bool
) -> None:
    assert worth_waiting(still_s, since_first_s, came, 10.0, 20.0) == worth


def test_short_blocks_are_waited_for_a_moment_anyway() -> None:
    assert worth_waiting(1.9, 1.9, 0.5, 0.001, 0.002)
    assert not worth_waiting(2.1, 1.9, 0.5, 0.001, 0.002)
