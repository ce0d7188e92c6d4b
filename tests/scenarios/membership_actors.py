"""What lines of membership scenarios mean: the embedded registry with the lives it knows, and a cluster kept in etcd."""

from __future__ import annotations

import re
from collections.abc import Callable

from moonpool.cluster.election import Election, Lead, Tenure
from moonpool.cluster.etcd.address import EtcdAddress
from moonpool.cluster.etcd.book import Book, Item
from moonpool.cluster.etcd.records import encode, over
from moonpool.cluster.etcd.standing import stand
from moonpool.cluster.roster import Fenced, Roster
from moonpool.core.errors import InvalidRequest, LayoutMismatch
from moonpool.core.ids import Incarnation, MemberId, NodeId, Role, newer_than
from moonpool.core.membership import PROTOCOL, Liveness, Member, MemberChange
from moonpool.core.terms import Terms

NAME = r"([a-z]+-[a-z0-9]+)"


def member(name: str, life: int, protocol: int = PROTOCOL) -> Member:
    return Member(MemberId(name), Role(name.split("-")[0]), NodeId("a"), Incarnation(life), "h:1", 1, protocol=protocol)


def words(change: MemberChange) -> str:
    return f"{change.member.id} life {change.member.incarnation} {change.liveness.value}" + (
        f": {change.proof}" if change.proof else ""
    )


def who(said: Lead) -> str:
    return f"{said.leader} leads in term {said.term}" if said.leader else f"nobody leads; {said.term} was the newest term"


class RegistryActor:
    """``silent=MS lease=MS wall=N``: the registry, its members' wall clock, and one store node that is asked to act.

    ``at``: time passes, swept as it should; ``frozen until``: without.
    """

    def __init__(self, silent: int = 1000, lease: int = 2000, wall: int = 100) -> None:
        self._silent_s, self._lease_s, self._wall, self._now = silent / 1e3, lease / 1e3, wall, 0.0
        self._roster, self._election = Roster(self._silent_s), Election(self._lease_s, -self._lease_s)
        self._kept: dict[str, Incarnation] = {}  # newest life, in the state folder of each name
        self._tenures: dict[str, Tenure] = {}
        self._answers: dict[str, tuple[Lead, float]] = {}  # on their way
        self._known: dict[str, int] = {}
        self._store = Terms()

    def state(self) -> str:
        known = [f"{c.member.id}/{c.member.incarnation} {c.liveness.value}" for c in self._roster.snapshot()]
        leading = [f"{name} leads in term {term}" for name in self._tenures if (term := self._term(name))]
        return "; ".join([f"{1e3 * self._now:.0f}", ", ".join(known) or "nobody", *leading])

    def tell(self, fact: str) -> list[str]:
        for pattern, act in self._facts().items():
            if found := re.fullmatch(pattern, fact):
                try:
                    return act(*found.groups())
                except Fenced as e:
                    return [f"fenced{', for another took the name' if e.replaced else ''}: {e}"]
                except (LayoutMismatch, InvalidRequest) as e:
                    return [f"refused: {e.message}"]
        raise ValueError(f"no such fact: {fact}")

    def _facts(self) -> dict[str, Callable[..., list[str]]]:
        return {
            r"at (\d+)": self._passes,
            r"frozen until (\d+)": self._frozen,
            r"comes back empty": self._emptied,
            rf"{NAME} joins as life (\d+)(?: of protocol (\d+))?": self._joins,
            rf"{NAME} starts": self._starts,
            r"wall clock ([+-]\d+)": self._steps,
            rf"{NAME} life (\d+) beats": self._beats,
            rf"session of {NAME} life (\d+) breaks": self._breaks,
            rf"{NAME} life (\d+) is gone: (.+)": self._gone,
            rf"{NAME} asks to lead": self._asks,
            rf"{NAME} hears": self._hears,
            rf"{NAME} asks the store in term (\d+)": self._acts,
        }

    @staticmethod
    def _told(changes: list[MemberChange]) -> list[str]:
        return [words(change) for change in changes]

    def _passes(self, until: str) -> list[str]:
        said: list[str] = []
        while self._now < int(until) / 1e3 - 1e-9:
            self._now = round(min(self._now + 0.1, int(until) / 1e3), 3)
            said += self._told(self._roster.sweep(self._now))
        return said

    def _frozen(self, until: str) -> list[str]:
        self._now = int(until) / 1e3
        return []

    def _emptied(self) -> list[str]:
        self._roster, self._election = Roster(self._silent_s), Election(self._lease_s, self._now)
        return []

    def _joins(self, name: str, life: str, protocol: str | None = None) -> list[str]:
        joining = member(name, int(life), int(protocol or PROTOCOL))
        said = self._told(self._roster.join(joining, self._now))
        self._kept[name] = joining.incarnation
        return said

    def _starts(self, name: str) -> list[str]:
        self._kept[name] = newer_than(self._wall, self._kept.get(name, Incarnation(0)))
        return self._joins(name, str(self._kept[name]))

    def _steps(self, by: str) -> list[str]:
        self._wall += int(by)
        return []

    def _beats(self, name: str, life: str) -> list[str]:
        self._roster.beat(MemberId(name), Incarnation(int(life)), self._now)
        return []

    def _breaks(self, name: str, life: str) -> list[str]:
        return self._told(self._roster.broken(MemberId(name), Incarnation(int(life)), self._now))

    def _gone(self, name: str, life: str, proof: str) -> list[str]:
        self._election.ended(MemberId(name), Incarnation(int(life)))
        self._tenures.pop(name, None)
        return self._told(self._roster.gone(MemberId(name), Incarnation(int(life)), proof))

    def _term(self, name: str) -> int:
        return self._tenures[name].term(self._kept.get(name), self._now)

    def _asks(self, name: str) -> list[str]:
        self._tenures.setdefault(name, Tenure())
        said = self._election.ask(MemberId(name), self._kept[name], self._known.get(name, 0), self._term(name), self._now)
        self._answers[name] = (said, self._now)
        return [who(said) + (f", its lease is {1e3 * said.lease_s:.0f}" if said.lease_s else "")]

    def _hears(self, name: str) -> list[str]:
        said, asked_at = self._answers[name]
        self._tenures[name].told(said, asked_at)
        self._known[name] = max(self._known.get(name, 0), said.term)
        return []

    def _acts(self, name: str, term: str) -> list[str]:
        self._store.check(int(term))
        return [f"done for {name}"]


