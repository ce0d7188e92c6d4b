"""The process of a rank: its end. It ends when rank 0 says so, when the line to it ends, and with whoever started it.

That is settled before anything is imported that takes long.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys

_PR_SET_PDEATHSIG = 1
EXIT_LEFT = 1  # rank 0 is gone, or does not answer


def main(fd: int, parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    for number in (signal.SIGINT, signal.SIGTERM):  # of a terminal or a control group: rank 0 ends in order, and ends this one
        signal.signal(number, signal.SIG_IGN)
    if os.getppid() != parent:
        sys.exit(EXIT_LEFT)
    from moonpool.engine.tensor_parallel.meeting import Parted
    from moonpool.engine.tensor_parallel.rank import live

    try:
        live(socket.socket(fileno=fd))
    except (EOFError, ConnectionError, Parted):
        sys.exit(EXIT_LEFT)
    sys.stderr.flush()
    os._exit(0)  # everything is put away; what an interpreter does at its end takes time in which rank 0 waits


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
