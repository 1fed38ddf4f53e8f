"""Answering joiners: genesis, chain, leaves and chunks. Pure; reads go through workers.

A root names a state (read by workers) or a finished round (its payloads are at hand).
"""

from __future__ import annotations

from typing import Any

from p2p_diloco.identity import PeerId
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.events import Compute, Effect, Send, SendFrame
from p2p_diloco.proto.jobs import Jobs
from p2p_diloco.proto.rounds import Rounds
from p2p_diloco.wire.messages import (
    Chain as ChainMessage,
)
from p2p_diloco.wire.messages import (
    GetChain,
    GetChunk,
    GetLeaves,
    Gone,
    Leaves,
    pack_object,
)

_CHAIN_BYTES = 900 << 10  # of the 1 MiB frame
_LEAVES_PER_PAGE = 24 << 10  # 768 KiB of hashes
_PER_JOINER = 8  # reads under way for one joiner


class Server:
    """One per peer. A joiner that asks for more than a few things at once is told `busy`."""

    def __init__(self, chain: Chain, rounds: Rounds, jobs: Jobs) -> None:
        self._chain, self._rounds, self._jobs = chain, rounds, jobs
        self._open: dict[PeerId, int] = {}
        self.bytes_served = 0

    def on_get_chain(self, peer: PeerId, message: GetChain) -> list[Effect]:
        chosen: list[bytes] = []
        size = 0
        for certificate in self._chain.certificates(max(message.epoch, 1), 1024):
            packed = pack_object(certificate)
            size += len(packed) + 8
            if chosen and size > _CHAIN_BYTES:
                break
            chosen.append(packed)
        return [Send(peer, ChainMessage(self._chain.epoch, tuple(chosen)))]

    def on_get_leaves(self, peer: PeerId, message: GetLeaves) -> list[Effect]:
        held = self._rounds.get(message.root)
        if held is not None:
            page = held.hashes[message.start : message.start + _LEAVES_PER_PAGE]
            return [Send(peer, Leaves(message.root, message.start, len(held.hashes), b"".join(page)))]
        return self._read(peer, message.root, message.start, "leaves", "read_leaves", (message.root,))

    def on_get_chunk(self, peer: PeerId, message: GetChunk) -> list[Effect]:
        held = self._rounds.get(message.root)
        if held is not None and message.chunk < len(held.payloads):
            payload = held.payloads[message.chunk]
            self.bytes_served += len(payload)
            return [SendFrame(peer, "state", message.root, message.chunk, 0, 0, payload)]
        arguments = (message.root, message.chunk)
        return self._read(peer, message.root, message.chunk, "chunk", "read_chunk", arguments)

    def _read(
        self, peer: PeerId, root: bytes, index: int, what: str, op: str, arguments: tuple[Any, ...]
    ) -> list[Effect]:
        if self._open.get(peer, 0) >= _PER_JOINER:
            return [Send(peer, Gone(root, index, "busy"))]
        self._open[peer] = self._open.get(peer, 0) + 1
        return [Compute(self._jobs.add("serve", (peer, what, root, index)), op, arguments)]

    def on_computed(self, note: tuple[Any, ...], result: Any, error: str) -> list[Effect]:
        peer, what, root, index = note
        self._open[peer] -= 1
        if self._open[peer] == 0:
            del self._open[peer]
        if error:
            return [Send(peer, Gone(root, index, "unknown"))]
        if what == "chunk":
            self.bytes_served += len(result)
            return [SendFrame(peer, "state", root, index, 0, 0, result)]
        page = result[index : index + _LEAVES_PER_PAGE]
        return [Send(peer, Leaves(root, index, len(result), b"".join(page)))]
