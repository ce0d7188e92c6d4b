"""Conductors that stand for leadership in a real etcd."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.etcd_members import TIMING, eventually, member, members
from support.etcd_server import EtcdServer

from moonpool.cluster.leadership import Leadership
from moonpool.core.ids import Role


@pytest.fixture
def etcd(tmp_path: Path) -> Iterator[EtcdServer]:
    with EtcdServer(tmp_path / "etcd") as server:
        yield server


async def test_one_leads_until_it_leaves_nobody_while_etcd_is_away_and_terms_outlast_what_etcd_forgets(
    etcd: EtcdServer,
) -> None:
    async with members(etcd.registry, 2) as seen:
        standing = []
        for number, one in enumerate(seen):
            await one.peers.join(member(f"conductor-{number}", Role.CONDUCTOR))
            standing.append(Leadership(one.peers, TIMING))
        first, second = standing
        try:
            await eventually(lambda: first.term() or second.term())
            leads, follows = (first, second) if first.term() else (second, first)
            term = leads.term()
            await eventually(lambda: follows.leader() == leads.leader() != "")
            assert follows.term() == 0
            etcd.freeze()
            await eventually(lambda: not first.term() and not second.term())
            etcd.thaw()
            await eventually(lambda: first.term() or second.term())
            assert bool(first.term()) != bool(second.term())
            assert max(first.term(), second.term()) >= term
            leads, other = (first, seen[1]) if first.term() else (second, seen[0])
            await other.until(lambda: other.peers.terms.newest >= leads.term(), "the term is told to everybody")
            term = leads.term()
            etcd.kill()
            etcd.forget()
            etcd.start()
            await eventually(lambda: max(first.term(), second.term()) > term, 30.0)
            leads, follows = (first, second) if first.term() else (second, first)
            term, leaver = leads.term(), seen[0] if first.term() else seen[1]
            await leads.close()
            await leaver.peers.leave()
            await eventually(lambda: follows.term() > term)
        finally:
            await asyncio.gather(*(one.close() for one in standing))
