"""What stands in the logs: which request, in which form, and how much of it is kept."""

from __future__ import annotations

import io
import json
import logging
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
import structlog
from structlog.contextvars import bound_contextvars

from moonpool.cluster.logs import OLDER, BoundedFile, Stream, log_path, open_log
from moonpool.cluster.probe import ended
from moonpool.cluster.probe.ended import EndedLives
from moonpool.core.config import ObserveConfig
from moonpool.core.ids import Role
from moonpool.core.lifetime import Instant, Lifetime, Lives


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(ended, "_log", structlog.get_logger())  # one that was used keeps the file that it had
    root, own = logging.getLogger(), logging.getLogger("moonpool")
    before = root.handlers[:], root.level, own.level
    yield
    for handler in root.handlers:
        if isinstance(handler, logging.StreamHandler) and isinstance(handler.stream, BoundedFile):
            handler.stream.close()
    root.handlers[:], root.level = before[0], before[1]
    own.setLevel(before[2])
    structlog.reset_defaults()


def lines(folder: Path, member: str = "m") -> list[str]:
    return log_path(folder, member).read_text().splitlines()


def test_every_line_of_a_request_names_it_whoever_writes_it(tmp_path: Path) -> None:
    log = open_log(tmp_path, "m")
    with bound_contextvars(request="req-1", attempt=2):
        log.info("ours", secret=None)
        logging.getLogger("moonpool.prefill_worker.runner").info("the job waits: %s", "no pages")
        logging.getLogger("elsewhere").warning("a library's")
    log.info("between requests")
    told = [json.loads(line) for line in lines(tmp_path)]
    assert [(one["event"], one.get("request"), one.get("attempt")) for one in told] == [
        ("ours", "req-1", 2),
        ("the job waits: no pages", "req-1", 2),
        ("a library's", "req-1", 2),
        ("between requests", None, None),
    ]
    assert all(one["timestamp"].endswith("Z") and one["level"] for one in told)


def test_lines_that_are_sorted_are_in_order_of_time(tmp_path: Path) -> None:
    log = open_log(tmp_path, "m")
    log.info("first", request="req-1")
    log.info("second", attempt=1)
    logging.getLogger("moonpool.elsewhere").warning("third")
    told = lines(tmp_path)
    assert all(line.startswith('{"timestamp": "') for line in told)
    assert [json.loads(line)["event"] for line in sorted(told)] == ["first", "second", "third"]


@pytest.mark.parametrize(("level", "wanted"), [("info", 2), ("warning", 1), ("error", 0)])
def test_less_severe_lines_are_left_out(tmp_path: Path, level: str, wanted: int) -> None:
    log = open_log(tmp_path, "m", ObserveConfig.model_validate({"log_level": level}))
    log.info("info")
    log.warning("warning")
    assert len(lines(tmp_path)) == wanted


def test_logfmt_is_a_line_of_words(tmp_path: Path) -> None:
    open_log(tmp_path, "m", ObserveConfig(log_format="logfmt")).info("request over", request="req-1", ttft_s=0.25, bad=None)
    (line,) = lines(tmp_path)
    assert line.startswith("timestamp=") and 'event="request over"' in line and line.endswith("request=req-1 ttft_s=0.25 bad=")


def test_lines_to_standard_error_leave_no_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    open_log(tmp_path, "m", ObserveConfig(log_to="stderr")).info("here")
    assert json.loads(capsys.readouterr().err)["event"] == "here"
    assert not log_path(tmp_path, "m").exists()


def test_a_file_that_is_full_is_begun_anew_and_only_the_one_before_it_is_kept(tmp_path: Path) -> None:
    file = BoundedFile(tmp_path / "logs" / "m.log", 100)
    for i in range(60):
        file.write(f"line {i:04}\n")
    file.close()
    kept = [*(tmp_path / "logs" / f"m.log{OLDER}").read_text().splitlines(), *lines(tmp_path)]
    assert kept == [f"line {i:04}" for i in range(60 - len(kept), 60)] and 10 <= len(kept) <= 20
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["m.log", f"m.log{OLDER}"]


