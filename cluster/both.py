"""Role ``both``: prompts and answers in one process, with a local hand-off.

The laptop mode, the cache-off oracle (``engine.reuse = false``), and mixed batches: prompt chunks and decode rows share
one forward pass. Works with and without a store node on its host.
"""

from __future__ import annotations

from moonpool.decode_worker.worker import DecodeWorker


class BothWorker(DecodeWorker):
    """Computes every prompt itself, whatever the placement says."""
