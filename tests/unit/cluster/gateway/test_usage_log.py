"""The usage log by itself: files begun anew, disks that are full, several writers."""

from __future__ import annotations

import json
import os
import resource
import signal
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

from moonpool.cluster.gateway.usage_log import UsageLine, UsageLog

LINE = UsageLine("2026-11-30T00:00:00.000+00:00", "req-0", "t", "m", "chat", "ok", 10, 4, 2, 1, 1, 5.0, 9.0, "gateway-0")


def line(number: int) -> UsageLine:
    return replace(LINE, id=f"req-{number}")


def ids(*files: Path) -> list[str]:
    return [json.loads(text)["id"] for file in files for text in file.read_text().splitlines()]


def until(true: Callable[[], object], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_a_full_file_is_begun_anew_and_the_newest_full_ones_stay(tmp_path: Path) -> None:
    path = tmp_path / "folder" / "usage.jsonl"
    size = len(json.dumps(asdict(line(10)), separators=(",", ":"))) + 1
    log = UsageLog(path, limit=4 * size, keep=2)
    for number in range(10, 60):
        log.add(line(number))
        until(lambda done=number - 9: log.written == done)  # type: ignore[misc]
    log.close()
    files = [path.with_name("usage.jsonl.2"), path.with_name("usage.jsonl.1"), path]
    assert sorted(path.parent.iterdir()) == sorted(files)
    kept = ids(*files)
    assert kept == [f"req-{n}" for n in range(60 - len(kept), 60)]
    assert all(file.stat().st_size <= 4 * size for file in files)
    assert path.stat().st_mode & 0o007 == 0, "others may not read who asked how much"


def test_a_full_disk_costs_lines_that_are_counted_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    path.symlink_to("/dev/full")
    log = UsageLog(path, limit=1 << 20, keep=1)
    log.add(line(1))
    until(lambda: log.dropped == 1)
    path.unlink()  # there is room again
    log.add(line(2))
    until(lambda: log.written == 1)
    log.close()
    assert ids(path) == ["req-2"]
    assert log.dropped == 1


def test_half_a_line_is_taken_back(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path, limit=1 << 20, keep=1)
    log.add(line(1))
    until(lambda: log.written == 1)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 10, before[1]))
    try:
        log.add(line(2))
        until(lambda: log.dropped == 1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, ignored)
    log.add(line(3))
    until(lambda: log.written == 2)
    log.close()
    assert ids(path) == ["req-1", "req-3"]


def test_more_lines_than_the_queue_holds_are_dropped_and_counted(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    os.mkfifo(path)  # opening it for appending waits for nobody, writing into it does once it is full
    log = UsageLog(path, limit=1 << 30, keep=1, queued=4)
    for number in range(5_000):
        log.add(line(number))
    assert log.dropped >= 1
    began = time.monotonic()
    reader = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    while log.written + log.dropped < 5_000 and time.monotonic() < began + 5:
        try:
            os.read(reader, 1 << 20)
        except BlockingIOError:
            time.sleep(0.005)
    log.close()
    os.close(reader)


def test_two_gateways_write_one_file_and_neither_loses_a_line_when_it_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    logs = [UsageLog(path, limit=20_000, keep=100) for _ in range(2)]
    for number in range(400):
        for which, log in enumerate(logs):
            log.add(line(1_000 * which + number))
        if number % 40 == 0:
            until(lambda done=number: all(log.written > done for log in logs))  # type: ignore[misc]
    for log in logs:
        log.close()
    files = list(tmp_path.iterdir())
    assert len(files) > 3
    assert sorted(ids(*files)) == sorted(f"req-{1_000 * which + number}" for which in range(2) for number in range(400))
    assert [log.dropped for log in logs] == [0, 0]


def test_logrotate_may_move_the_file_away(tmp_path: Path) -> None:
    path = tmp_path / "usage.jsonl"
    log = UsageLog(path, limit=1 << 20, keep=1)
    log.add(line(1))
    until(lambda: log.written == 1)
    path.rename(tmp_path / "usage-yesterday.jsonl")
    log.add(line(2))
    until(lambda: log.written == 2)
    log.close()
    assert ids(path) == ["req-2"]
