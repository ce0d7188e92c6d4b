"""Where compiled kernels are kept, and where they are not."""

from __future__ import annotations

import importlib
import os
import shutil
import time
from pathlib import Path
from types import SimpleNamespace

import numba
import pytest

from moonpool.engine.kernel_cache import compiling, kept, kernel_folder, use_kernel_cache, what_to_wait_for
from moonpool.engine.tensor_parallel import awaiting


@pytest.fixture(autouse=True)
def _numba_goes_on_as_before(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", numba.config.CACHE_DIR)
    monkeypatch.setattr(numba.config, "DISABLE_JIT", numba.config.DISABLE_JIT)


def test_kernels_lie_in_a_folder_of_their_sources_that_only_the_user_may_write(tmp_path: Path) -> None:
    folder = use_kernel_cache(tmp_path)
    assert folder == kernel_folder(tmp_path) and str(folder) == numba.config.CACHE_DIR
    assert folder.stat().st_mode & 0o077 == 0


def test_a_first_start_says_what_it_waits_for_and_later_ones_say_nothing(tmp_path: Path) -> None:
    folder = use_kernel_cache(tmp_path)
    assert str(folder.parent) in what_to_wait_for()
    (folder / "step_1").mkdir()
    (folder / "step_1" / "step.run.nbi").touch()
    assert what_to_wait_for() == ""


def test_importing_what_ranks_meet_by_compiles_nothing(tmp_path: Path) -> None:
    """Every worker does, before it says what it waits for."""
    folder = use_kernel_cache(tmp_path)
    importlib.reload(awaiting)
    assert what_to_wait_for() != "" and not any(folder.glob("*/*"))


def test_where_kernels_cannot_be_kept_every_start_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    use_kernel_cache(tmp_path / "file")
    assert "at every start" in what_to_wait_for()


def test_kernels_of_former_sources_are_removed_once_they_are_old(tmp_path: Path) -> None:
    old, recent = tmp_path / "kernels" / "old", tmp_path / "kernels" / "recent"
    old.mkdir(parents=True)
    recent.mkdir()
    (tmp_path / "kernels").chmod(0o700)
    past = time.time() - 30 * 86_400
    os.utime(old, (past, past))
    use_kernel_cache(tmp_path)
    assert not old.exists() and recent.exists()


def test_a_folder_that_others_may_write_is_not_used(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels").chmod(0o777)
    folder = use_kernel_cache(tmp_path)
    assert tmp_path not in folder.parents and folder.is_dir()
    assert "may be written by others" in caplog.text


def test_a_kernel_that_was_cut_short_is_compiled_anew(tmp_path: Path) -> None:
    kernels = use_kernel_cache(tmp_path) / "step_1"
    kernels.mkdir()
    for name, content in (("whole.nbi", b"\x80\x04."), ("short.nbi", b"\x80\x04"), ("empty.nbc", b""), ("other", b"")):
        (kernels / name).write_bytes(content)
    use_kernel_cache(tmp_path)
    assert {file.name for file in kernels.iterdir()} == {"whole.nbi", "other"}


def _double(x: int) -> int:
    return 2 * x


def _started() -> bool:
    """Calls a kernel as a process does that has just begun; whether it was there already."""
    kernel = numba.njit(cache=True)(_double)
    assert kernel(21) == 42
    return bool(kernel.stats.cache_hits)


@pytest.mark.parametrize("suffix", [".nbi", ".nbc"])
def test_a_kernel_whose_bytes_have_changed_is_compiled_anew(suffix: str, tmp_path: Path) -> None:
    use_kernel_cache(tmp_path)
    with compiling():
        assert not _started()
    folder = use_kernel_cache(tmp_path)
    assert _started()
    (file,) = folder.glob(f"*/*{suffix}")
    raw, stat = bytearray(file.read_bytes()), file.stat()
    raw[len(raw) // 2] ^= 1
    file.write_bytes(raw)
    os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))  # as a disk loses a bit
    use_kernel_cache(tmp_path)
    assert not file.exists() and not _started()
    assert _started()


@pytest.mark.parametrize("note", ["", "[]", '{"x": 1}'])
def test_a_note_that_is_none_costs_no_kernel(note: str, tmp_path: Path) -> None:
    folder = use_kernel_cache(tmp_path)
    _started()
    (folder / ".digests").write_text(note)
    use_kernel_cache(tmp_path)
    assert _started()
    assert {path.name for path in folder.iterdir() if path.is_file()} == {".digests"}


def test_a_kernel_that_numba_wrote_anew_is_kept(tmp_path: Path) -> None:
    folder = use_kernel_cache(tmp_path)
    _started()
    use_kernel_cache(tmp_path)
    (index,) = folder.glob("*/*.nbi")
    raw = index.read_bytes()
    kernel = numba.njit(cache=True)(_double)
    assert kernel(0.5) == 1.0  # one more signature
    assert index.read_bytes() != raw
    use_kernel_cache(tmp_path)
    assert index.exists() and _started()


def test_a_full_disk_keeps_no_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=0))
    assert tmp_path not in use_kernel_cache(tmp_path).parents and not kept()


def test_one_process_compiles_at_a_time(tmp_path: Path) -> None:
    use_kernel_cache(tmp_path)
    with compiling():
        child = os.fork()
        if child == 0:  # only system calls from here on: the parent has threads
            import fcntl

            with (kernel_folder(tmp_path) / ".lock").open("w") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    os._exit(7)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7


def test_kernels_are_compiled_even_where_numba_is_told_not_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    use_kernel_cache(tmp_path)
    kernel = numba.njit(lambda x: 2 * x)
    assert kernel(21) == 42 and kernel.signatures
