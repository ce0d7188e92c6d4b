"""Region files of a store node that is killed together with everybody who would remove them: a Ray job that was not let end.

A shell waits for its process and then runs this module, so that waiting costs next to no memory.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from moonpool.kvstore.regions import reclaim

WAIT = 'while kill -0 "$0" 2>/dev/null; do sleep 1; done; exec "$@"'


def reap_after(pid: int, directory: Path, *, zeroise: bool) -> subprocess.Popen[bytes]:
    """Once ``pid`` has ended, files in ``directory`` whose owner is dead are removed. Who ends in order terminates it."""
    here = (sys.executable, "-m", "moonpool.cluster.launch.reaper", str(directory), *(["zeroise"] if zeroise else []))
    return subprocess.Popen(
        ("sh", "-c", WAIT, str(pid), *here),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,  # Ray kills the group of a worker
    )


if __name__ == "__main__":
    reclaim(Path(sys.argv[1]), zeroise="zeroise" in sys.argv[2:])
