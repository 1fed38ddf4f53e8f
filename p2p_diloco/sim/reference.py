"""What a certified state must be, computed by one process from the contributions that a certificate names.

Shares no code with the ring: it walks each chunk's contributors in order with the codec and takes the outer
step on whole vectors. Bit for bit, since every replica must be.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout
from p2p_diloco.numerics.outer import nesterov_update
from p2p_diloco.proto.chain import Link

Flat = NDArray[np.float32]


class Reference:
    """The one history, epoch by epoch. ``deltas``: every contribution ever offered, by its commitment."""

    def __init__(self, layout: Layout, codec: Codec, lr: float, mu: float, anchor: Flat) -> None:
        self._layout, self._codec = layout, codec
        self._lr, self._mu = lr, mu
        self.anchor = anchor.copy()
        self.momentum = np.zeros_like(anchor)
        self.deltas: dict[bytes, Flat] = {}
        self.epoch = 0

    def advance(self, link: Link) -> bytes:
        """Take the outer step of the next certificate; returns the state root that it must have."""
        mean = np.zeros_like(self.anchor)
        for chunk in range(self._layout.chunks):
            start, stop = self._layout.bounds(chunk)
            payload = self._mean(link, chunk, start, stop)
            mean[start:stop] = self._codec.decode(payload, stop - start)
        anchor, momentum = np.empty_like(self.anchor), np.empty_like(self.momentum)
        scratch = np.empty_like(self.anchor)
        with np.errstate(over="ignore", invalid="ignore"):
            nesterov_update(self.anchor, self.momentum, mean, self._lr, self._mu, anchor, momentum, scratch)
        self.anchor, self.momentum = anchor, momentum
        self.epoch += 1
        leaves = []
        for chunk in range(self._layout.chunks):
            start, stop = self._layout.bounds(chunk)
            leaves.append(leaf_hash(chunk, anchor[start:stop], momentum[start:stop]))
        return merkle_root(leaves)

    def _mean(self, link: Link, chunk: int, start: int, stop: int) -> bytes:
        """The payload that the chunk's owner must have made."""
        members = link.plan_of(chunk)
        count = len(members)
        parts = [(self.deltas[ready.commitment][start:stop], ready.weight) for _, ready in members]
        if count == 1:
            return self._codec.single(parts[0][0])
        owner = chunk % count
        route = [parts[(owner + 1 + i) % count] for i in range(count)]
        payload = self._codec.first(route[0][0], float(route[0][1]))
        for delta, weight in route[1:-1]:
            payload = self._codec.hop(payload, delta, float(weight))
        total = float(sum(weight for _, weight in parts))
        return self._codec.finish(payload, route[-1][0], float(route[-1][1]), total)


def missing(link: Link, deltas: Mapping[bytes, Flat], chunks: int) -> list[str]:
    """Contributions that the certificate names and nobody ever offered (for a message)."""
    names = {ready.commitment for chunk in range(chunks) for _, ready in link.plan_of(chunk)}
    return sorted(name.hex()[:12] for name in names if name not in deltas)