def test_a_disk_that_takes_nothing_costs_lines_and_no_request(tmp_path: Path) -> None:
    full = Path("/dev/full")
    if not full.exists():
        pytest.skip("no /dev/full here")
    file = BoundedFile(full, 1 << 20)
    file.write("x\n")
    file.flush()
    file.close()
    assert file.lost


@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE, Role.BOTH, Role.CONDUCTOR, Role.STORE])
def test_a_life_that_ends_is_a_line_unless_nobody_wants_it(role: Role, tmp_path: Path) -> None:
    open_log(tmp_path, "m")
    for wanted in (True, False):
        lives = Lives()
        EndedLives(lambda: role, log_each=wanted).follow(lives)
        lives.add("req-1", 3, Lifetime({Instant.QUEUED: 1.0, Instant.FINISHED: 3.5}, {"outcome": "ok", "cached_tokens": 7}))
    (line,) = (json.loads(line) for line in lines(tmp_path))
    assert (line["request"], line["attempt"], line["outcome"], line["cached_tokens"], line["seconds"]) == (
        "req-1",
        3,
        "ok",
        7,
        2.5,
    )


def test_what_cannot_be_told_of_a_life_ends_nothing(tmp_path: Path) -> None:
    open_log(tmp_path, "m")

    class Broken:
        def ended(self, role: Role, request: str, attempt: int, life: Lifetime) -> None:
            raise RuntimeError("the collector is odd")

    lives = Lives()
    telling = EndedLives(lambda: Role.PREFILL)
    telling.traces = Broken()
    telling.follow(lives)
    for _ in range(20):
        lives.add("req-1", 1, Lifetime({Instant.QUEUED: 1.0, Instant.PREFILL_BEGUN: 3.5}))
    assert (telling.errors, len(lives)) == (20, 20)
    assert len(lines(tmp_path)) == 2, "the first and the tenth"
    text = next(iter(telling.registry.collect())).samples
    assert any(sample.name.endswith("_count") and sample.labels == {"step": "queue"} and sample.value == 20 for sample in text)


HOSTILE = "a\nlevel=info event=forged\r\u2028\u0085\x1b[2J\ud800"


@pytest.mark.parametrize("form", ["json", "logfmt"])
def test_what_others_name_themselves_begins_no_line_of_its_own(tmp_path: Path, form: str) -> None:
    log = open_log(tmp_path, "m", ObserveConfig.model_validate({"log_format": form}))
    log.warning("refused", tenant=HOSTILE)
    logging.getLogger("elsewhere").warning("about %s", HOSTILE)
    text = log_path(tmp_path, "m").read_text()
    assert len(text.splitlines()) == text.count("\n") == 2
    assert all(line.isprintable() for line in text.splitlines())


def test_a_log_s_folder_that_is_removed_costs_nobody_an_error_and_comes_back(tmp_path: Path) -> None:
    folder = tmp_path / "state"
    log = open_log(folder, "m", ObserveConfig(log_bytes=1 << 16))
    log.warning("x" * (1 << 16))
    shutil.rmtree(folder)
    folder.write_text("in the way")
    log.warning("nowhere to put it")
    folder.unlink()
    log.warning("there again")
    assert [json.loads(line)["event"] for line in lines(folder)] == ["there again"]


class Gone(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError

    def flush(self) -> None:
        raise BrokenPipeError


@pytest.mark.parametrize("file", [Gone(), io.StringIO()])
def test_standard_error_that_is_closed_or_has_no_reader_costs_lines_only(file: io.StringIO) -> None:
    if not isinstance(file, Gone):
        file.close()
    stream = Stream(file)
    log = structlog.WriteLogger(stream)  # type: ignore[arg-type]  # it writes and flushes
    log.warning("nobody reads this")
    assert stream.lost
