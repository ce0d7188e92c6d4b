from __future__ import annotations

from pathlib import Path

import pytest

from moonpool.core.errors import ConfigError
from moonpool.sim.compare import COLUMNS, draw, table
from moonpool.sim.outcome import Load, Outcome, RequestOutcome
from moonpool.sim.pictures import draw_outcome

PNG = b"\x89PNG\r\n"


def outcome(factor: float, requests: int = 20) -> Outcome:
    made = [RequestOutcome(i, i, 1_000, 10, ttft_s=factor * i, tbt_s=0.05, ended=i + 2.0) for i in range(requests)]
    if made:
        made[0].refused, made[0].ttft_s, made[0].tbt_s, made[0].ended = "overloaded", None, None, None
    load = [Load(5.0 * i, i, 1, 2, 0.1 * i, 0.2, 8, 8) for i in range(5)]
    return Outcome(made, 30.0, 0.1, load=load)


def test_one_simulation_gets_three_pictures(tmp_path: Path) -> None:
    paths = draw_outcome(tmp_path / "new", outcome(0.5))
    assert [path.name for path in paths] == ["ttft.png", "tbt.png", "load.png"]
    assert all(path.read_bytes().startswith(PNG) for path in paths)


@pytest.mark.parametrize("requests", [0, 1])
def test_pictures_of_hardly_anything(tmp_path: Path, requests: int) -> None:
    empty = outcome(1.0, requests)
    empty.load.clear()
    assert len(draw_outcome(tmp_path, empty)) == 3


def test_simulations_are_overlaid_in_one_picture_and_one_table(tmp_path: Path) -> None:
    both = {"slow": outcome(2.0), "fast": outcome(0.5)}
    assert draw(tmp_path, both).read_bytes().startswith(PNG)
    head, slow, fast = table(both).splitlines()
    assert [title for title, _ in COLUMNS if title not in head] == []
    assert slow.split()[0] == "slow"
    assert float(slow.split()[1]) == pytest.approx(4 * float(fast.split()[1]))


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write"):
        draw_outcome(tmp_path / "file", outcome(1.0))
