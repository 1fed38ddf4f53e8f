"""Both sets of inner loops: the same bits, each in the threads that chose it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import pytest

from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.numerics import int8, kernels
from p2p_diloco.numerics.int8 import Codec, NonFiniteError

T = TypeVar("T")
SIZES = (0, 1, 255, 256, 257, 100_000, 131_072, 131_073, 400_001)


def with_torch(work: Callable[[], T]) -> T:
    """The result of ``work`` in a thread of its own that uses torch's kernels."""
    found: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            kernels.use_torch()
            assert kernels.chosen().name == "torch"
            found.append(work())
        except BaseException as error:  # noqa: BLE001 - raised again below
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    return found[0]


def sample(size: int, seed: int) -> np.ndarray:
    """Normal values over many magnitudes, zeros and denormals among them."""
    random = np.random.default_rng(seed)
    x = random.standard_normal(size) * 10.0 ** random.integers(-44, 20, size)
    x[random.random(size) < 0.05] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("size", SIZES)
def test_every_step_of_a_route_has_the_same_bits_with_both(size: int) -> None:
    codec, a, b, c = Codec("int8"), sample(size, 1), sample(size, 2), sample(size, 3)

    def route() -> list[bytes]:
        first = codec.first(a, 3)
        hop = codec.hop(first, b, 7)
        mean = codec.finish(hop, c, 2, 12)
        return [first, hop, mean, codec.single(a), codec.decode(mean, size).tobytes()]

    assert with_torch(route) == route()


@pytest.mark.parametrize("blocks", [1, 3, 512])
def test_the_loops_agree_value_by_value(blocks: int) -> None:
    torch_kernels = kernels.torch_kernels()
    rows = sample(blocks * 256, 4).reshape(blocks, 256)
    factors = sample(blocks, 5)
    factors[0] = 0
    found = []
    for each in (kernels.NUMPY, torch_kernels):
        peaks, scaled = np.full(blocks, -1, np.float32), rows.copy()
        each.peaks(rows, peaks)
        each.scale(scaled, factors, scaled)
        found.append((peaks.tobytes(), scaled.tobytes()))
    assert found[0] == found[1]


def test_nan_and_infinity_are_found_by_both() -> None:
    for bad in (np.nan, np.inf, -np.inf):
        x = sample(70_000, 6)
        x[66_000] = bad
        with pytest.raises(NonFiniteError):
            with_torch(lambda x=x: Codec("int8").encode(x))  # type: ignore[misc]
    big = np.full(300, 3e38, np.float32)
    payload = Codec("int8").encode(big)
    with pytest.raises(ProtocolViolation, match="sum"):
        with_torch(lambda: Codec("int8").hop(payload, big, 1))


def test_only_the_thread_that_asked_has_torchs_loops_on_one_core() -> None:
    import torch

    before = torch.get_num_threads()
    assert with_torch(torch.get_num_threads) == 1
    assert kernels.chosen().name == "numpy"
    assert torch.get_num_threads() == before
    later: list[int] = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [before]


def test_a_payload_is_only_read_and_work_arrays_are_not_shared_between_threads() -> None:
    codec, x = Codec("int8"), sample(200_000, 7)
    payload = codec.encode(x)
    expected = codec.hop(payload, x, 1)
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(with_torch(lambda: codec.hop(payload, x, 1))))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [expected] * 4
    assert payload == codec.encode(x)
    assert int8.BLOCK == 256
