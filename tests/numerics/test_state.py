"""Two slots, who may read them, and that all peers end on the same bits."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from p2p_diloco.errors import InternalError, ProtocolViolation
from p2p_diloco.numerics import int8
from p2p_diloco.numerics import state as state_module
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


def test_applying_a_chunk_after_the_root_was_taken_changes_the_root() -> None:
    state = make()
    payloads, other = mean_payloads(state, 1), mean_payloads(state, 2)
    state.begin_apply()
    leaves = [state.apply_chunk(c, payloads[c]).leaf for c in range(state.layout.chunks)]
    stale = state.next_root()
    leaves[2] = state.apply_chunk(2, other[2]).leaf
    assert state.next_root() == merkle_root(leaves) != stale
    with pytest.raises(SnapshotGone):
        state.read_chunk(stale, 0)


def test_a_bad_payload_leaves_its_chunk_missing() -> None:
    state = make()
    payloads = mean_payloads(state, 1)
    state.begin_apply()
    for chunk, payload in enumerate(payloads):
        state.apply_chunk(chunk, payload)
    with pytest.raises(ProtocolViolation, match="-128"):
        state.apply_chunk(1, payloads[1][:-1] + b"\x80")
    with pytest.raises(InternalError, match="not complete"):
        state.next_root()
    state.apply_chunk(1, payloads[1])
    assert len(state.next_root()) == 32


def test_an_outer_step_needs_a_begin() -> None:
    state = make()
    payloads = mean_payloads(state, 1)
    with pytest.raises(InternalError, match="begin"):
        state.apply_chunk(0, payloads[0])
    advance(state, payloads)
    previous = state.leaves_of(state.root)
    with pytest.raises(InternalError, match="begin"):
        state.apply_chunk(0, payloads[0])
    assert state.leaves_of(state.root) == previous


def test_a_late_chunk_of_a_given_up_install_does_not_touch_the_next_outer_step() -> None:
    donor, joiner = make(seed=1), make(seed=2)
    payloads = mean_payloads(joiner, 3)
    joiner.install_begin(1, donor.root, donor.leaves_of(donor.root))
    joiner.begin_apply()
    leaves = [joiner.apply_chunk(c, payloads[c]).leaf for c in range(joiner.layout.chunks)]
    assert not joiner.install_chunk(0, donor.read_chunk(donor.root, 0))
    with pytest.raises(InternalError, match="not complete"):
        joiner.install_finish()
    assert joiner.next_root() == merkle_root(leaves)


def test_an_install_can_begin_again_for_another_state() -> None:
    donor, joiner = make(seed=1), make(seed=2)
    old_root = donor.root
    old = [donor.read_chunk(old_root, c) for c in range(donor.layout.chunks)]
    joiner.install_begin(0, old_root, donor.leaves_of(old_root))
    assert joiner.install_chunk(0, old[0])
    advance(donor, mean_payloads(donor, 1))
    joiner.install_begin(1, donor.root, donor.leaves_of(donor.root))
    assert not joiner.install_chunk(1, old[1])
    with pytest.raises(InternalError, match="not complete"):
        joiner.install_finish()
    for chunk in range(donor.layout.chunks):
        assert joiner.install_chunk(chunk, donor.read_chunk(donor.root, chunk))
    joiner.install_finish()
    joiner.swap(1)
    assert (joiner.epoch, joiner.root) == (1, donor.root)


@pytest.mark.parametrize("chunk", [-1, 5, 1 << 40])
def test_a_chunk_that_does_not_exist_is_refused(chunk: int) -> None:
    donor, joiner = make(seed=1), make(seed=2)
    joiner.install_begin(0, donor.root, donor.leaves_of(donor.root))
    assert not joiner.install_chunk(chunk, b"")
    with pytest.raises(ProtocolViolation, match="does not exist"):
        WorkTable(donor, Schema(())).run("read_chunk", (donor.root, chunk))


def test_leaves_that_are_cut_in_other_places_are_refused() -> None:
    donor, joiner = make(seed=1), make(seed=2)
    leaves = donor.leaves_of(donor.root)
    shifted = [leaves[0] + leaves[1][:1], leaves[1][1:], *leaves[2:]]
    assert merkle_root(shifted) == donor.root  # which is why lengths are looked at
    with pytest.raises(ProtocolViolation, match="32 bytes"):
        joiner.install_begin(0, donor.root, shifted)


def test_a_certified_state_that_is_not_finite_is_not_installed() -> None:
    donor, joiner = make(seed=1), make(seed=2)
    donor.buffers.momentum0[9000] = np.inf
    donor.initialise(0)
    before = joiner.root
    joiner.install_begin(0, donor.root, donor.leaves_of(donor.root))
    for chunk in range(donor.layout.chunks):
        assert joiner.install_chunk(chunk, donor.read_chunk(donor.root, chunk))
    with pytest.raises(ProtocolViolation, match="not finite"):
        joiner.install_finish()
    assert joiner.root == before


@pytest.mark.parametrize("value", [2e24, -2e24, np.inf])
def test_a_delta_beyond_what_a_ring_can_sum_is_refused_at_the_source(value: float) -> None:
    state = make(200_000)
    state.buffers.delta[:] = 1e24
    assert state.check_delta(3).finite
    assert np.isfinite(state.codec.decode(state.first(3, 1 << 40), 4096)).all()
    state.buffers.delta[3 * 4096 + 5] = value
    check = state.check_delta(3)
    assert (check.finite, check.bad_index) == (False, 3 * 4096 + 5)


def test_the_quantisation_error_is_shown_per_round() -> None:
    state = make()
    assert state.quantisation_error() == 0.0
    mean_payloads(state, 1)
    assert 0.001 < state.quantisation_error() < 0.02
    state.begin_apply()
    assert state.quantisation_error() == 0.0


def test_a_thread_that_flushes_denormals_is_not_allowed_to_compute_state() -> None:
    state = make(7)
    payload = mean_payloads(state, 1)[0]
    state.begin_apply()
    if not torch.set_flush_denormal(True):
        pytest.skip("this CPU cannot flush denormals")
    try:
        with pytest.raises(InternalError, match="denormal"):
            state.apply_chunk(0, payload)
    finally:
        torch.set_flush_denormal(False)
    assert state.apply_chunk(0, payload).finite


def test_sub_block_size_does_not_change_a_bit_of_the_state(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> bytes:
        state = FlatState(Layout(300_001, 1 << 17), Codec(), 0.7, 0.9, StateBuffers.allocate(300_001))
        state.initialise(0)
        for epoch in range(2):
            advance(state, mean_payloads(state, epoch))
        return state.root

    once = run()
    monkeypatch.setattr(state_module, "_SUB", 1024)
    monkeypatch.setattr(int8, "_SUB", 2048)
    assert run() == once


def test_the_state_follows_torch_over_several_rounds() -> None:
    state = make(5000, kind="fp32")
    parameter = torch.nn.Parameter(torch.from_numpy(state.anchor.copy()))
    optimizer = torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True)
    for epoch in range(5):
        payloads = mean_payloads(state, epoch)
        parameter.grad = torch.from_numpy(state.buffers.delta.copy())
        optimizer.step()
        advance(state, payloads)
        np.testing.assert_allclose(state.anchor, parameter.detach().numpy(), rtol=1e-5, atol=1e-5)


class Gated(np.ndarray):
    """An array whose bytes are copied only once the test allows it."""

    entered: threading.Event
    go_on: threading.Event

    def __array_finalize__(self, source: object) -> None:
        for name in ("entered", "go_on"):
            if hasattr(source, name):
                setattr(self, name, getattr(source, name))

    def tobytes(self, order: str | None = "C") -> bytes:
        self.entered.set()
        assert self.go_on.wait(20)
        return super().tobytes()


def test_a_slot_is_not_reused_while_a_chunk_of_it_is_being_read() -> None:
    state = make()
    first, chunk = state.root, state.read_chunk(state.root, 0)
    gated = state.buffers.anchor0.view(Gated)
    gated.entered, gated.go_on = threading.Event(), threading.Event()
    slot = state._slots[0]
    advance(state, mean_payloads(state, 1))
    payloads = mean_payloads(state, 2)
    slot.anchor = gated
    begun = threading.Event()

    def overwrite() -> None:
        state.begin_apply()
        begun.set()
        state.apply_chunk(0, payloads[0])

    with ThreadPoolExecutor(2) as pool:
        reading = pool.submit(state.read_chunk, first, 0)
        assert gated.entered.wait(20)
        writing = pool.submit(overwrite)
        early = begun.wait(0.2)  # a correct slot never begins here, however slow the machine is
        gated.go_on.set()
        assert reading.result(20) == chunk
        writing.result(20)
    assert not early
    assert state._slots[0].anchor[:4096].view(np.ndarray).tobytes() != chunk[: 4 * 4096]
