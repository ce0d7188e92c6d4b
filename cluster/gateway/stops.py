"""Stop strings in a stream of text pieces (Aho and Corasick, 1975): where the pieces break makes no difference.

The stop string whose *last* character comes first wins; of several that end there, the longest. Text is held back only
while it is the beginning of a stop string, and given out as soon as it cannot be one any more.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class _Node:
    __slots__ = ("depth", "fall", "matched", "next")

    def __init__(self, depth: int) -> None:
        self.depth = depth  # characters from the root: the text that must be held back here
        self.next: dict[str, _Node] = {}
        self.fall: _Node = self  # the longest proper suffix that begins a stop string too
        self.matched = 0  # length of the longest stop string that ends here, 0 for none


def _build(stops: Sequence[str]) -> _Node:
    root = _Node(0)
    for stop in stops:
        node = root
        for char in stop:
            node = node.next.setdefault(char, _Node(node.depth + 1))
        node.matched = len(stop)
    queue = deque(root.next.values())
    for node in queue:
        node.fall = root
    while queue:
        node = queue.popleft()
        node.matched = node.matched or node.fall.matched
        for char, child in node.next.items():
            child.fall = _step(root, node.fall, char)
            queue.append(child)
    return root


def _step(root: _Node, node: _Node, char: str) -> _Node:
    while char not in node.next:
        if node is root:
            return root
        node = node.fall
    return node.next[char]


class StopMatcher:
    """Stateful over one choice. ``stops`` are non-empty strings; with ``include`` the one that ends the text is part of it."""

    def __init__(self, stops: Sequence[str], *, include: bool = False) -> None:
        self._include = include
        self._root = _build(stops)
        self._node = self._root
        self._held = ""

    def push(self, text: str, *, armed: bool = True) -> tuple[str, bool]:
        """(text that is safe to give out, whether a stop string was completed; what follows it is dropped, and so is it).

        A stop string completed while not ``armed`` is ordinary text.
        """
        if not self._root.next:
            return text, False
        known, root, node = self._held + text, self._root, self._node
        for i, char in enumerate(text, start=len(self._held) + 1):
            node = _step(root, node, char)
            if node.matched and armed:
                self._held, self._node = "", root
                return known[: i if self._include else i - node.matched], True
        while not node.next:  # a whole stop string that did not count begins nothing any more
            node = node.fall
        self._node = node
        cut = len(known) - node.depth
        self._held = known[cut:]
        return known[:cut], False

    def finish(self) -> str:
        """What was held back: the text ended before it became a stop string."""
        held, self._held, self._node = self._held, "", self._root
        return held
