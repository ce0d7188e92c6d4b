"""Bound TCP sockets for the HTTP servers of a process."""

from __future__ import annotations

import socket


def listening_socket(host: str, port: int) -> socket.socket:
    """Bound here, not by the server, so that a busy port is our error and port 0 has a number at once. OSError: not bound."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # named, or asyncio leaves Nagle on
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError:
        listener.close()
        raise
    listener.setblocking(False)
    return listener
