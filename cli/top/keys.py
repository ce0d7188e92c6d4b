"""Single keys of a terminal, read without waiting for a line; the terminal is as it was afterwards."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

QUIT = (b"q", b"Q", b"\x1b", b"\x03")


@contextmanager
def quit_key(quit: asyncio.Event) -> Iterator[None]:
    """Sets ``quit`` at q, Esc or Ctrl-C. Nothing happens where standard input is no terminal."""
    if not sys.stdin.isatty():
        yield
        return
    loop, fd = asyncio.get_running_loop(), sys.stdin.fileno()
    before = termios.tcgetattr(fd)

    def pressed() -> None:
        said = os.read(fd, 64)
        if not said or said[:1] in QUIT:
            quit.set()

    tty.setcbreak(fd)
    loop.add_reader(fd, pressed)
    try:
        yield
    finally:
        loop.remove_reader(fd)
        termios.tcsetattr(fd, termios.TCSADRAIN, before)
