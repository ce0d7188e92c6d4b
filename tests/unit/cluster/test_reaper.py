from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from moonpool.cluster.launch.reaper import reap_after


def owner_of(folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A process, and a region file that is called after it."""
    owner = subprocess.Popen((sys.executable, "-c", "import time; time.sleep(600)"))
    file = folder / f"moonpool+test+a+{owner.pid}+0"
    file.write_bytes(b"kv")
    return owner, file


def test_files_of_a_killed_owner_go_though_nobody_else_comes_by(tmp_path: Path) -> None:
    owner, file = owner_of(tmp_path)
    reaper = reap_after(owner.pid, tmp_path, zeroise=False)
    other, kept = owner_of(tmp_path)
    assert os.getsid(reaper.pid) == reaper.pid, "in a group of its own"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    until = time.monotonic() + 30
    while file.exists():
        assert time.monotonic() < until
        time.sleep(0.1)
    assert reaper.wait(30) == 0
    assert kept.exists()
    other.kill()
    other.wait()


def test_who_ends_in_order_ends_its_reaper(tmp_path: Path) -> None:
    owner, file = owner_of(tmp_path)
    reaper = reap_after(owner.pid, tmp_path, zeroise=False)
    reaper.terminate()
    assert reaper.wait(30) == -signal.SIGTERM
    assert file.exists()
    owner.kill()
    owner.wait()
