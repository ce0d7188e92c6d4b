"""Clients that other people wrote, each in a virtual environment of its own, run unmodified against a live cluster.

``scripts/clients FOLDER`` makes the environments, ``MOONPOOL_CLIENTS=FOLDER`` names them to the tests.
"""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PINS = ROOT / "tests/clients/pins.txt"
FOLDER = "MOONPOOL_CLIENTS"
# Nothing is asked of a hub, no usage is reported, and nobody's key is sent anywhere.
OFFLINE = {
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_OFFLINE": "1",
    "HF_DATASETS_OFFLINE": "1",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OPENAI_API_KEY": "none",
    "TOKENIZERS_PARALLELISM": "false",
    "OMP_NUM_THREADS": "1",
    "COLUMNS": "160",
    "NO_COLOR": "1",
}


def pins() -> dict[str, str]:
    """Version of every client."""
    return {name: wanted.partition("==")[2] for name, wanted in _pinned().items()}


def package(name: str) -> str:
    """What pip and ``importlib.metadata`` call it."""
    return _pinned()[name].partition("==")[0].partition("[")[0]


def _pinned() -> dict[str, str]:
    lines = [line.split() for line in PINS.read_text().splitlines() if line and not line.startswith("#")]
    return {name: first for name, first, *_ in lines}


@dataclass(frozen=True)
class Client:
    name: str
    python: Path

    @property
    def programs(self) -> Path:
        return self.python.parent

    def version(self) -> str:
        code = f"import importlib.metadata as m; print(m.version({package(self.name)!r}))"
        done = subprocess.run((self.python, "-c", code), capture_output=True, text=True, check=True, cwd=self.programs)
        return done.stdout.strip()

    def run(self, command: Sequence[str], scratch: Path, *, limit_s: float, **settings: str) -> str:
        """Standard output of ``command``, whose program is one of this environment; it must end well within ``limit_s``.

        It runs in the root of the checkout and keeps its own files below ``scratch``.
        """
        home = scratch / "home"
        home.mkdir(parents=True, exist_ok=True)
        program = [str(self.programs / command[0]), *command[1:]]
        env = {"PATH": f"{self.programs}:/usr/bin:/bin", "HOME": str(home), "TMPDIR": str(scratch), **OFFLINE, **settings}
        with _started(program, env, scratch / f"{self.name}.err") as process:
            try:
                out, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                raise AssertionError(f"not within {limit_s:.0f} s: {command}\n{_tail(scratch, self.name)}") from None
        assert process.returncode == 0, (
            f"{command} ended with {process.returncode}:\n{out[-3000:]}\n{_tail(scratch, self.name)}"
        )
        return out


def _tail(scratch: Path, name: str) -> str:
    return (scratch / f"{name}.err").read_text(errors="replace")[-6000:]


@contextmanager
def _started(program: Sequence[str], env: Mapping[str, str], errors: Path) -> Iterator[subprocess.Popen[str]]:
    """With all that it starts: some of these clients are a dozen processes."""
    with errors.open("w") as log:
        process = subprocess.Popen(
            program, cwd=ROOT, env=dict(env), stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
        )
        try:
            yield process
        finally:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                pass
            process.wait()
            if process.stdout is not None:
                process.stdout.close()


def find(name: str) -> Client | None:
    """In the folder of environments, else in this very environment."""
    given = os.environ.get(FOLDER)
    own = Path(given) / name / "bin/python" if given else None
    if own is not None and own.exists():
        return Client(name, own)
    if importlib.util.find_spec(package(name).replace("-", "_")) is not None:
        return Client(name, Path(sys.executable))
    return None


def lacking(name: str) -> str:
    """Why a test of it is skipped."""
    return f"{name} is not there: scripts/clients FOLDER {name}, then {FOLDER}=FOLDER"


def lay_out_hub(model_dir: Path, hub: Path, name: str) -> None:
    """A cache of a hub in which the tokenizer of ``model_dir`` is ``local/NAME``.

    The class is named as every version of the library knows it.
    """
    revision = "0" * 40
    home = hub / f"models--local--{name}"
    snapshot = home / "snapshots" / revision
    snapshot.mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text(revision)
    for path in sorted(model_dir.glob("*")):
        if path.suffix in (".json", ".jinja") and path.is_file():
            text = path.read_text().replace('"TokenizersBackend"', '"PreTrainedTokenizerFast"')
            (snapshot / path.name).write_text(text)
