"""The statements of the current epoch, to be said again to those who may have missed them. Pure.

A link that breaks takes with it what was under way, and nobody else knows that it is missing. So a peer
tells a new link what it knows of the epoch, and, while an epoch does not move, all links its own words.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

from p2p_diloco.identity import PeerId
from p2p_diloco.wire.messages import Promise, Ready, Signed, View, Vote

_KEPT = 2048  # statements of one epoch: several per member of the largest ring


class Archive:
    """One statement per author, kind and attempt; of a peer's READYs the newest."""

    def __init__(self) -> None:
        self._held: dict[tuple[PeerId, str, int], Signed] = {}
        self._names: OrderedDict[bytes, None] = OrderedDict()  # what was heard, the newest last
        self._trials: dict[PeerId, tuple[int, int]] = {}  # (life, trial) of each peer's READY

    def has(self, signed: Signed) -> bool:
        return signed.digest() in self._names

    def add(self, author: PeerId, signed: Signed, body: object) -> None:
        attempt = body.attempt if isinstance(body, Vote | Promise | View) else 0
        key = (author, signed.kind, attempt)
        if len(self._held) >= _KEPT and key not in self._held:
            return
        self._names[signed.digest()] = None
        while len(self._names) > 2 * _KEPT:
            self._names.popitem(last=False)
        known = self._held.get(key)
        if isinstance(body, Ready):
            trial = (body.life, body.trial)
            if known is not None and trial <= self._trials[author]:
                return
            self._trials[author] = trial
        elif known is not None:
            return
        self._held[key] = signed

    def everything(self) -> Iterator[Signed]:
        """In a fixed order: by author, kind and attempt."""
        for key in sorted(self._held):
            yield self._held[key]

    def of(self, author: PeerId) -> Iterator[Signed]:
        for key in sorted(self._held):
            if key[0] == author:
                yield self._held[key]

    def __len__(self) -> int:
        return len(self._held)
