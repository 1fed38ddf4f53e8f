"""Numbers for outstanding effects, so that an answer finds the part of a machine that asked."""

from __future__ import annotations

from typing import Any


class Jobs:
    """Hands out job numbers and remembers (owner, note) until the answer comes."""

    def __init__(self) -> None:
        self._next = 0
        self._open: dict[int, tuple[str, tuple[Any, ...]]] = {}

    def add(self, owner: str, note: tuple[Any, ...]) -> int:
        self._next += 1
        self._open[self._next] = (owner, note)
        return self._next

    def take(self, job: int) -> tuple[str, tuple[Any, ...]] | None:
        """The owner and note of a finished job, once; None if it is not ours (any more)."""
        return self._open.pop(job, None)

    def open_of(self, owner: str) -> int:
        """How many jobs of this owner are unanswered."""
        return sum(1 for entry in self._open.values() if entry[0] == owner)

    def has(self, owner: str, note: tuple[Any, ...]) -> bool:
        return (owner, note) in self._open.values()

    def __len__(self) -> int:
        return len(self._open)
