"""The chance that a machine is given from outside: seeded in a simulator, a real generator elsewhere."""

from __future__ import annotations

from collections.abc import MutableSequence, Sequence
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Dice(Protocol):
    """The few methods of Python's generator class that the machines use."""

    def randrange(self, stop: int, /) -> int: ...
    def choice(self, seq: Sequence[T], /) -> T: ...
    def sample(self, population: Sequence[T], k: int, /) -> list[T]: ...
    def shuffle(self, x: MutableSequence[Any], /) -> None: ...
