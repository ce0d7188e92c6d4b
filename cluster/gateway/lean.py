"""What a gateway's process does without."""

from __future__ import annotations

import os
import sys


def without_torch() -> None:
    """Have ``transformers``, which brings the tokenizers, not load PyTorch beside them: seconds of a start, 240 MB of memory.

    For a process that will compute nothing, before it imports either: after this, ``import torch`` fails in it.
    """
    if "torch" not in sys.modules:
        os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")  # or it says that there will be no models
        sys.modules["torch"] = None  # type: ignore[assignment]  # how Python is told that there is no such module
