"""``moonpool top``: the cluster live in a terminal."""

from moonpool.cli.top.command import top

__all__ = ["top"]
