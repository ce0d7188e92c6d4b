"""A process of its own for a role: what has to be settled in it before it imports what the role needs."""

from __future__ import annotations

import os
import sys

from moonpool.cluster.spec import RoleSpec
from moonpool.core.ids import Role


def furnish(spec: RoleSpec) -> None:
    """This process will be ``spec``'s and nothing else: sets what libraries read at their import. What a user set stays."""
    os.environ.update({k: v for k, v in spec.environment().items() if k not in os.environ})
    if spec.role is Role.GATEWAY:
        _without_torch()


def _without_torch() -> None:
    """Have ``transformers``, which brings the tokenizers, not load PyTorch beside them: seconds of a start, 240 MB of memory.

    For a process that will compute nothing: after this, ``import torch`` fails in it.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or it says that there will be no models
        sys.modules["torch"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
