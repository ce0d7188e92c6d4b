"""docs/clients.md says what is so: versions, commands, and records of this version for every client that it lists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from support import clients_page as pages
from support.client_commands import on_page
from support.clients import pins

import moonpool
from moonpool.cli.main import Choices, build

HOUSE = Path(__file__).resolve().parents[3]
PAGE = (HOUSE / "docs/clients.md").read_text()
LISTED = dict(re.findall(r"^\| \[[^]]+\]\(#([\w-]+)\) \| ([\w.]+) \|", PAGE, re.MULTILINE))


def test_every_client_of_the_list_is_pinned_at_the_version_that_the_list_says() -> None:
    assert LISTED
    assert {name: pins()[name] for name in LISTED} == LISTED


@pytest.mark.parametrize("client", sorted(LISTED))
def test_a_client_of_the_list_has_a_record_of_this_version(client: str) -> None:
    assert pages.recorded(PAGE)[client].startswith(
        f"Recorded with {client} {pins()[client]} and Moonpool {moonpool.__version__}."
    )


def test_nothing_is_recorded_of_a_client_that_is_not_listed() -> None:
    assert set(pages.recorded(PAGE)) == set(LISTED)


def test_recorded_commands_are_those_that_the_tests_run() -> None:
    known = {pages.in_words(command) for command in on_page()}
    shown = [line for said in pages.recorded(PAGE).values() for line in pages.commands(said)]
    assert shown and set(shown) <= known


def test_every_flag_of_a_moonpool_command_exists() -> None:
    ours = [line for line in [*pages.commands(PAGE), *inline(PAGE)] if line.startswith("moonpool ")]
    assert ours
    wrong = {line: unknown for line in ours if (unknown := unknown_words(shlex.split(line)[1:]))}
    assert wrong == {}


def inline(page: str) -> list[str]:
    return re.findall(r"`(moonpool [^`]+)`", page)


def unknown_words(words: list[str]) -> list[str]:
    """Verbs and flags of a command line that ``moonpool`` does not have."""
    command: Any = typer.main.get_command(build(Choices()))
    unknown = []
    for word in words:
        verbs = getattr(command, "commands", None)
        if verbs is not None:
            if word not in verbs:
                return [word]
            command = verbs[word]
        elif word.startswith("-") and word not in {flag for one in command.params for flag in [*one.opts, *one.secondary_opts]}:
            unknown.append(word)
    return unknown


def test_a_flag_that_does_not_exist_is_found() -> None:
    assert unknown_words(["replay", "--speeed", "2"]) == ["--speeed"]
    assert unknown_words(["replays"]) == ["replays"]


def test_a_record_takes_the_place_of_the_one_before_and_leaves_others() -> None:
    page = "a\n<!-- recorded: openai -->\nold\n<!-- end -->\n<!-- recorded: litellm -->\nkept\n<!-- end -->\n"
    now = pages.spliced(page, {"openai": "$ x\nnew\n"})
    assert pages.recorded(now)["litellm"] == "kept\n"
    assert "old" not in now and "```\n$ x\nnew\n```" in now
    assert pages.spliced(now, {"openai": "$ x\nnew\n"}) == now


def test_long_and_coloured_output_is_shortened() -> None:
    drawn = pages.shortened("\x1b[31mred\x1b[0m\n\n" + "x" * 400 + "\n" + "line\n" * 100)
    lines = drawn.splitlines()
    assert lines[0] == "red" and lines[1].endswith("...") and len(lines[1]) < 200
    assert len(lines) < 60 and lines[-1] == "..."


def test_output_of_this_machine_is_told_in_words_of_the_page(tmp_path: Path) -> None:
    notebook = pages.Notebook(tmp_path, {"http://127.0.0.1:41111": "http://127.0.0.1:8000"})
    notebook.add("openai", ["python", "x.py", "$MODEL", "a b"], "at http://127.0.0.1:41111/v1")
    notebook.add("openai", ["again"], "yes")
    assert (tmp_path / "openai.txt").read_text() == (
        "$ python x.py $MODEL 'a b'\nat http://127.0.0.1:8000/v1\n\n$ again\nyes\n\n"
    )
