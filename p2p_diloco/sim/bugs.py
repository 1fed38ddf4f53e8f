"""Planted bugs: proof that the checkers can fail. Each must be caught within a thousand seeds.

A bug is a context manager that spoils the machines while it is open. Those that only show between two
processes (an order that depends on hashing) are caught by comparing traces, see `sim.run`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np

from p2p_diloco.identity import PeerId
from p2p_diloco.numerics.digest import leaf_hash
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.state import Applied, FlatState
from p2p_diloco.proto import chain, convene
from p2p_diloco.proto.acceptor import Acceptor
from p2p_diloco.proto.membership import Membership
from p2p_diloco.sim.world import Disk, SimPeer, World

Bug = Callable[[], AbstractContextManager[None]]


@contextmanager
def vote_without_persisting() -> Iterator[None]:
    """The disk is said to have taken a vote that it never got."""
    honest = World._persisted

    def lie(self: World, peer: SimPeer, record: int, kind: str, data: bytes) -> None:
        real = peer.store
        if kind == "vote":
            peer.store = Disk()
        try:
            honest(self, peer, record, kind, data)
        finally:
            peer.store = real

    with patch.object(World, "_persisted", lie):
        yield


@contextmanager
def skip_adopt() -> Iterator[None]:
    """A later attempt runs anew although a promise reports a vote."""
    with patch.object(convene, "forced", lambda promises: None):
        yield


@contextmanager
def quorum_minus_one() -> Iterator[None]:
    """One vote too few counts as a quorum."""
    honest = chain.quorum_reached

    def lie(voters: Any, abstained: Any, signers: Any, rule: str = "majority") -> bool:
        present = set(signers)
        return any(honest(voters, abstained, present | {one}, rule) for one in sorted(voters)) and bool(
            present & set(voters)
        )

    with patch.object(chain, "quorum_reached", lie):
        yield


@contextmanager
def wrong_contributors_of_reused_chunks() -> Iterator[None]:
    """A reused chunk is booked on the ring that took it over, not on the one that summed it."""
    with patch.object(chain.RunView, "plan_of", lambda self, chunk: self.plan):
        yield


@contextmanager
def owner_keeps_its_fp32_copy() -> Iterator[None]:
    """The owner of a chunk applies the exact mean, all others the decoded one."""
    finish, apply_chunk = FlatState.finish, FlatState.apply_chunk
    exact: dict[tuple[int, int], Any] = {}

    def keep(self: FlatState, chunk: int, weight: int, total_weight: int, payload: bytes) -> bytes:
        start, stop = self.layout.bounds(chunk)
        summed = self.codec.decode(payload, stop - start)
        summed += np.float32(weight) * self.buffers.delta[start:stop]
        exact[id(self), chunk] = summed / np.float32(total_weight)
        return finish(self, chunk, weight, total_weight, payload)

    def lie(self: FlatState, chunk: int, payload: bytes) -> Applied:
        mean = exact.pop((id(self), chunk), None)
        if mean is None:
            return apply_chunk(self, chunk, payload)
        honest, self.codec = self.codec, Codec("fp32")
        try:
            done = apply_chunk(self, chunk, mean.astype(np.float32).tobytes())
        finally:
            self.codec = honest
        return Applied(done.leaf, leaf_hash(chunk, payload), done.finite)

    with patch.object(FlatState, "finish", keep), patch.object(FlatState, "apply_chunk", lie):
        yield


@contextmanager
def forget_after_restart() -> Iterator[None]:
    """A restarted peer does not read its vote log."""
    with patch.object(Acceptor, "_restore", lambda self, kind, data: None):
        yield


@contextmanager
def convene_again_after_restart() -> Iterator[None]:
    """A restarted convener sends a second, other view of an attempt."""
    with patch.object(Acceptor, "may_convene", lambda self, attempt: not self.silent):
        yield


@contextmanager
def iterate_a_set() -> Iterator[None]:
    """Floods go out in the order of a set, which differs between processes."""

    def linked(self: Membership) -> list[PeerId]:
        return list({peer for peer, member in self.members.items() if member.linked})

    with patch.object(Membership, "linked_peers", linked):
        yield


# What must catch each of them: a rule of `sim.checks`, or the comparison of traces.
BUGS: Mapping[str, tuple[Bug, tuple[str, ...]]] = {
    "vote_without_persisting": (vote_without_persisting, ("persist-first",)),
    "skip_adopt": (skip_adopt, ("chosen", "one-certificate")),
    "quorum_minus_one": (quorum_minus_one, ("quorum", "one-certificate")),
    "wrong_contributors_of_reused_chunks": (wrong_contributors_of_reused_chunks, ("reference",)),
    "owner_keeps_its_fp32_copy": (owner_keeps_its_fp32_copy, ("equal-roots",)),
    "forget_after_restart": (forget_after_restart, ("one-vote", "promise", "chosen", "one-view", "abstain")),
    "convene_again_after_restart": (convene_again_after_restart, ("one-view",)),
    "iterate_a_set": (iterate_a_set, ("trace",)),
}
