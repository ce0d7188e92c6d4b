"""A command as the entry of a Ray job: Ray knows its end as 0 or 1 only."""

from __future__ import annotations

import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def exit_code_told() -> Iterator[None]:
    """In the entry of a Ray job, the last line of its log is our exit code."""
    from moonpool.cluster.models import JOB_CONFIG

    if JOB_CONFIG not in os.environ:
        yield
        return
    code: str | int | None = 0
    try:
        yield
    except SystemExit as e:
        code = e.code
    except Exception:  # noqa: BLE001  Python would print it after our last line
        traceback.print_exc()
        code = 1
    number = code if isinstance(code, int) else 0 if code is None else 1
    sys.stderr.flush()
    print(f"moonpool: exit code {number}", flush=True)
    sys.exit(number)
