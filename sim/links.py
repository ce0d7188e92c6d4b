"""Bytes between nodes: flows that share each NIC fairly, slow ones leaving what they do not use to the others.

A flow gets its max-min fair share of its sender's and its receiver's NIC (Bertsekas and Gallager, Data Networks, 6.5.2),
never more than its own cap: KV that is computed layer by layer leaves no faster than it comes to be.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from math import inf

from moonpool.sim.clock import Clock, Timer
from moonpool.sim.cluster import Link

REST_BYTES = 1e-3  # rounding: less than that is nothing


@dataclass(slots=True, eq=False)
class Flow:
    source: str
    target: str
    left: float  # bytes still to come
    cap: float
    done: Callable[[bool], None]
    number: int
    rate: float = 0.0
    since: float = 0.0
    timer: Timer | None = None
    over: bool = False
    fetch: bool = False  # between stores; else a hand-off
    held: bool = False  # more bytes will be added: reaching the end of those known is not the end


@dataclass(slots=True)
class Links:
    clock: Clock
    link: Link
    moved_bytes: float = 0.0
    resent_bytes: float = 0.0
    broken_flows: int = 0
    _flows: dict[int, Flow] = field(default_factory=dict)
    _by_port: dict[tuple[str, bool], dict[int, Flow]] = field(default_factory=dict)  # (node, is sender) -> flows
    _cut: set[frozenset[str]] = field(default_factory=set)
    _number: int = 0

    def __len__(self) -> int:
        return len(self._flows)

    def send(
        self,
        source: str,
        target: str,
        size: float,
        done: Callable[[bool], None],
        *,
        cap: float = inf,
        held: bool = False,
        fetch: bool = False,
    ) -> Flow:
        """``done(ok)`` once all bytes are there; at once, later in this instant, where source and target are one node."""
        again = size / (1.0 - self.link.loss)
        self.moved_bytes += size
        self.resent_bytes += again - size
        self._number += 1
        flow = Flow(source, target, again, cap, done, self._number, since=self.clock.now, fetch=fetch, held=held)
        if source == target:
            flow.left = 0.0
            if not held:
                self._end_after(flow, 0.0)
            return flow
        if frozenset((source, target)) in self._cut:
            self.broken_flows += 1
            self._end_after(flow, 0.0, ok=False)
            return flow
        self._flows[flow.number] = flow
        for port in _ports(flow):
            self._by_port.setdefault(port, {})[flow.number] = flow
        self._share(flow)
        return flow

    def release(self, flow: Flow, more: float) -> None:
        """``more`` bytes are the last ones, and the cap is gone."""
        if flow.over:
            return
        self.moved_bytes += more
        again = more / (1.0 - self.link.loss)
        self.resent_bytes += again - more
        flow.held, flow.cap = False, inf
        if flow.number not in self._flows:
            if flow.timer is None:
                self._end_after(flow, 0.0)
            return
        self._settle(flow)
        flow.left += again
        self._share(flow)

    def pace(self, flow: Flow, more: float, cap: float) -> None:
        """``more`` bytes come to be, at ``cap`` bytes per second; the flow goes on being held."""
        if flow.over or flow.number not in self._flows:
            return
        self.moved_bytes += more
        self._settle(flow)
        flow.left += more / (1.0 - self.link.loss)
        flow.cap = cap
        self._share(flow)

    def stop(self, flow: Flow) -> None:
        """Nobody wants it any more; ``done`` is not called."""
        if not flow.over:
            flow.over = True
            if flow.timer is not None:
                flow.timer.cancel()
            self._leave(flow)

    def cut(self, one: str, other: str) -> None:
        pair = frozenset((one, other))
        self._cut.add(pair)
        self._break(flow for flow in self._flows.values() if frozenset((flow.source, flow.target)) == pair)

    def mend(self, one: str, other: str) -> None:
        self._cut.discard(frozenset((one, other)))

    def break_off(self, node: str, *, fetches: bool) -> None:
        """A node's flows between stores, or its hand-offs, end without success."""
        self._break(flow for flow in self._flows.values() if node in (flow.source, flow.target) and flow.fetch is fetches)

    def _break(self, flows: Iterable[Flow]) -> None:
        for flow in list(flows):
            self.broken_flows += 1
            if flow.timer is not None:
                flow.timer.cancel()
            self._leave(flow)
            self._end_after(flow, 0.0, ok=False)

    def _end_after(self, flow: Flow, seconds: float, *, ok: bool = True) -> None:
        def end() -> None:
            flow.over = True
            flow.done(ok)

        flow.timer = self.clock.after(seconds, end)

    # -- shares --------------------------------------------------------------------------------------------------------

    def _settle(self, flow: Flow) -> None:
        flow.left = max(flow.left - flow.rate * (self.clock.now - flow.since), 0.0)
        flow.since = self.clock.now

    def _leave(self, flow: Flow) -> None:
        if self._flows.pop(flow.number, None) is None:
            return
        for port in _ports(flow):
            mine = self._by_port[port]
            del mine[flow.number]
        for port in _ports(flow):
            other = next(iter(self._by_port[port].values()), None)
            if other is not None:
                self._share(other)

    def _share(self, flow: Flow) -> None:
        """New rates for everybody who shares a NIC with ``flow``, with one of those, and so on."""
        together = self._neighbours(flow)
        for one, rate in zip(together, self._rates(together), strict=True):
            if rate != one.rate or one is flow:
                self._settle(one)
                one.rate = rate
                self._plan(one)

    def _neighbours(self, flow: Flow) -> list[Flow]:
        found = {flow.number: flow}
        seen: set[tuple[str, bool]] = set()
        todo = [flow]
        while todo:
            for port in _ports(todo.pop()):
                if port not in seen:
                    seen.add(port)
                    fresh = {number: one for number, one in self._by_port[port].items() if number not in found}
                    found |= fresh
                    todo.extend(fresh.values())
        return [found[number] for number in sorted(found)]

    def _rates(self, flows: list[Flow]) -> list[float]:
        """Progressive filling: the tightest port or cap fixes its flows, the rest share what is left."""
        full = self.link.bytes_per_s
        if len(flows) == 1:
            return [min(full, flows[0].cap)]
        room: dict[tuple[str, bool], float] = {}
        users: dict[tuple[str, bool], int] = {}
        for flow in flows:
            for port in _ports(flow):
                room[port] = full
                users[port] = users.get(port, 0) + 1
        rates = dict.fromkeys((flow.number for flow in flows), 0.0)
        open_ = list(flows)
        while open_:
            limits = [min(flow.cap, *(room[port] / users[port] for port in _ports(flow))) for flow in open_]
            least = min(limits)
            fixed = [flow for flow, limit in zip(open_, limits, strict=True) if limit <= least * (1 + 1e-12)]
            for flow in fixed:
                rates[flow.number] = least
                for port in _ports(flow):
                    room[port] = max(room[port] - least, 0.0)
                    users[port] -= 1
            gone = {flow.number for flow in fixed}
            open_ = [flow for flow in open_ if flow.number not in gone]
        return [rates[flow.number] for flow in flows]

    def _plan(self, flow: Flow) -> None:
        if flow.timer is not None:
            flow.timer.cancel()
            flow.timer = None
        if flow.held:
            return
        if flow.left <= REST_BYTES:
            flow.timer = self.clock.after(self.link.latency_s, lambda: self._arrived(flow))
        elif flow.rate > 0.0:
            flow.timer = self.clock.after(flow.left / flow.rate + self.link.latency_s, lambda: self._arrived(flow))

    def _arrived(self, flow: Flow) -> None:
        self._settle(flow)
        flow.over = True
        self._leave(flow)
        flow.done(True)


def _ports(flow: Flow) -> tuple[tuple[str, bool], tuple[str, bool]]:
    return (flow.source, True), (flow.target, False)
