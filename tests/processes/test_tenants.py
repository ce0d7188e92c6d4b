"""Tenants on a live cluster: whose KV is used for whom, in device pages and in the pool, and how much of it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest
from support.cluster import Answer, LocalCluster, complete, running

from moonpool.cluster.gateway.tenants.file import edit_book, mint
from moonpool.wire import pb

pytestmark = [pytest.mark.processes, pytest.mark.timeout(300)]

NODES = [{"name": "a", "prefill": 1}, {"name": "b", "decode": 1, "conductor": 1, "gateway": 1}]
BLOCK, QUANTUM = 16, 64
POOL_BYTES = 1 << 20
TENANTS: dict[str, dict[str, object]] = {
    "one": {},
    "two": {"pool_bytes": POOL_BYTES},
    "eu-1": {"region": "eu"},
    "eu-2": {"region": "eu"},
}


class Served:
    def __init__(self, cluster: LocalCluster, tokens: dict[str, str]) -> None:
        self.cluster, self._tokens = cluster, tokens
        self._draw = random.Random(3)

    def prompt(self, length: int) -> list[int]:
        return [self._draw.randrange(128) for _ in range(length)]

    async def ask(self, who: str, prompt: list[int], **body: object) -> Answer:
        headers = {"authorization": f"Bearer {self._tokens[who]}"}
        async with self.cluster.client() as client:
            answer = await complete(client, prompt, 4, headers=headers, **body)
        assert answer.status == 200, answer.body
        return answer

    async def hit(self, who: str, prompt: list[int], where: str) -> Answer:
        """The first answer that used cached blocks; from the pool they may come too late to be of use, once or twice."""
        for _ in range(5):
            if where == "pool":
                self.cluster.clear_device_pages("prefill-0", "decode-0")
            answer = await self.ask(who, prompt)
            if answer.cached:
                return answer
        raise AssertionError(f"{who} never had a hit in {where}")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("tenants")
    keys, tokens = [], {}
    for name in TENANTS:
        kept, tokens[name] = mint()
        keys.append({"name": name, "tenant": name, **kept})
    edit_book(folder / "keys.toml", lambda book: {"keys": keys, "tenants": TENANTS})
    settings = {
        "model__dtype": "float32",
        "engine__poison": True,
        "engine__block_tokens": BLOCK,
        "engine__page_bytes": 8 << 20,
        "store__pool_bytes": 32 << 20,
        "store__region_bytes": 8 << 20,
        "security__api_keys_file": str(folder / "keys.toml"),
        "security__min_hit_tokens": QUANTUM,
    }
    with running(LocalCluster(folder, tiny_model, NODES, **settings)) as cluster:
        yield Served(cluster, tokens)
        cluster.assert_idle()


@pytest.mark.parametrize("where", ["device pages", "pool"])
async def test_the_same_prompt_of_another_tenant_is_no_hit_but_in_one_region(served: Served, where: str) -> None:
    prompt = served.prompt(20 * BLOCK + 1)
    first = {who: await served.ask(who, prompt) for who in ("one", "eu-1")}
    assert {answer.cached for answer in first.values()} == {0}
    if where == "pool":
        served.cluster.clear_device_pages("prefill-0", "decode-0")
    other = await served.ask("two", prompt)
    assert (other.cached, other.ids) == (0, first["one"].ids)
    assert (await served.ask("one", prompt, cache_salt="mine")).cached == 0
    for who in ("one", "eu-2"):
        again = await served.hit(who, prompt, where)
        assert again.ids == first["one"].ids
        if where == "device pages":
            assert again.cached == 20 * BLOCK


@pytest.mark.parametrize("where", ["device pages", "pool"])
async def test_a_prober_learns_a_prefix_in_whole_quanta_only(served: Served, where: str) -> None:
    secret = served.prompt(10 * BLOCK + 1)
    await served.ask("eu-1", secret)
    for known, cached in ((3 * BLOCK, 0), (4 * BLOCK, QUANTUM), (7 * BLOCK, QUANTUM), (10 * BLOCK, 2 * QUANTUM)):
        guess = secret[:known] + served.prompt(12 * BLOCK + 1 - known)
        if where == "device pages":
            assert (await served.ask("eu-2", guess)).cached == cached, known
            continue
        served.cluster.clear_device_pages("prefill-0", "decode-0")
        assert (await served.ask("eu-2", guess)).cached <= cached, known  # less where it came late


async def test_a_tenant_fills_no_more_of_a_pool_than_the_file_allows(served: Served) -> None:
    for _ in range(12):  # of about 160 KiB each
        await served.ask("two", served.prompt(40 * BLOCK))
    for node in ("store-a", "store-b"):
        with grpc.insecure_channel(served.cluster.member(node).address) as channel:
            told = pb.store_admin_rpc.StoreAdminStub(channel).Quotas(pb.types.Empty(), timeout=5)
        (two,) = [one for one in told.tenants if one.tenant == "two"]
        assert two.quota == POOL_BYTES
        assert two.used <= POOL_BYTES
    assert two.used > POOL_BYTES // 2
