"""Any small trace on any small cluster, whatever breaks: everybody is answered or told no, and nothing is left held."""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.sim_trace import conversations

from moonpool.scheduler.policies.make import make_policy
from moonpool.sim.cluster import DecodeCost, Fault, Group, Link, PrefillCost, SimCluster, SimModel, Ssd, TargetsS
from moonpool.sim.run import simulate

ROLES = ("prefill", "prefill", "decode", "decode", "both")
GENERATE = (Phase.explicit, Phase.reuse, Phase.generate)  # runs are too slow to be shrunk
NODES = ("p0", "p1", "d0", "d1", "b0")

SHARED = {"group": 3.0, "group_least_s": 0.2, "group_gain_s": 0.01, "group_share": 0.01, "group_soon": 1.0}  # whatever it costs


@st.composite
def clusters(draw: st.DrawFn) -> SimCluster:
    groups = [
        Group.model_validate(
            {
                "role": role,
                "count": 1,
                "pool_tokens": draw(st.sampled_from((512, 10_000, 60_000))),
                "ssd_tokens": draw(st.sampled_from((0, 60_000))),
                "device_tokens": draw(st.sampled_from((40_000, 200_000))),
            }
        )
        for role in (ROLES if draw(st.booleans()) else ROLES[:4])
    ]
    known = NODES[: len(groups)]
    faults = [
        Fault.model_validate({"kind": kind, "node": node, "at_s": at, "until_s": at + length})
        for kind, node, at, length in draw(
            st.lists(
                st.tuples(
                    st.sampled_from(("worker", "store", "node")), st.sampled_from(known), st.floats(0, 20), st.floats(0.1, 8)
                ),
                max_size=3,
            )
        )
    ]
    if draw(st.booleans()):
        faults.append(Fault(kind="link", node="p0", other=draw(st.sampled_from(known[1:])), at_s=2.0, until_s=9.0))
    return SimCluster(
        groups=tuple(groups),
        model=SimModel(name="any", layers=8, kv_bytes_per_token=32_768),
        prefill=PrefillCost(
            a=0.05,
            b=1e-4,
            c=1e-9,
            d=2e-6,
            chunk_tokens=draw(st.sampled_from((0, 1_000))),
            overlap=draw(st.booleans()),
            early=draw(st.booleans()),
        ),
        decode=DecodeCost(base_s=0.02, per_token_s=1e-7, max_batch=draw(st.sampled_from((2, 64))), chunk_tokens=1_500),
        link=Link(bytes_per_s=draw(st.sampled_from((3e8, 1e10))), latency_s=draw(st.sampled_from((0.0, 0.002)))),
        ssd=Ssd(read_bytes_per_s=4e8, write_bytes_per_s=4e8, write=draw(st.sampled_from(("through", "back")))),
        keep=draw(st.sampled_from(("prefill", "decode", "both"))),
        eviction=draw(st.sampled_from(("lru", "hazard"))),
        order=draw(st.sampled_from(("fifo", "shortest"))),
        targets=TargetsS(ttft_s=20.0, tbt_s=0.2, sent=draw(st.booleans())),
        faults=tuple(faults),
        max_attempts=6,
        budget_s=60.0,
        detect_s=draw(st.sampled_from((0.0, 0.7))),
        noise=draw(st.sampled_from((0.0, 0.2))),
    )


@settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow], phases=GENERATE)
@given(
    cluster=clusters(),
    policy=st.sampled_from(("moonpool", "shared", "algorithm1", "round_robin", "pooled_min_ttft")),
    seed=st.integers(0, 1_000),
    size=st.sampled_from((1_000, 6_000)),
)
def test_nothing_is_lost_and_nothing_is_left(cluster: SimCluster, policy: str, seed: int, size: int) -> None:
    rows = conversations(30, seed=seed, every_s=0.5, tokens=size, answers=40)
    chosen = make_policy("moonpool", SHARED) if policy == "shared" else make_policy(policy)
    outcome = simulate(rows, cluster, policy=chosen, seed=seed)
    assert {what: n for what, n in outcome.leaks.items() if n} == {}
    for result in outcome.requests:
        ends = (result.ended is not None, result.refused is not None, result.failed is not None)
        assert sum(ends) == 1, result
