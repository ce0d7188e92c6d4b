"""A gate on the way to a port: it lets so many bytes through in each direction, then closes the connection or falls silent."""

from __future__ import annotations

import socket
import threading
from dataclasses import dataclass


@dataclass(frozen=True)
class Toll:
    """Of one connection. ``None``: everything passes. With ``silent`` it stays open when a limit is reached."""

    up: int | None = None  # bytes from who connects
    down: int | None = None  # bytes back
    silent: bool = False


class TollGate:
    """Connection i is treated as ``tolls[i]`` says; later ones pass freely. Closes everything at the end of ``with``."""

    def __init__(self, host: str, port: int, *tolls: Toll) -> None:
        self._to = (host, port)
        self._tolls = list(tolls)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._sockets: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self.port = int(self._listener.getsockname()[1])

    def __enter__(self) -> TollGate:
        self._threads[0].start()
        return self

    def __exit__(self, *_: object) -> None:
        for one in (self._listener, *self._sockets):
            _shut(one)
        for thread in self._threads:
            thread.join(5)
        for one in (self._listener, *self._sockets):
            one.close()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            toll = self._tolls.pop(0) if self._tolls else Toll()
            far = socket.create_connection(self._to)
            self._sockets += [near, far]
            for source, sink, limit in ((near, far, toll.up), (far, near, toll.down)):
                thread = threading.Thread(target=_pump, args=(source, sink, limit, toll.silent), daemon=True)
                self._threads.append(thread)
                thread.start()


def _pump(source: socket.socket, sink: socket.socket, limit: int | None, silent: bool) -> None:
    left = 1 << 60 if limit is None else limit
    try:
        while left and (data := source.recv(min(left, 1 << 20))):
            sink.sendall(data)
            left -= len(data)
    except OSError:
        pass
    if left or not silent:
        _shut(source)
        _shut(sink)


def _shut(one: socket.socket) -> None:
    try:
        one.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass
