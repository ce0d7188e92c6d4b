from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moonpool.cluster.launch.state import ClusterState, ProcessRecord, StateDir
from moonpool.core.errors import ConfigError


def sleeper(*code: str) -> subprocess.Popen[bytes]:
    child = subprocess.Popen(
        (sys.executable, "-c", "\n".join([*code, "print(flush=True)", "import time; time.sleep(60)"])), stdout=subprocess.PIPE
    )
    assert child.stdout is not None
    with child.stdout as out:
        out.readline()
    return child


def state_of(record: ProcessRecord) -> ClusterState:
    return ClusterState(record, "moonpool", "process", "127.0.0.1:1")


def test_a_running_cluster_is_read_back(tmp_path: Path) -> None:
    state = StateDir.create(tmp_path / "s")
    assert state.read() is None
    written = state_of(ProcessRecord.of(os.getpid()))
    state.write(written)
    assert state.read() == written
    state.clear()
    assert state.read() is None


def test_asking_about_a_cluster_that_never_ran_leaves_nothing_behind(tmp_path: Path) -> None:
    state = StateDir(tmp_path / "s")
    assert state.read() is None
    assert state.recorded() == {}
    assert state.end_leftovers() == []
    state.clear()
    assert not state.path.exists()


def test_what_a_dead_supervisor_left_is_not_believed(tmp_path: Path) -> None:
    state, child = StateDir.create(tmp_path / "s"), sleeper()
    state.write(state_of(ProcessRecord.of(child.pid)))
    assert state.read() is not None
    child.kill()
    child.wait()
    assert state.read() is None


def test_a_number_that_belongs_to_another_process_by_now_is_not_believed(tmp_path: Path) -> None:
    state = StateDir.create(tmp_path / "s")
    mine = ProcessRecord.of(os.getpid())
    state.write(state_of(ProcessRecord(mine.pid, mine.started - 100)))
    assert state.read() is None


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"supervisor": {"pid": 1}}', '{"supervisor": 3}', "\0"])
def test_a_damaged_state_file_counts_as_none(tmp_path: Path, text: str) -> None:
    state = StateDir.create(tmp_path / "s")
    (state.path / "cluster.json").write_text(text)
    assert state.read() is None


def test_leftovers_are_ended_even_where_they_do_not_listen_and_their_folder_goes(tmp_path: Path) -> None:
    state, kind = StateDir.create(tmp_path / "s"), sleeper()
    deaf = sleeper("import signal", "signal.signal(signal.SIGTERM, signal.SIG_IGN)")
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    state.record("kind", kind.pid)
    state.record("deaf", deaf.pid)
    state.keep_scratch(scratch)
    assert sorted(state.recorded()) == ["deaf", "kind"]
    assert state.end_leftovers(patience_s=0.5) == ["deaf", "kind"]
    assert (kind.wait(5), deaf.wait(5)) == (-15, -9)
    assert state.recorded() == {}
    assert not scratch.exists()


def test_a_folder_that_cannot_be_written_is_a_clear_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cluster\.state_dir"):
        StateDir.create(tmp_path / "file" / "s")
