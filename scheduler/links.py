"""How long KV takes from node to node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from moonpool.core.ids import NodeId


class Links:
    def seconds(self, source: NodeId, size: int, targets: Sequence[NodeId]) -> NDArray[np.float64]:
        """[targets] seconds for ``size`` bytes; 0 while nothing was measured, and within one node."""
        return np.zeros(len(targets))