class EtcdActor:
    """Keys in etcd, one watcher's book of them, and conductors that stand. Each line is one or more revisions."""

    def __init__(self) -> None:
        self._address = EtcdAddress.parse("etcd://h:1/moonpool/test")
        self._book, self._keys, self._revision = Book(self._address), dict[bytes, Item](), 0
        self._known: dict[str, int] = {}
        self._lives: dict[str, int] = {}
        self._watching = True

    def state(self) -> str:
        beating = sorted(
            key.removeprefix(self._address.beats).decode() for key in self._keys if key.startswith(self._address.beats)
        )
        return f"revision {self._revision}; with a lease: {', '.join(beating) or 'nobody'}"

    def tell(self, fact: str) -> list[str]:
        facts: dict[str, Callable[..., list[str]]] = {
            rf"{NAME} registers as life (\d+)": self._registers,
            rf"lease of {NAME} lapses": self._lapses,
            r"judged": self._judged,
            rf"{NAME} leaves": lambda name: self._ends(name, Liveness.GONE, "left"),
            r"cut off": self._cut_off,
            r"read again": self._read_again,
            r"comes back empty": self._emptied,
            rf"{NAME} stands": self._stands,
        }
        for pattern, act in facts.items():
            if found := re.fullmatch(pattern, fact):
                return act(*found.groups())
        raise ValueError(f"no such fact: {fact}")

    def _write(self, *changes: tuple[bytes, bytes | None]) -> list[str]:
        self._revision += 1
        said: list[MemberChange] = []
        for key, value in changes:
            item = Item(key, value, self._revision)
            if value is None:
                self._keys.pop(key, None)
            else:
                self._keys[key] = item
            if self._watching:
                said += self._book.event(item)
        return [words(change) for change in said]

    def _registers(self, name: str, life: str) -> list[str]:
        self._lives[name] = int(life)
        change = MemberChange(member(name, int(life)), Liveness.LIVE)
        return self._write((self._address.life(MemberId(name)), encode(change)), (self._address.beat(MemberId(name)), b"1"))

    def _lapses(self, name: str) -> list[str]:
        leading = self._keys.get(self._address.leader(""))
        gone: list[tuple[bytes, bytes | None]] = [(self._address.beat(MemberId(name)), None)]
        if leading is not None and name.encode() in (leading.value or b""):
            gone.append((self._address.leader(""), None))
        return self._write(*gone)

    def _ends(self, name: str, liveness: Liveness, proof: str) -> list[str]:
        ended = over(member(name, self._lives[name]), liveness, proof)
        return self._write((self._address.life(MemberId(name)), encode(ended)), (self._address.beat(MemberId(name)), None))

    def _judged(self) -> list[str]:
        said = []
        for verdict in self._book.verdicts():
            name = verdict.change.member.id
            beat: list[tuple[bytes, bytes | None]] = [] if verdict.lapsed else [(self._address.beat(name), None)]
            said += self._write((self._address.life(name), encode(verdict.change)), *beat)
        return said

    def _cut_off(self) -> list[str]:
        self._watching = False
        return []

    def _read_again(self) -> list[str]:
        self._watching = True
        return [words(change) for change in self._book.restart(list(self._keys.values()), self._revision)]

    def _emptied(self) -> list[str]:
        self._keys.clear()
        self._revision, self._watching = 1, False
        return []

    def _stands(self, name: str) -> list[str]:
        leader, newest = self._keys.get(self._address.leader("")), self._keys.get(self._address.term)
        found = stand(self._address, member(name, self._lives[name]), max(self._known.values(), default=0), leader, newest)
        if not isinstance(found, Lead):
            self._write((self._address.leader(""), found.leader), (self._address.term, found.newest))
            found = Lead(MemberId(name), Incarnation(self._lives[name]), found.term, 0.0)
        self._known[name] = found.term
        return [who(found)]
