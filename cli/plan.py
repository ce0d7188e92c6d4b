"""``moonpool plan``: what a model needs and could do on a machine, from its configuration alone."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from moonpool.cli.options import AsJson

if TYPE_CHECKING:
    from moonpool.scheduler.model_shape import ModelShape
    from moonpool.scheduler.roofline import Machine, Roofline

PROFILES = Path(__file__).parent / "machines"
LENGTHS = (1_024, 8_192, 32_768, 131_072)
BATCHES = (1, 16, 64)
CACHED = 0.95
MAY_BE_0 = ("dram_bytes", "network_bytes_per_s", "ssd_bytes_per_s", "layer_overhead_s")
Row = tuple[str, ...]


def plan(
    model: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Model directory, or its config.json.")],
    machine: Annotated[
        str, typer.Option("--machine", metavar="NAME|FILE", help="a800x8, h800x8, h200, cpu, or a TOML file like theirs.")
    ] = "a800x8",
    length: Annotated[
        list[int] | None, typer.Option("--length", metavar="TOKENS", help="Prompt length; may be repeated.")
    ] = None,
    chunk: Annotated[int, typer.Option("--chunk", metavar="TOKENS", help="Prefill chunk; 0: whole prompts.")] = 0,
    kv_dtype: Annotated[str, typer.Option("--kv-dtype", help="float32, float16, bfloat16, float8; else the model's own.")] = "",
    as_json: AsJson = False,
) -> None:
    """Print KV per token, what fits, roofline times, and from which rate on fetching KV beats computing it.

    No GPU and no weights are needed: the numbers come from config.json and a profile of the machine.
    """
    from moonpool.core.errors import ConfigError
    from moonpool.scheduler.roofline import Roofline

    lengths = tuple(length or LENGTHS)
    if any(n < 1 for n in (*lengths, chunk + 1)):
        raise ConfigError("--length, --chunk: a positive number of tokens is needed", param="--length")
    chosen, sources = read_machine(machine)
    line = Roofline(read_model(model, kv_dtype), chosen)
    told = facts(line, lengths, chunk, sources)
    print(json.dumps(told, indent=2) if as_json else "\n".join(_lines(told)))


def read_model(path: Path, kv_dtype: str = "") -> ModelShape:
    """ConfigError where ``path`` is no model directory or its config.json does not say what is needed."""
    from moonpool.core.errors import ConfigError
    from moonpool.core.parsing import read_json
    from moonpool.scheduler.model_shape import shape_of

    file = path / "config.json" if path.is_dir() else path
    try:
        config = read_json(file.read_text())
    except (OSError, ValueError) as e:
        raise ConfigError(f"MODEL_DIR: {file} cannot be read as JSON ({e}); give a Hugging Face model directory") from e
    if not isinstance(config, dict):
        raise ConfigError(f"MODEL_DIR: {file} is no JSON object; give a Hugging Face model directory")
    return shape_of(config, path.name if path.is_dir() else path.parent.name, kv_dtype)


def read_machine(name: str) -> tuple[Machine, dict[str, str]]:
    """A shipped profile or a TOML file, and where its numbers come from. ConfigError names a bad field."""
    from dataclasses import MISSING, fields

    from moonpool.core.errors import ConfigError
    from moonpool.core.parsing import read_toml
    from moonpool.scheduler.roofline import Machine

    shipped = PROFILES / f"{name}.toml"
    file = shipped if shipped.is_file() else Path(name)
    try:
        values: dict[str, Any] = read_toml(file.read_text())
    except (OSError, ValueError) as e:
        known = ", ".join(sorted(path.stem for path in PROFILES.glob("*.toml")))
        raise ConfigError(f"--machine: {name!r} is neither one of {known} nor a TOML file ({e})", param="--machine") from e
    noted = values.pop("sources", {})
    sources = {field: str(text) for field, text in noted.items()} if isinstance(noted, dict) else {"profile": str(noted)}
    wanted = {field.name for field in fields(Machine)}
    if unknown := sorted(values.keys() - wanted):
        text = f"{file}: {unknown[0]} is no field of a machine; they are {', '.join(sorted(wanted))}"
        raise ConfigError(text, param=unknown[0])
    for field, value in values.items():
        if field != "name" and not _sound(field, value):
            least = "not negative" if field in MAY_BE_0 else "above 0"
            most = " and at most 1" if field.endswith("_efficiency") else ""
            raise ConfigError(f"{file}: {field} is {value!r}; a number that is {least}{most} is needed", param=field)
    needed = (field.name for field in fields(Machine) if field.default is MISSING)
    if missing := [name for name in needed if name not in values]:
        text = f"{file}: {', '.join(missing)} missing; cli/machines/a800x8.toml shows a whole profile"
        raise ConfigError(text, param=missing[0])
    return Machine(**values), sources


def _sound(field: str, value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        return False
    return (value > 0 or field in MAY_BE_0) and (value <= 1 or not field.endswith("_efficiency"))


def facts(line: Roofline, lengths: Sequence[int], chunk: int, sources: dict[str, str]) -> dict[str, Any]:
    model, machine = line.model, line.machine
    rates = {"network": machine.network_bytes_per_s, "host": machine.host_bytes_per_s, "ssd": machine.ssd_bytes_per_s}
    return {
        "model": model.name,
        "machine": machine.name,
        "kv_bytes_per_token": model.kv_bytes,
        "weight_bytes": model.weight_bytes,
        "device_tokens": line.device_tokens,
        "dram_tokens": line.dram_tokens,
        "prefill": [
            {
                "tokens": n,
                "kv_bytes": n * model.kv_bytes,
                "seconds": line.prefill_s(n, 0.0, chunk),
                "seconds_cached": line.prefill_s(n, CACHED * n, chunk),
                "break_even_bytes_per_s": line.break_even(n),
                "break_even_at_peak_bytes_per_s": line.break_even_at_peak(n),
                "fetch_pays_over": [name for name, rate in rates.items() if rate > line.break_even(n)],
            }
            for n in lengths
        ],
        "decode": [
            {"batch": batch, "context": n, "fits": batch * n <= line.device_tokens, "seconds": line.step_s(batch, n)}
            for n in lengths
            for batch in BATCHES
        ],
        "sources": sources,
    }


def _lines(told: dict[str, Any]) -> list[str]:
    head = [
        f"{told['model']} on {told['machine']}",
        f"  KV per token          {told['kv_bytes_per_token']:,.0f} B",
        f"  weights               {told['weight_bytes'] / 1e9:,.1f} GB",
        f"  KV in device memory   {_fits(told['device_tokens'])}",
        f"  KV in DRAM            {told['dram_tokens']:,} tokens",
        "",
    ]
    prefill: list[Row] = [
        ("prompt", "KV", "prefill", f"{CACHED:.0%} cached", "break-even", "at peak, eq. 2", "fetch pays over")
    ]
    for row in told["prefill"]:
        prefill.append(
            (
                f"{row['tokens']:,}",
                _size(row["kv_bytes"]),
                _time(row["seconds"]),
                _time(row["seconds_cached"]),
                _rate(row["break_even_bytes_per_s"]),
                _rate(row["break_even_at_peak_bytes_per_s"]),
                ", ".join(row["fetch_pays_over"]) or "nothing",
            )
        )
    decode: list[Row] = [("context", *(f"batch {batch}" for batch in BATCHES))]
    for n in dict.fromkeys(row["context"] for row in told["decode"]):
        cells = [row for row in told["decode"] if row["context"] == n]
        decode.append((f"{n:,}", *(_time(row["seconds"]) if row["fits"] else "does not fit" for row in cells)))
    return [*head, *_table(prefill), "", "decode step", *_table(decode)]


def _fits(tokens: int) -> str:
    return f"{tokens:,} tokens" if tokens else "none: the weights do not fit"


def _size(value: float) -> str:
    return f"{value / 1e9:.1f} GB" if value >= 1e9 else f"{value / 1e6:.1f} MB"


def _rate(value: float) -> str:
    return f"{value / 1e9:.1f} GB/s" if value >= 1e9 else f"{value / 1e6:.1f} MB/s"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1.0 else f"{seconds * 1e3:.1f} ms"


def _table(rows: list[Row]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  " + "  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
