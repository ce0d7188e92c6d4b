"""The folder of a simulation: figures and settings, one line per request, pictures."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from moonpool.core.errors import ConfigError
from moonpool.sim.outcome import Outcome


def write_outcome(folder: Path, outcome: Outcome, settings: dict[str, Any]) -> list[Path]:
    """Write outcome.json, requests.jsonl, load.jsonl and the pictures; the files written. ConfigError where it cannot be."""
    from moonpool.sim.pictures import draw_outcome

    try:
        folder.mkdir(parents=True, exist_ok=True)
        numbers, requests, load = (folder / name for name in ("outcome.json", "requests.jsonl", "load.jsonl"))
        numbers.write_text(json.dumps(in_json(outcome, settings), indent=2) + "\n")
        for path, records in ((requests, outcome.requests), (load, outcome.load)):
            with path.open("w") as f:
                f.writelines(json.dumps(_rounded(asdict(record))) + "\n" for record in records)
    except OSError as e:
        raise ConfigError(f"output: cannot write to {folder}: {e.strerror}; give a writable folder", param="output") from e
    return [numbers, requests, load, *draw_outcome(folder, outcome)]


def in_json(outcome: Outcome, settings: dict[str, Any]) -> dict[str, Any]:
    return {"settings": settings, "figures": _rounded(outcome.figures()), "leaks": outcome.leaks}


def in_words(outcome: Outcome) -> str:
    f = outcome.figures()
    refused, failed = ([getattr(r, name) for r in outcome.requests if getattr(r, name)] for name in ("refused", "failed"))
    lines = [
        f"requests   {len(outcome.requests)}: {f['served']:.0f} served, "
        f"{len(refused)} refused{_reasons(refused)}, {len(failed)} failed{_reasons(failed)}",
        f"time       {f['seconds']:.0f} s until the last token",
        f"targets    {f['met_share']:.1%} of all had TTFT <= {outcome.ttft_target_s:g} s and TBT <= {outcome.tbt_target_s:g} s",
        f"prefill    {f['prefill_s']:.0f} s of computing, {f['wasted_prefill_s']:.0f} s of it for nothing; "
        f"{f['hit_share']:.1%} of prompt tokens from caches",
        "",
        f"{'seconds':<21}" + "".join(f"{name:>9}" for name in ("mean", "p50", "p90", "p99", "max")),
    ]
    for name, words in (("ttft", "TTFT"), ("tbt", "TBT (slowest tenth)")):
        values = (f[f"{name}_{what}_s"] for what in ("mean", "p50", "p90", "p99", "max"))
        some = any(getattr(r, f"{name}_s") is not None for r in outcome.requests)
        lines.append(f"{words:<21}" + "".join(f"{value:>9.3f}" if some else f"{'-':>9}" for value in values))
    held = {name: value for name, value in outcome.leaks.items() if value}
    if held:
        lines += ["", "LEAKED     " + ", ".join(f"{name}: {value:g}" for name, value in held.items())]
    return "\n".join(lines)


def _reasons(codes: list[str]) -> str:
    """Reason codes with their counts, the most frequent first; nothing where there are none."""
    return f" ({', '.join(f'{code} {count}' for code, count in Counter(codes).most_common())})" if codes else ""


def _rounded(values: dict[str, Any]) -> dict[str, Any]:
    return {name: round(value, 6) if isinstance(value, float) else value for name, value in values.items()}
