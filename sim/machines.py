"""The machines of a cluster: they start, break, come back, and change their role."""

from __future__ import annotations

from dataclasses import replace

from moonpool.core.errors import Failure, Reason
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role
from moonpool.core.membership import Liveness, Member, MemberChange
from moonpool.sim.attempt import Try
from moonpool.sim.cluster import Fault, Group
from moonpool.sim.decode_node import DecodeNode
from moonpool.sim.gateway import Gateway
from moonpool.sim.prefill_node import PrefillNode
from moonpool.sim.site import Site
from moonpool.sim.store_node import StoreNode

LOOK_S = 0.25  # how often a worker that drains is looked at


class Machines:
    def __init__(self, site: Site, gateway: Gateway) -> None:
        self.prefills: dict[MemberId, PrefillNode] = {}
        self.decodes: dict[MemberId, DecodeNode] = {}
        self._site = site
        self._gateway = gateway
        self._lives = 0
        self._switching: set[MemberId] = set()

    def start(self) -> None:
        """All of them, then their faults at their times."""
        for name, group in self._site.cluster.nodes.items():
            self._start_store(name)
            self._start_worker(name, Role(group.role))
        for fault in self._site.cluster.faults:
            self._plan(fault)

    def _plan(self, fault: Fault) -> None:
        self._site.clock.at(fault.at_s, lambda: self._break(fault))
        if fault.until_s is not None:
            self._site.clock.at(fault.until_s, lambda: self._mend(fault))

    @property
    def workers(self) -> list[PrefillNode | DecodeNode]:
        return [*self.prefills.values(), *self.decodes.values()]

    # -- lives ---------------------------------------------------------------------------------------------------------

    def _life(self) -> Incarnation:
        self._lives += 1
        return Incarnation(self._lives)

    def _start_store(self, name: str) -> None:
        site = self._site
        store = StoreNode(name, self._life(), self._group(name), site.cluster, site.clock, site.teller.tell)
        site.stores[NodeId(name)] = store
        site.teller.tell(MemberChange(store.member, Liveness.LIVE))

    def _group(self, name: str) -> Group:
        return self._site.cluster.nodes[name]

    def _start_worker(self, name: str, role: Role) -> None:
        group, model = self._group(name), self._site.cluster.model
        member = Member(
            worker_of(name, group),
            role,
            NodeId(name),
            self._life(),
            f"{name}:2",
            0,
            layout=model.layout(model.layers),
            max_context=model.max_context,
            max_prompt=group.device_tokens // model.block_tokens * model.block_tokens - 1,
        )
        if role is Role.PREFILL:
            node = self.prefills[member.id] = self._site.prefillers[member.id] = PrefillNode(self._site, member, group)
            self._site.decoders[member.id] = node.receiver
        else:
            decoder = self.decodes[member.id] = DecodeNode(self._site, member, group)
            self._site.decoders[member.id] = self._gateway.decoders[member.id] = decoder
        self._site.teller.tell(MemberChange(member, Liveness.LIVE))

    def _forget(self, worker: MemberId) -> None:
        self.prefills.pop(worker, None)
        self.decodes.pop(worker, None)
        self._gateway.decoders.pop(worker, None)

    # -- faults --------------------------------------------------------------------------------------------------------

    def _break(self, fault: Fault) -> None:
        if fault.kind == "link":
            self._site.links.cut(fault.node, fault.other)
            return
        if fault.kind in ("worker", "node"):
            self._kill_worker(worker_of(fault.node, self._group(fault.node)))
        if fault.kind in ("store", "node"):
            self._kill_store(NodeId(fault.node))

    def _mend(self, fault: Fault) -> None:
        if fault.kind == "link":
            self._site.links.mend(fault.node, fault.other)
            return
        name, group = fault.node, self._group(fault.node)
        if fault.kind in ("store", "node") and not self._site.stores[NodeId(name)].alive:
            self._start_store(name)
        known = [node.member.id for node in self.workers]
        if fault.kind in ("worker", "node") and worker_of(name, group) not in known:
            self._start_worker(name, Role(group.role))

    def _kill_worker(self, worker: MemberId) -> None:
        """Its work is lost now; the cluster knows of it, and begins the attempts anew, a little later."""
        node = self.prefills.get(worker) or self.decodes.get(worker)
        if node is None:
            return
        lost = node.die()
        self._forget(worker)
        failure = Failure(Reason.PEER_SILENT, f"{worker} is gone", worker)

        def noticed() -> None:
            self._site.teller.tell(MemberChange(node.member, Liveness.GONE, "the process has ended"))
            for attempt in lost:
                self._lose(attempt, failure, prefill=isinstance(node, PrefillNode))

        self._site.clock.after(self._site.cluster.detect_s, noticed)

    def _lose(self, attempt: Try, failure: Failure, *, prefill: bool) -> None:
        if prefill:
            self._site.decoders[attempt.placement.decode.id].writer_gone(attempt, failure)
            self._cancel(attempt.before, failure)
            return
        self._cancel(attempt, failure)
        self._gateway.failed(attempt, failure)

    def _cancel(self, attempt: Try | None, failure: Failure) -> None:
        prefiller = None if attempt is None else self._site.prefillers.get(attempt.placement.prefill.id)
        if attempt is not None and prefiller is not None and prefiller.alive:
            prefiller.cancel(attempt, failure)

    def _kill_store(self, node: NodeId) -> None:
        store = self._site.stores[node]
        if not store.alive:
            return
        store.stop()
        self._site.links.break_off(node, fetches=True)
        if self._site.cluster.keep != "prefill":
            self._site.links.break_off(node, fetches=False)  # hand-offs land in stores
        gone = MemberChange(store.member, Liveness.GONE, "the process has ended")
        self._site.clock.after(self._site.cluster.detect_s, lambda: self._site.teller.tell(gone))

    # -- roles ---------------------------------------------------------------------------------------------------------

    def switch(self, worker: MemberId, role: Role) -> None:
        """Given no new work, drained, away for a while, back as a new life in ``role``. Unknown or leaving: nothing."""
        node = self.prefills.get(worker) or self.decodes.get(worker)
        if node is None or worker in self._switching or node.member.role is role or role not in (Role.PREFILL, Role.DECODE):
            self._site.counters["switches_ignored"] += 1
            return
        self._site.counters["switches"] += 1
        self._switching.add(worker)
        self._site.teller.tell(MemberChange(replace(node.member, ready=False), Liveness.LIVE))
        self._drain(node, role)

    def _drain(self, node: PrefillNode | DecodeNode, role: Role) -> None:
        clock, member = self._site.clock, node.member
        if not node.alive:
            self._switching.discard(member.id)
        elif not node.idle:
            clock.after(LOOK_S, lambda: self._drain(node, role))
        else:
            node.alive = False
            self._forget(member.id)
            self._site.teller.tell(MemberChange(member, Liveness.GONE, f"switches to {role}"))
            clock.after(self._site.cluster.switch_s, lambda: self._return(member, role))

    def _return(self, member: Member, role: Role) -> None:
        self._switching.discard(member.id)
        self._start_worker(member.node, role)


def worker_of(name: str, group: Group) -> MemberId:
    """Of a node: a word about where it began, since its role may change."""
    return MemberId(f"{group.role}-{name}")
