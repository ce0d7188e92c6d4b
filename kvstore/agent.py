"""The host's agent: it holds a pidfd of every local worker, proves deaths with them, and kills on demand.

A worker sends its own pidfd over the node's unix socket (mode 0600, same user, one fixed frame). Whoever holds a pidfd
can neither mistake a reused process number for the process nor miss its end. Where PID namespaces differ the descriptor
still proves death, but the kernel refuses the signal.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import struct
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import structlog

from moonpool.core.errors import ConfigError, InvalidRequest, MoonpoolError, TransferFailed
from moonpool.kvstore.claims import Life
from moonpool.wire.frames import HAND_OVER_BYTES, decode_hand_over, encode_hand_over

PATH_LIMIT = 107  # sockaddr_un holds 108 bytes, the last one zero
HAND_OVER_S = 5.0
BACKLOG = 64
_CREDENTIALS = struct.Struct("3i")  # struct ucred: pid, uid, gid
_OK = b"\1"
log = structlog.get_logger(__name__)


def socket_path(folder: Path, node: str, what: str = "agent") -> Path:
    """Where ``what`` of ``node`` listens: in ``folder``, or in a private folder with a short name if that is too long."""
    path = folder / f"{node}.{what}.sock"
    if len(os.fsencode(path)) <= PATH_LIMIT:
        return path
    short = hashlib.blake2b(os.fsencode(path), digest_size=8).hexdigest()
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()) / f"moonpool-{os.geteuid()}" / f"{short}.sock"


def listen(path: Path) -> tuple[socket.socket, int]:
    """A listener for messages from this user's processes, and the inode of ``path``. A socket left there is replaced."""
    private_folder(path.parent)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        path.chmod(0o600)  # nobody can connect before listen()
        inode = path.stat().st_ino
        listener.listen(BACKLOG)
    except OSError as e:
        listener.close()
        raise ConfigError(f"cluster.state_dir: cannot listen on {path}: {e.strerror}", param="cluster.state_dir") from e
    return listener, inode


def stop_listening(listener: socket.socket, path: Path, inode: int) -> None:
    listener.close()
    with suppress(OSError):
        if path.stat().st_ino == inode:  # else: a newer life listens there
            path.unlink()


def caller_of(connection: socket.socket) -> int:
    """The process at the other end (0: in another PID namespace). InvalidRequest where it is another user's."""
    size = _CREDENTIALS.size
    pid, uid, _ = _CREDENTIALS.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))
    if uid != os.geteuid():
        raise InvalidRequest(f"process {pid} belongs to user {uid}, not to {os.geteuid()}")
    return int(pid)


def private_folder(folder: Path) -> None:
    """Make ``folder``, or check that nobody but this user can put files into it. ConfigError where that is not so."""
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        found = folder.stat()
    except OSError as e:
        raise ConfigError(
            f"cluster.state_dir: cannot make {folder}: {e.strerror}; name another folder", param="cluster.state_dir"
        ) from e
    if found.st_uid != os.geteuid() or found.st_mode & 0o022:
        raise ConfigError(
            f"cluster.state_dir: {folder} can be written by others; `chmod go-w` it or name another folder",
            param="cluster.state_dir",
        )


