"""Two slots, who may read them, and that all peers end on the same bits."""

from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics.digest import merkle_root
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, SnapshotGone, StateBuffers
from p2p_diloco.numerics.work import WorkTable

VALUES = 20_003


def make(
    values: int = VALUES, seed: int = 0, kind: str = "int8", lr: float = 0.7, mu: float = 0.9
) -> FlatState:
    state = FlatState(Layout(values, 4096), Codec(kind), lr, mu, StateBuffers.allocate(values))
    state.buffers.anchor0[:] = np.random.default_rng(seed).standard_normal(values)
    state.initialise(0)
    return state


def mean_payloads(state: FlatState, seed: int) -> list[bytes]:
    state.buffers.delta[:] = np.random.default_rng(seed).standard_normal(state.layout.total_values)
    return [state.single(chunk) for chunk in range(state.layout.chunks)]


def advance(state: FlatState, payloads: list[bytes], order: list[int] | None = None) -> bytes:
    state.begin_apply()
    for chunk in order if order is not None else range(state.layout.chunks):
        state.apply_chunk(chunk, payloads[chunk])
    root = state.next_root()
    state.swap()
    return root


@pytest.mark.parametrize("values", [0, 1, 7, VALUES])
def test_two_peers_that_apply_the_same_payloads_in_any_order_have_equal_roots(values: int) -> None:
    left, right = make(values), make(values)
    for epoch in range(5):
        payloads = mean_payloads(left, epoch)
        order = list(range(left.layout.chunks))
        random.Random(epoch).shuffle(order)
        right.begin_apply()
        with ThreadPoolExecutor(3) as pool:
            list(pool.map(lambda c, p=payloads: right.apply_chunk(c, p[c]), order))
        right.next_root()
        right.swap()
        assert advance(left, payloads) == right.root
        assert left.root == right.root
        assert np.array_equal(left.anchor, right.anchor)
    assert left.epoch == right.epoch == 5


def test_applying_a_chunk_again_starts_from_the_certified_values() -> None:
    state = make()
    payloads = mean_payloads(state, 1)
    state.begin_apply()
    once = [state.apply_chunk(c, payloads[c]).leaf for c in range(state.layout.chunks)]
    other = mean_payloads(state, 2)
    state.begin_apply()
    for chunk in range(state.layout.chunks):
        state.apply_chunk(chunk, other[chunk])
        assert state.apply_chunk(chunk, payloads[chunk]).leaf == once[chunk]
    assert state.next_root() == merkle_root(once)


def test_the_certified_slot_is_not_touched_before_the_swap() -> None:
    state = make()
    before, root = state.anchor.copy(), state.root
    payloads = mean_payloads(state, 1)
    state.begin_apply()
    state.apply_chunk(0, payloads[0])
    assert np.array_equal(state.anchor, before)
    assert state.root == root
    with pytest.raises(InternalError, match="not complete"):
        state.swap()


def test_a_delta_that_is_not_finite_names_its_tensor_and_place() -> None:
    state = make()
    schema = Schema((TensorSpec("a", (20_000,), "float32"), TensorSpec("b", (3,), "float32")))
    table = WorkTable(state, schema)
    assert table.run("check_delta", ())[0] == ""
    state.buffers.delta[20_001] = np.nan
    assert not state.check_delta(4).finite
    assert state.check_delta(4).bad_index == 20_001
    assert "in b" in table.run("check_delta", ())[0]


def test_an_outer_step_that_overflows_is_reported() -> None:
    state = make(7)
    state.buffers.delta[:] = 3e38
    payload = state.single(0)
    state.begin_apply()
    assert not state.apply_chunk(0, payload).finite


def test_rate_one_without_momentum_gives_the_local_weights() -> None:
    state = make(1000, kind="fp32", lr=1.0, mu=0.0)
    local = state.anchor + np.float32(0.001)
    state.buffers.delta[:] = state.anchor - local
    advance(state, [state.single(c) for c in range(state.layout.chunks)])
    assert np.abs(state.anchor - local).max() <= np.spacing(np.abs(local).max())


def test_two_peers_with_opposite_deltas_change_nothing() -> None:
    left, right = make(1000), make(1000)
    left.buffers.delta[:] = np.random.default_rng(9).standard_normal(1000)
    right.buffers.delta[:] = -left.buffers.delta
    payloads = [right.finish(c, 1, 2, left.first(c, 1)) for c in range(left.layout.chunks)]
    before = left.anchor.copy()
    advance(left, payloads)
    # The one quantisation on the way is all that is left of the sum.
    bound = left.codec.error_bound(left.buffers.delta) * 0.5 * (0.7 * 1.9) * 1.02 + 1e-6
    assert (np.abs(left.anchor - before) <= bound).all()


def test_a_joiner_installs_a_snapshot_chunk_by_chunk_and_refuses_wrong_ones() -> None:
    donor = make(seed=1)
    advance(donor, mean_payloads(donor, 1))
    joiner = make(seed=2)
    with pytest.raises(ProtocolViolation):
        joiner.install_begin(1, donor.root, donor.leaves_of(donor.root)[:-1])
    joiner.install_begin(1, donor.root, donor.leaves_of(donor.root))
    for chunk in range(donor.layout.chunks):
        data = donor.read_chunk(donor.root, chunk)
        assert not joiner.install_chunk(chunk, data[:-1] + bytes([data[-1] ^ 1]))
        assert not joiner.install_chunk(chunk, data[:-4])
        assert joiner.install_chunk(chunk, data)
    joiner.install_finish()
    joiner.swap(1)
    assert joiner.root == donor.root
    assert np.array_equal(joiner.anchor, donor.anchor)
    assert np.array_equal(joiner.momentum, donor.momentum)
    assert advance(joiner, mean_payloads(donor, 2)) == advance(donor, mean_payloads(donor, 2))


def test_the_previous_snapshot_is_served_until_overwritten_and_longer_for_one_who_reads_it() -> None:
    state = make()
    first = state.root
    advance(state, mean_payloads(state, 1))
    assert state.leaves_of(first)  # the previous one is still there; now somebody reads it
    chunk = state.read_chunk(first, 0)
    state.begin_apply()
    assert state.read_chunk(first, 0) == chunk
    for c, payload in enumerate(mean_payloads(state, 2)):
        state.apply_chunk(c, payload)
    assert state.read_chunk(first, 0) == chunk
    state.next_root()
    state.swap()
    state.begin_apply()
    state.begin_apply()
    with pytest.raises(SnapshotGone):
        state.read_chunk(first, 0)


def test_a_snapshot_that_nobody_reads_is_not_kept() -> None:
    state = make()
    first = state.root
    advance(state, mean_payloads(state, 1))
    state.begin_apply()
    with pytest.raises(SnapshotGone):
        state.leaves_of(first)


def test_reads_that_race_with_the_next_epoch_give_whole_chunks_or_say_gone() -> None:
    state = make(200_000)
    known = {state.root: [state.read_chunk(state.root, c) for c in range(state.layout.chunks)]}
    torn = []

    def read() -> None:
        for _ in range(300):
            for root in list(known):
                for chunk in (0, 7, 20):
                    try:
                        if state.read_chunk(root, chunk) != known[root][chunk]:
                            torn.append((root, chunk))
                    except SnapshotGone:
                        continue

    with ThreadPoolExecutor(3) as pool:
        readers = [pool.submit(read) for _ in range(2)]
        for epoch in range(8):
            advance(state, mean_payloads(state, epoch))
            known[state.root] = [state.read_chunk(state.root, c) for c in range(state.layout.chunks)]
        for reader in readers:
            reader.result()
    assert not torn
