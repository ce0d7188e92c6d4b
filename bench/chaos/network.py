"""A network namespace for every member, joined by one bridge, so that any link can be cut while all run on one machine.

A holder process keeps each namespace: it dies with the process that made it, and nothing is left behind. A link is cut by
giving each end a hardware address for the other that nobody has: packets are lost without a word, as on a cut cable. Where
this is not allowed (no root) every member lives on loopback and cuts are skipped.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass

from moonpool.core.errors import ConfigError

NET = "10.213.0"
OURS = f"{NET}.254"  # registry and clients
LOOPBACK = "127.0.0.1"
NOBODY = "02:00:00:00:00:fe"
CLONE_NEWNS, CLONE_NEWNET = 0x00020000, 0x40000000
PR_SET_PDEATHSIG = 1
TOOLS = ("ip", "nsenter", "unshare", "mount")
TRIAL = "ip link add chaos type bridge && ip link add v1 type veth peer name v2"


def why_not() -> str:
    """Why namespaces cannot be made here; empty where they can."""
    if os.geteuid() != 0:
        return "needs root"
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        return f"needs {', '.join(missing)}"
    tried = subprocess.run(["unshare", "--net", "--mount", "sh", "-c", TRIAL], capture_output=True, text=True)
    return f"not allowed here: {tried.stderr.strip()[:200]}" if tried.returncode else ""


def die_with_parent(number: int = signal.SIGKILL) -> None:
    """For ``preexec_fn``."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, number)


@dataclass(slots=True)
class _Place:
    holder: subprocess.Popen[bytes]
    address: str


class Network:
    """Call ``enter`` first, in the main thread: it moves this process, and threads begun later, into namespaces of its own."""

    def __init__(self, members: Sequence[str]) -> None:
        self._members = members
        self._places: dict[str, _Place] = {}

    def enter(self) -> None:
        """ConfigError where the kernel does not allow it."""
        if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNS | CLONE_NEWNET):
            raise ConfigError(f"chaos: cannot make namespaces: {os.strerror(ctypes.get_errno())}", param="chaos")
        _ip("link set lo up")
        subprocess.run(["mount", "--make-rprivate", "/"], check=True)
        _ip("link add chaos type bridge")
        _ip(f"addr add {OURS}/24 dev chaos")
        _ip("link set chaos up")
        for number, member in enumerate(self._members, start=1):
            self._places[member] = self._join(number)

    def _join(self, number: int) -> _Place:
        holder = subprocess.Popen(
            ["unshare", "--net", "sh", "-c", "echo up; exec sleep 1000000"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            preexec_fn=die_with_parent,
        )
        assert holder.stdout is not None
        holder.stdout.readline()
        address = f"{NET}.{number}"
        _ip(f"link add v{number} type veth peer name eth0 netns {holder.pid}")
        _ip(f"link set v{number} master chaos up")
        for words in ("link set lo up", f"addr add {address}/24 dev eth0", "link set eth0 up"):
            _ip(words, holder.pid)
        return _Place(holder, address)

    def address(self, member: str) -> str:
        return self._places[member].address if member in self._places else OURS

    def into(self, member: str) -> list[str]:
        """The beginning of a command that runs in the member's namespace."""
        return ["nsenter", f"--net=/proc/{self._places[member].holder.pid}/ns/net"]

    def cut(self, one: str, other: str) -> None:
        """Either may be ``registry``, which is where clients are, too: a member cut off from it reaches no client."""
        for here, there in ((one, other), (other, one)):
            self._neigh(here, f"replace {self.address(there)} lladdr {NOBODY} nud permanent")

    def mend(self, one: str, other: str) -> None:
        for here, there in ((one, other), (other, one)):
            self._neigh(here, f"del {self.address(there)}")

    def _neigh(self, member: str, words: str) -> None:
        place = self._places.get(member)
        device = "chaos" if place is None else "eth0"
        _ip(f"neigh {words} dev {device}", None if place is None else place.holder.pid)

    def pull(self, member: str) -> None:
        _ip(f"link set v{self._members.index(member) + 1} nomaster")

    def plug(self, member: str) -> None:
        _ip(f"link set v{self._members.index(member) + 1} master chaos")

    def close(self) -> None:
        for place in self._places.values():
            place.holder.kill()
            place.holder.wait()
            if place.holder.stdout:
                place.holder.stdout.close()
        self._places.clear()


def _ip(words: str, holder: int | None = None) -> None:
    command = ["ip", *words.split()]
    if holder is not None:
        command = ["nsenter", f"--net=/proc/{holder}/ns/net", *command]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise ConfigError(f"chaos: `{' '.join(command)}`: {done.stderr.strip()}", param="chaos")
