"""A library user's connection to the store node of its host: frames over its unix socket, regions through the mapping.

Blocking; one thread at a time. The connection is the session: when it ends, so do pins and reservations.
"""

from __future__ import annotations

import errno
import itertools
import os
import socket
import stat
import struct
from pathlib import Path

from moonpool.core.errors import ConfigError, InvalidRequest, PeerSilent, TransferFailed
from moonpool.kvstore.regions import map_region
from moonpool.wire import host_frames as frames
from moonpool.wire.host_frames import Head, Hello, Kind

CALL_S = 10  # an answer that takes longer means a frozen node
SOCKET_SUFFIX = ".store.sock"
AGENT_SUFFIX = ".agent.sock"
UNFIT = (errno.EPROTOTYPE, errno.EACCES, None)  # another kind of socket, another user's, a path too long for one


def find_socket(path: str | os.PathLike[str]) -> Path:
    """``path`` itself, or the one store socket in the state folder ``path``; ``~`` is the home folder.

    ConfigError, with what to do, where there is none, or several.
    """
    try:
        here = Path(path).expanduser()
        if not os.fspath(path):  # of which Path makes the current folder
            raise ValueError("it is empty")
        mode = here.stat().st_mode
        if stat.S_ISSOCK(mode):
            if here.name.endswith(AGENT_SUFFIX):
                raise ValueError("it is the socket of the host's agent")
            return here.resolve()  # it may be a link in a folder whose name is too long for a socket
        if not stat.S_ISDIR(mode):
            raise ValueError("it is neither a socket nor a folder")
        found = sorted(here.glob(f"*{SOCKET_SUFFIX}"))
    except (TypeError, ValueError, RuntimeError, OSError) as e:
        why = e.strerror if isinstance(e, OSError) else e
        raise ConfigError(
            f"path: {path!r}: {why}; give the socket that `moonpool store serve` prints, or its state folder", param="path"
        ) from e
    if len(found) == 1:
        return found[0].resolve()
    several = ", ".join(one.name for one in found)
    raise ConfigError(
        f"path: {here} has {len(found)} store sockets ({several}); name one"
        if found
        else f"path: {here} has no *{SOCKET_SUFFIX}; start a node with `moonpool store serve`, or name its socket",
        param="path",
    )


LOOKS = 60  # at about a microsecond each, before the thread sleeps


class HostLink:
    """Made by ``open``. Every call raises PeerSilent once the connection is over."""

    def __init__(self, path: Path, connection: socket.socket) -> None:
        self.path = path
        self.regions: dict[int, memoryview] = {}
        self.region_sizes: list[int] = []
        self.welcome: frames.Welcome
        self.over: PeerSilent | None = None
        self._socket = connection
        self._numbers = itertools.count(1)
        self._buffer = bytearray(frames.MAX_FRAME_BYTES)
        self._view = memoryview(self._buffer)
        self._pid = os.getpid()
        self.waiting = 0  # answers that are still to come

    @classmethod
    def open(cls, path: Path, client: int, tenant: str) -> HostLink:
        """Connects, says hello and maps the regions. PeerSilent where nobody listens or answers; ConfigError: it never will."""
        connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC)
        link = cls(path, connection)
        try:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", CALL_S, 0))
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", CALL_S, 0))
            connection.connect(str(path))
            head, frame = link.ask(frames.encode_hello(link.number(), Hello(client, tenant)))
            link.welcome = frames.decode_welcome(frame)
            while len(link.regions) < link.welcome.regions:
                head, frame = link.ask(frames.encode_regions_from(link.number(), len(link.regions)))
                regions = frames.decode_regions(frame, head.items)
                if not regions:
                    raise TransferFailed(f"the store node at {path} names fewer regions than it has")
                link.regions |= {region.number: map_region(region).data for region in regions}
            link.region_sizes = [len(one) for one in link.regions.values()]
        except OSError as e:
            link.close()
            if e.errno in UNFIT:
                raise ConfigError(
                    f"path: {path}: {e.strerror or e}; give the socket that `moonpool store serve` prints, or its state folder",
                    param="path",
                ) from e
            raise PeerSilent(f"no store node answers at {path}: {e.strerror or e}", peer=str(path)) from e
        except BaseException:
            link.close()
            raise
        return link

    def number(self) -> int:
        """For the next request that wants an answer."""
        return next(self._numbers)

    def send(self, frame: bytes) -> None:
        if self.over is not None:
            raise PeerSilent(self.over.message, peer=str(self.path))
        if self._pid != os.getpid():
            raise InvalidRequest("client: it was opened before this process was forked; open another one here", param="client")
        try:
            self._socket.send(frame)
        except OSError as e:
            raise self._broken(str(e.strerror or e)) from e
        self.waiting += frames.wants_answer(frame)

    def receive(self) -> tuple[Head, memoryview]:
        """The next answer; the view is good until the next call. Raises the error that the node answered."""
        if self.over is not None:
            raise PeerSilent(self.over.message, peer=str(self.path))
        try:
            size = self._look() or self._socket.recv_into(self._buffer)
        except BlockingIOError as e:
            raise self._broken(f"no answer within {CALL_S} s") from e
        except OSError as e:
            raise self._broken(str(e.strerror or e)) from e
        if not size:
            raise self._broken("it ended the connection")
        frame = self._view[:size]
        self.waiting -= 1
        head = frames.head(frame)
        if head.kind is Kind.ERROR:
            raise frames.decode_error(frame)
        return head, frame

    def _look(self) -> int:
        """Bytes of an answer that comes at once; 0: wait for it. Being woken costs more than most answers take."""
        for _ in range(LOOKS):
            try:
                return self._socket.recv_into(self._buffer, 0, socket.MSG_DONTWAIT)
            except BlockingIOError:
                continue
        return 0

    def ask(self, frame: bytes) -> tuple[Head, memoryview]:
        self.send(frame)
        return self.receive()

    def memory(self, region: int, offset: int, size: int) -> memoryview:
        """The mapped region, checked to hold ``size`` bytes at ``offset``."""
        view = self.regions.get(region)
        if view is None or not 0 <= offset <= len(view) - size:
            raise TransferFailed(f"{size} bytes at offset {offset} of region {region} are not in any mapped region")
        return view

    def _broken(self, why: str) -> PeerSilent:
        self.close(f"the connection with the store node at {self.path} is over: {why}")
        return PeerSilent(self.over.message if self.over else why, peer=str(self.path))

    def close(self, why: str = "") -> None:
        """Again is a no-op. Views that others still hold keep their region mapped."""
        if self.over is None:
            self.over = PeerSilent(why or f"the connection with the store node at {self.path} was closed")
            self._socket.close()
            self.regions.clear()
