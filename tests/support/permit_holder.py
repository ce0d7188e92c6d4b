"""Takes a host's compute permit, says so, and holds it until a line comes: ``python permit_holder.py FOLDER``."""

from __future__ import annotations

import sys
from pathlib import Path

from moonpool.engine.permit import SharedPrompts

if __name__ == "__main__":
    turns = SharedPrompts(Path(sys.argv[1]))
    with turns.turn(60.0):
        print("held", flush=True)
        sys.stdin.readline()
    print("free", flush=True)
    turns.close()
