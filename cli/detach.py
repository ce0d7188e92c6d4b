"""``moonpool up --detach``: the same command in the background; returns when the cluster is ready or has failed."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from moonpool.cli.options import say, verb

if TYPE_CHECKING:
    from moonpool.cluster.launch.state import StateDir

POLL_S = 0.2


def behind(argv: list[str]) -> tuple[str, ...]:
    """The command that runs in the background for ``argv``."""
    rest = [word for word in argv[1:] if word != "--detach"]
    return (sys.executable, "-m", "moonpool.cli.main", *rest, "--detached")


def start_detached(state: StateDir, argv: list[str]) -> int:
    """Runs ``argv`` again without ``--detach``, showing its progress; the exit code is 0 once it is ready."""
    log = state.path / "logs" / "up.log"
    with log.open("w", encoding="utf-8") as out:
        child = subprocess.Popen(
            behind(argv),
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    shown = 0
    try:
        while True:
            code = child.poll()
            shown = _show(log, shown)
            if code is not None:
                return code or 1  # it was to stay
            running = state.read()
            if running is not None and running.phase == "ready" and running.supervisor.pid == child.pid:
                _show(log, shown)
                say(f"detached (process {child.pid}, output in {log}); {verb('down', running.name)} stops it")
                return 0
            time.sleep(POLL_S)
    except KeyboardInterrupt:
        child.terminate()
        child.wait()
        return 130


def _show(log: Path, shown: int) -> int:
    """Prints what ``log`` holds past byte ``shown``, whole lines; returns the new position."""
    with log.open("rb") as f:
        f.seek(shown)
        text = f.read()
    whole = text[: text.rfind(b"\n") + 1]
    sys.stderr.write(whole.decode(errors="replace"))
    sys.stderr.flush()
    return shown + len(whole)
