"""What runs here: kernel, Python, this package, and whether its libraries are the ones it was tested with."""

from __future__ import annotations

import platform
import re
import sys
from collections.abc import Callable, Iterable, Iterator
from importlib import metadata

from moonpool.cli.doctor.finding import Finding, fail, ok, warn
from moonpool.core.config import Config

TOLD = ("torch", "ray", "nixl-cu12", "grpcio", "transformers")  # of the pinned packages, by name; of others only what is odd
_PIN = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?==([A-Za-z0-9.]+)\s*\Z")


def versions(config: Config) -> Iterator[Finding]:
    from moonpool import __version__

    yield python_version(sys.version_info[:3])
    yield ok(f"moonpool {__version__}, {platform.system()} {platform.release()} on {platform.machine()}")
    yield from packages(_requirements(), _installed)


def python_version(found: tuple[int, int, int]) -> Finding:
    text = f"python {'.'.join(map(str, found))}"
    return ok(text) if found >= (3, 11) else fail(text, "use 3.11 or newer")


def packages(requirements: Iterable[str], installed: Callable[[str], str | None]) -> Iterator[Finding]:
    """``requirements`` as package metadata has them; those of extras are left out. ``installed``: name -> version."""
    told = []
    for requirement in requirements:
        pin = _PIN.match(requirement)
        if pin is None:
            continue
        name, wanted = pin.groups()
        found = installed(name)
        if found is None:
            yield fail(f"package {name} is not installed", f"pip install '{requirement}', or run scripts/setup again")
        elif found.partition("+")[0] != wanted:
            yield warn(f"package {name} is {found}; {wanted} is what was tested", f"pip install '{name}=={wanted}'")
        if found is not None and name in TOLD:
            told.append(f"{name} {found}")
    yield ok(f"packages: {', '.join(told)}" if told else "packages: none is pinned")


def _requirements() -> list[str]:
    try:
        return list(metadata.requires("moonpool") or ())
    except metadata.PackageNotFoundError:  # run from a folder, not installed
        return []


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
