"""Where the ranks of one worker compute and keep K/V: in one memory of canonical pages, or each in pages of its own heads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from typing import Any, Literal, TypeVar, cast

import torch

from moonpool.engine.page_tensor import CPU
from moonpool.engine.quantised import Kept

Part = TypeVar("Part")


@dataclass(frozen=True, slots=True)
class Keeping:
    """``apart``: every rank has pages of its own heads, and what all ranks map is the host's view of them. Else they all
    read and write the pages that they map."""

    kind: Literal["cpu", "cuda"] = "cpu"
    kept: Kept = "auto"
    attention: Literal["torch", "triton"] = "torch"  # whose kernels
    apart: bool = False

    def device_of(self, rank: int) -> torch.device:
        """On GPUs rank i has the i-th of those that the processes see."""
        return CPU if self.kind == "cpu" else torch.device("cuda", rank)

    def described(self, note: str, ranks: int) -> str:
        """``note`` is of rank 0's device."""
        return note if self.kind == "cpu" else f"{note}, and the {ranks - 1} after it"


TOGETHER = Keeping()


def enter(device: torch.device) -> None:
    """This thread computes there, whatever does not say where."""
    if device.type == "cuda":
        torch.cuda.set_device(device)


def placed(part: Part, device: torch.device) -> Part:
    """``part`` of a recipe, or one, with its tensors on ``device``; itself where that is the host, which they come from."""
    return part if device.type == "cpu" else cast(Part, _placed(part, device))


def _placed(part: Any, device: torch.device) -> Any:
    if isinstance(part, torch.Tensor):
        return part.to(device)
    if isinstance(part, Sequence) and not isinstance(part, str):
        return tuple(_placed(one, device) for one in part)
    if is_dataclass(part) and not isinstance(part, type):
        return replace(part, **{field.name: _placed(getattr(part, field.name), device) for field in fields(part)})
    return part
