"""docs/clients.md: what every client printed, kept between two marks, and how it gets there.

``python -m support.clients_page FOLDER PAGE`` puts the records of FOLDER into PAGE.
"""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import moonpool
from support.clients import pins

_BLOCK = re.compile(r"(<!-- recorded: (?P<client>[\w-]+) -->\n)(?P<said>.*?)(<!-- end -->)", re.DOTALL)
_LINES, _WIDTH = 40, 170  # of one output


@dataclass
class Notebook:
    """What clients printed, one file a client below ``folder``; None keeps nothing.

    ``names``: what this run calls something -> what the page calls it.
    """

    folder: Path | None
    names: Mapping[str, str]
    _begun: set[str] = field(default_factory=set)

    def add(self, client: str, command: Sequence[str], output: str) -> None:
        """``command`` as the page shows it."""
        if self.folder is None:
            return
        for found, said in self.names.items():
            output = output.replace(found, said)
        mode = "a" if client in self._begun else "w"
        self._begun.add(client)
        with (self.folder / f"{client}.txt").open(mode) as file:
            file.write(f"$ {in_words(command)}\n{shortened(output)}\n\n")


def in_words(command: Sequence[str]) -> str:
    """One line for a shell; variables stay variables."""
    return " ".join(word if re.fullmatch(r"[\w$./:=,+-]+", word) else shlex.quote(word) for word in command)


def shortened(output: str) -> str:
    """The first lines, each up to a width, without what draws and colours on terminals."""
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).replace("\r", "\n")
    lines = [line.rstrip() for line in plain.splitlines() if line.strip()]
    cut = [line if len(line) <= _WIDTH else line[: _WIDTH - 3] + "..." for line in lines[:_LINES]]
    return "\n".join([*cut, *(["..."] if len(lines) > _LINES else [])])


def heading(client: str) -> str:
    """What a record says of its versions."""
    return f"Recorded with {client} {pins()[client]} and Moonpool {moonpool.__version__}."


def spliced(page: str, records: Mapping[str, str]) -> str:
    """``page`` with the records of the clients that have one; the others keep theirs."""

    def said(match: re.Match[str]) -> str:
        record = records.get(match["client"])
        if record is None:
            return match[0]
        return f"{match[1]}{heading(match['client'])}\n\n```\n{record.strip()}\n```\n{match[4]}"

    return _BLOCK.sub(said, page)


def recorded(page: str) -> dict[str, str]:
    """What the page holds of each client."""
    return {match["client"]: match["said"] for match in _BLOCK.finditer(page)}


def commands(text: str) -> list[str]:
    """Every command line in the fenced blocks of a page."""
    fenced = re.findall(r"^```[a-z]*\n(.*?)^```", text, re.DOTALL | re.MULTILINE)
    return [line.removeprefix("$ ") for block in fenced for line in block.splitlines() if line.startswith("$ ")]


def main(folder: Path, page: Path) -> None:
    records = {path.stem: path.read_text() for path in sorted(folder.glob("*.txt"))}
    page.write_text(spliced(page.read_text(), records))
    print(f"{page}: {', '.join(records) or 'nothing new'}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