class Agent:
    """Event-loop only. ``whose`` names the life of a session (None: no such session); ``on_dead`` hears of proved deaths.

    ``on_moved_on`` hears of lives whose process was seen to go on as another life of the same name.
    """

    def __init__(
        self,
        path: Path,
        whose: Callable[[int], Life | None],
        on_dead: Callable[[Life], None],
        on_moved_on: Callable[[Life], None] = lambda life: None,
    ) -> None:
        self.path = path
        self._on_moved_on = on_moved_on
        self.refused = 0  # hand-overs that were malformed or came from somebody else
        self._whose = whose
        self._on_dead = on_dead
        self._pidfds: dict[Life, int] = {}
        self._pids: dict[Life, int] = {}  # for telling lives of one process apart; 0: in another PID namespace
        self._callers: set[socket.socket] = set()
        self._listener: socket.socket | None = None
        self._inode = 0

    @property
    def watched(self) -> int:
        return len(self._pidfds)

    def knows(self, life: Life) -> bool:
        """Whether a pidfd of ``life`` is held: then only that proves its death."""
        return life in self._pidfds

    def is_process(self, life: Life, pid: int) -> bool:
        """Whether ``life`` is (or was) one of the process ``pid``."""
        return self._pids.get(life) == pid

    def lives(self) -> set[Life]:
        return set(self._pidfds)

    def forget(self, life: Life) -> None:
        """Watch a life no longer: its process goes on as another life."""
        pidfd = self._pidfds.pop(life, None)
        if pidfd is not None:
            del self._pids[life]
            asyncio.get_running_loop().remove_reader(pidfd)
            os.close(pidfd)

    def start(self) -> None:
        """Listen. A socket left by an earlier life of this node is replaced."""
        self._listener, self._inode = listen(self.path)
        asyncio.get_running_loop().add_reader(self._listener, self._accept)

    def watch(self, life: Life, pid: int, pidfd: int) -> None:
        """Hear of the end of the process ``pid``, which ``life`` is one of. The descriptor is ours from now on."""
        self._pidfds[life], self._pids[life] = pidfd, pid
        asyncio.get_running_loop().add_reader(pidfd, self._died, life)

    def kill(self, life: Life) -> bool:
        """SIGKILL. False where its pidfd is not held or the kernel refuses (it is in another PID namespace)."""
        pidfd = self._pidfds.get(life)
        if pidfd is None:
            return False
        try:
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            return True  # dead already: its pidfd is about to say so
        except OSError as e:
            log.warning("cannot_kill", member=life.member, error=str(e))
            return False
        return True

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        for caller in list(self._callers):
            self._hang_up(caller)
        for life in self.lives():
            self.forget(life)
        if self._listener is not None:
            loop.remove_reader(self._listener)
            stop_listening(self._listener, self.path, self._inode)
            self._listener = None

    def _accept(self) -> None:
        if self._listener is None:
            return
        try:
            caller, _ = self._listener.accept()
        except OSError:
            return
        caller.setblocking(False)
        if len(self._callers) >= BACKLOG:
            self.refused += 1
            caller.close()
            return
        self._callers.add(caller)
        loop = asyncio.get_running_loop()
        loop.add_reader(caller, self._receive, caller)
        loop.call_later(HAND_OVER_S, self._hang_up, caller)

    def _hang_up(self, caller: socket.socket) -> None:
        if caller in self._callers:
            self._callers.discard(caller)
            asyncio.get_running_loop().remove_reader(caller)
            caller.close()

    def _receive(self, caller: socket.socket) -> None:
        fds: list[int] = []
        try:
            frame, fds, _, _ = socket.recv_fds(caller, HAND_OVER_BYTES + 1, 4)
            self._take(caller, frame, fds)
            caller.send(_OK)
        except BlockingIOError:
            return
        except (OSError, MoonpoolError) as e:
            self.refused += 1
            log.warning("hand_over_refused", error=str(e))
        finally:
            for fd in fds:
                os.close(fd)
        self._hang_up(caller)

    def _take(self, caller: socket.socket, frame: bytes, fds: list[int]) -> None:
        """Watch the one descriptor in ``fds`` (taken out of the list) as the process of the session that ``frame`` names."""
        pid = caller_of(caller)
        life = self._whose(decode_hand_over(frame))
        if life is None or len(fds) != 1:
            raise InvalidRequest(f"process {pid}: {len(fds)} descriptors, session {'unknown' if life is None else 'known'}")
        if _pid_of(fds[0]) != pid:
            raise InvalidRequest(f"process {pid}: the descriptor is not its own pidfd")
        if life in self._pidfds:
            return  # a session made anew by the same process
        self._let_former_lives_go(life, fds[0])
        self.watch(life, pid, fds.pop())

    def _let_former_lives_go(self, life: Life, pidfd: int) -> None:
        """Where PID namespaces differ, numbers do not tell that a process went on as ``life``; its descriptors do."""
        for former in [one for one in self._pidfds if one.member == life.member and one.incarnation < life.incarnation]:
            if _same_process(self._pidfds[former], pidfd):
                self.forget(former)
                self._on_moved_on(former)

    def _died(self, life: Life) -> None:
        self.forget(life)
        self._on_dead(life)


def _pid_of(fd: int) -> int | None:
    """The process a pidfd stands for, in this PID namespace (0: it is in another one); None if ``fd`` is no pidfd."""
    if not os.readlink(f"/proc/self/fd/{fd}").startswith(("anon_inode:[pidfd]", "pidfd:")):
        return None
    for line in Path(f"/proc/self/fdinfo/{fd}").read_text().splitlines():
        if line.startswith("Pid:"):
            return int(line.split()[1])
    return None


def _same_process(one: int, other: int) -> bool:
    """Whether two pidfds stand for one process. False, too, where this kernel does not number them (before 6.9)."""
    own = os.pidfd_open(os.getpid())
    try:
        numbered = os.fstat(own).st_ino != os.fstat(other).st_ino
    finally:
        os.close(own)
    return numbered and os.path.samestat(os.fstat(one), os.fstat(other))


def hand_over(path: str, session: int) -> None:
    """A worker's side: send our own pidfd to the agent at ``path`` and wait for its answer. Blocks: call it in a thread.

    TransferFailed where the agent refuses or does not answer; ConfigError where this system has no pidfds.
    """
    try:
        pidfd = os.pidfd_open(os.getpid())
    except (AttributeError, OSError) as e:
        raise ConfigError(f"this system has no process descriptors ({e}); Linux 5.3 or newer is needed") from e
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC) as agent:
            agent.settimeout(HAND_OVER_S)
            agent.connect(path)
            socket.send_fds(agent, [encode_hand_over(session)], [pidfd])
            if agent.recv(1) != _OK:
                raise TransferFailed(f"the agent at {path} refused this process's descriptor")
    except OSError as e:
        raise TransferFailed(f"the agent at {path} cannot be reached: {e}") from e
    finally:
        os.close(pidfd)
