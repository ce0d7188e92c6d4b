"""What the measurements behind ``moonpool bench`` take from their options, and how their figures are printed."""

from __future__ import annotations

import json
from typing import Any


def pairs(settings: list[str] | None) -> dict[str, str]:
    """``--set`` of a bench, for the cluster that it starts; that cluster says what is wrong with them."""
    return {text.partition("=")[0]: text.partition("=")[2] for text in settings or ()}


def chosen(given: dict[str, Any]) -> dict[str, Any]:
    """Options left out keep the measurement's own defaults."""
    return {name: value for name, value in given.items() if value is not None}


def print_figures(figures: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(figures, indent=2))
        return
    for name, value in figures.items():
        if isinstance(value, float):
            print(f"{name:<36} {value:.4g}")
        elif not isinstance(value, dict | list):
            print(f"{name:<36} {value}")
