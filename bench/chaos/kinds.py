"""The kinds of faults that a run knows: what each is, how long it holds, and what the machine must allow. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from moonpool.core.errors import ConfigError
from moonpool.core.ids import Role


class Need(StrEnum):
    """What a kind needs beside the right to signal its own processes; where it is missing the kind is skipped and says so."""

    NETWORK = "network namespaces, veth and bridge (root)"
    DISK = "a small file system of its own (root)"
    COMPILER = "a C compiler"


SILENT_MS, KILL_MS = 1_000, 5_000  # timing.silent_after_ms and timing.kill_after_ms of the cluster that is struck
ROLES = (Role.PREFILL, Role.DECODE, Role.STORE, Role.CONDUCTOR, Role.GATEWAY)
REGISTRY = "registry"


@dataclass(frozen=True, slots=True)
class Kind:
    """``what`` names the fault's class, ``role`` whom it strikes (empty: whoever the draw says)."""

    name: str
    what: str
    hold_s: tuple[float, float]
    says: str
    role: str = ""
    peer: str = ""  # of cuts: the other end
    need: Need | None = None


def _stops() -> list[Kind]:
    kinds = [Kind(f"kill-{role}", "kill", (0.0, 0.0), f"SIGKILL of a {role}", role) for role in ROLES]
    kinds.append(Kind("kill-registry", "kill", (1.0, 3.0), "SIGKILL of the registry, started again after the hold", REGISTRY))
    for role in (*ROLES, REGISTRY):
        kinds.append(Kind(f"pause-{role}", "stop", (0.4, 0.7), f"SIGSTOP of a {role}, shorter than silent_after_ms", role))
        kinds.append(Kind(f"freeze-{role}", "stop", (1.4, 2.4), f"SIGSTOP of a {role}, longer than silent_after_ms", role))
    for role in ROLES:
        kinds.append(Kind(f"hang-{role}", "hang", (9.0, 9.0), f"SIGSTOP of a {role}, longer than kill_after_ms", role))
    return kinds


def _cuts() -> list[Kind]:
    pairs = (
        (Role.GATEWAY, Role.DECODE),
        (Role.GATEWAY, Role.CONDUCTOR),
        (Role.DECODE, Role.PREFILL),
        (Role.PREFILL, Role.STORE),
        (Role.STORE, Role.STORE),
    )
    kinds = [
        Kind(f"cut-{one}-{two}", "cut", (2.0, 8.0), f"nothing passes between a {one} and a {two}", one, two, Need.NETWORK)
        for one, two in pairs
    ]
    kinds.append(
        Kind("cut-registry", "cut", (2.0, 4.0), "nothing passes between a process and the registry", "", REGISTRY, Need.NETWORK)
    )
    kinds.append(Kind("isolate", "isolate", (2.0, 4.0), "a process's cable is pulled: nothing passes", need=Need.NETWORK))
    return kinds


KINDS: tuple[Kind, ...] = (
    *_stops(),
    *_cuts(),
    Kind("delay", "slices", (2.0, 3.0), "a process runs in slices of 50 ms between stops of 50 ms"),
    Kind("flip-slots", "flip_slots", (1.0, 1.0), "bits of a store node's slots change under it", Role.STORE),
    Kind("flip-ssd", "flip_ssd", (0.0, 0.0), "bits of a store node's SSD files change under it", Role.STORE),
    Kind("full-disk", "full_disk", (2.0, 4.0), "the SSD tier's file system has no byte left", Role.STORE, need=Need.DISK),
    Kind("clock-forward", "clock", (2.0, 4.0), "one process's wall clock goes forward", need=Need.COMPILER),
    Kind("clock-back", "clock", (2.0, 4.0), "one process's wall clock goes back", need=Need.COMPILER),
)
SHORT = ("kill-prefill", "kill-decode", "freeze-prefill", "pause-gateway", "flip-slots", "flip-ssd")
_BY_NAME = {kind.name: kind for kind in KINDS}


def chosen(names: Sequence[str]) -> tuple[Kind, ...]:
    """The kinds of these names (``kill`` stands for every ``kill-...``), each once; all of them for none. ConfigError."""
    if not names:
        return KINDS
    found: dict[str, Kind] = {}
    for name in names:
        matches = [kind for kind in KINDS if kind.name == name or kind.name.startswith(f"{name}-")]
        if not matches:
            raise ConfigError(
                f"--kinds: {name!r} is no kind of fault; `moonpool chaos --list` shows them: {', '.join(_BY_NAME)}",
                param="--kinds",
            )
        found |= {kind.name: kind for kind in matches}
    return tuple(found.values())
