"""The operations that workers carry out: commitments, replayed rounds, what is kept of a copy."""

from __future__ import annotations

import numpy as np
import pytest

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import leaf_hash, merkle_root
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers
from p2p_diloco.numerics.work import WorkTable, replay


def table(values: int = 2500, chunk_values: int = 1000) -> WorkTable:
    """The same state each time."""
    state = FlatState(Layout(values, chunk_values), Codec(), 0.7, 0.9, StateBuffers.allocate(values))
    generator = np.random.default_rng(values)
    state.buffers.anchor0[:] = generator.standard_normal(values)
    state.initialise(0)
    return WorkTable(state, Schema((TensorSpec("w", (values,), "float32"),)))


def round_of(work: WorkTable, seed: int = 1) -> tuple[tuple[bytes, ...], tuple[bytes, ...], bytes, bytes]:
    """Payloads, their hashes, the chunk root and the state root that they lead to."""
    state = work.state
    state.buffers.delta[:] = np.random.default_rng(seed).standard_normal(state.layout.total_values)
    made = [work.run("single", (chunk,)) for chunk in range(state.layout.chunks)]
    payloads, hashes = tuple(p for p, _ in made), tuple(h for _, h in made)
    work.run("begin", ())
    leaves = tuple(work.run("apply", (chunk, p))[1] for chunk, p in enumerate(payloads))
    chunk_root, state_root = work.run("roots", (hashes, leaves))
    return payloads, hashes, chunk_root, state_root


def test_a_mean_comes_with_the_hash_that_its_receipt_names() -> None:
    work = table()
    payloads, hashes, chunk_root, _ = round_of(work)
    assert hashes == tuple(leaf_hash(chunk, payload) for chunk, payload in enumerate(payloads))
    assert chunk_root == merkle_root(hashes)


@pytest.mark.parametrize("values", [1, 255, 1000, 1001, 2500])
def test_a_replayed_round_gives_the_bits_of_the_ring(values: int) -> None:
    made, other = table(values), table(values)
    payloads, hashes, chunk_root, state_root = round_of(made)
    made.run("swap", (state_root, 1))
    other.run("replay_begin", (1, chunk_root, hashes))
    for chunk in reversed(range(len(payloads))):  # in any order
        assert other.run("replay_chunk", (chunk, payloads[chunk])) is True
    other.run("replay_finish", (state_root,))
    other.run("swap", (state_root, 1))
    assert other.state.root == made.state.root == state_root
    assert np.array_equal(other.state.anchor.view(np.int32), made.state.anchor.view(np.int32))
    assert np.array_equal(other.state.momentum.view(np.int32), made.state.momentum.view(np.int32))


def test_replay_refuses_other_leaves_other_payloads_and_an_incomplete_round() -> None:
    made, other = table(), table()
    payloads, hashes, chunk_root, state_root = round_of(made)
    for wrong in (hashes[:-1], (), hashes[::-1], (*hashes, bytes(32))):
        with pytest.raises(ProtocolViolation, match="do not hash"):
            other.run("replay_begin", (1, chunk_root, wrong))
    other.run("replay_begin", (1, chunk_root, hashes))
    for chunk, payload in ((0, payloads[1]), (1, payloads[1][:-1]), (2, b""), (3, payloads[0]), (-1, b"")):
        assert other.run("replay_chunk", (chunk, payload)) is False
    other.run("replay_chunk", (0, payloads[0]))
    with pytest.raises(InternalError, match="not complete"):
        other.run("replay_finish", (state_root,))
    for chunk in (1, 2):
        other.run("replay_chunk", (chunk, payloads[chunk]))
    with pytest.raises(ProtocolViolation, match="does not lead"):
        other.run("replay_finish", (bytes(32),))
    assert other.state.root == table().state.root, "the certified state is untouched"


def test_a_round_that_leads_elsewhere_changes_nothing() -> None:
    made, other = table(), table()
    payloads, _, _, state_root = round_of(made)
    before = other.state.root
    for wrong in (payloads[:-1], (*payloads, b""), payloads[::-1], (b"", *payloads[1:])):
        assert not replay(other.state, 1, state_root, wrong)
    assert not replay(other.state, 1, bytes(32), payloads)
    assert other.state.root == before
    assert other.state.epoch == 0
    assert replay(other.state, 1, state_root, payloads)
    assert other.state.root == state_root


def test_an_attempt_after_another_keeps_those_chunks_of_the_copy_that_it_names() -> None:
    work = table()
    payloads, _, _, state_root = round_of(work)
    assert work.run("begin", ((0, 2),)) == (0, 2)
    work.run("apply", (1, payloads[1]))
    assert work.state.next_root() == state_root
    assert work.run("begin", ()) == ()
    assert work.run("begin", ((1,),)) == (), "a chunk that was not written cannot stay"


def test_a_copy_that_is_not_the_certified_one_is_never_swapped_in() -> None:
    work = table()
    round_of(work)
    with pytest.raises(InternalError, match="certified root"):
        work.run("swap", (bytes(32), 1))


def test_a_delta_that_is_not_finite_is_named_by_its_tensor() -> None:
    work = table()
    work.state.buffers.delta[:] = 0
    reason, commitment = work.run("check_delta", ())
    assert reason == ""
    assert len(commitment) == 32
    work.state.buffers.delta[1700] = np.nan
    reason, commitment = work.run("check_delta", ())
    assert "w" in reason
    assert commitment == bytes(32)
