"""Figures of the numerics alone: kernels in GB/s, and what a mean over peers loses on the wire."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from p2p_diloco.net.workers import Workers
from p2p_diloco.numerics import kernels
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import BLOCK, Layout, Schema
from p2p_diloco.numerics.state import FlatState, StateBuffers
from p2p_diloco.numerics.work import WorkTable

Flat = NDArray[np.float32]
TIMES = 5


def gigabytes_per_s(nbytes: int, work: Callable[[], object]) -> float:
    """The best of some tries: what the kernel can do, not what else ran."""
    best = float("inf")
    for _ in range(TIMES):
        began_s = time.perf_counter()
        work()
        best = min(best, time.perf_counter() - began_s)
    return nbytes / best / 1e9


def in_own_thread(torch_loops: bool, work: Callable[[], dict[str, float]]) -> dict[str, float]:
    """One thread, with numpy's or torch's inner loops."""
    found: list[dict[str, float]] = []

    def run() -> None:
        if torch_loops:
            kernels.use_torch()
        found.append(work())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


def kernel_rates(values: int, chunk_values: int) -> dict[str, float]:
    """GB/s of fp32 that each operation on a peer's state handles, over all chunks of ``values``."""
    layout = Layout(values, chunk_values)
    buffers = StateBuffers.allocate(values)
    buffers.delta[:] = np.random.default_rng(0).standard_normal(values, np.float32)
    state = FlatState(layout, Codec("int8"), 0.7, 0.9, buffers)
    state.initialise(0)
    chunks = range(layout.chunks)
    payloads = [state.first(chunk, 1) for chunk in chunks]
    copy, nbytes = np.empty_like(buffers.delta), 4 * values
    state.begin_apply()
    out = np.empty(chunk_values, np.float32)
    work: dict[str, Callable[[], object]] = {
        "memory copy": lambda: np.copyto(copy, buffers.delta),
        "encode": lambda: [state.codec.encode(state.buffers.delta[slice(*layout.bounds(c))]) for c in chunks],
        "first (weigh, encode)": lambda: [state.first(c, 3) for c in chunks],
        "hop (decode, add, encode)": lambda: [state.hop(c, 3, payloads[c]) for c in chunks],
        "finish (hop, divide)": lambda: [state.finish(c, 3, 9, payloads[c]) for c in chunks],
        "decode": lambda: [
            state.codec.decode(payloads[c], layout.values(c), out[: layout.values(c)]) for c in chunks
        ],
        "check delta (and hash)": lambda: [state.check_delta(c) for c in chunks],
        "outer step (and hash)": lambda: [state.apply_chunk(c, payloads[c]) for c in chunks],
    }
    return {name: gigabytes_per_s(nbytes, each) for name, each in work.items()}


# --- the event loop meanwhile ---


async def loop_lateness_ms(nbytes: int, threads: int, busy: bool) -> list[float]:
    """How late an event loop is, asked every 5 ms, while workers run hops over ``nbytes`` of fp32 (or, not
    ``busy``, for a second): the loop that gossips and answers probes must keep its rhythm."""
    values = 1 << 20
    layout = Layout(values, values)
    state = FlatState(layout, Codec("int8"), 0.7, 0.9, StateBuffers.allocate(values))
    state.buffers.delta[:] = np.random.default_rng(0).standard_normal(values, np.float32)
    payload, waiting = state.first(0, 1), nbytes // (4 * values) if busy else 0
    workers = Workers(WorkTable(state, Schema(())), threads, lambda error: None)
    warm = asyncio.Event()
    workers.submit("hop", (0, 1, payload), lambda result, error: warm.set())  # imports torch
    await warm.wait()
    late: list[float] = []

    def done(result: object, error: str) -> None:
        nonlocal waiting
        waiting -= 1

    for _ in range(waiting):
        workers.submit("hop", (0, 1, payload), done)
    end_s = time.monotonic() + 1.0
    while waiting > 0 or (not busy and time.monotonic() < end_s):
        before_s = time.monotonic()
        await asyncio.sleep(0.005)
        late.append(1e3 * (time.monotonic() - before_s - 0.005))
    await workers.close()
    return late


# --- what the mean loses ---


def draw(kind: str, peers: int, values: int, seed: int) -> list[Flat]:
    """One delta per peer."""
    random = np.random.default_rng([seed, peers])
    if kind == "normal":
        return [random.standard_normal(values, np.float32) for _ in range(peers)]
    if kind == "laplace":
        return [random.laplace(size=values).astype(np.float32) for _ in range(peers)]
    if kind == "student-t3":
        return [random.standard_t(3, values).astype(np.float32) for _ in range(peers)]
    layers = np.repeat(10.0 ** random.uniform(-3, 0, 32), -(-values // 32))[:values]
    return [(random.standard_normal(values) * layers).astype(np.float32) for _ in range(peers)]


KINDS = ("normal", "laplace", "student-t3", "layers")


def by_ring(deltas: Sequence[Flat]) -> Flat:
    """The mean as our ring makes it: re-encoded at every hop."""
    codec, size, count = Codec("int8"), deltas[0].size, len(deltas)
    payload = codec.first(deltas[0], 1)
    for delta in deltas[1:-1]:
        payload = codec.hop(payload, delta, 1)
    return codec.decode(codec.finish(payload, deltas[-1], 1, count), size)


def by_direct(deltas: Sequence[Flat]) -> Flat:
    """Each delta encoded once and sent to the owner, whose mean is encoded once."""
    codec, size = Codec("int8"), deltas[0].size
    total = deltas[-1].copy()
    for delta in deltas[:-1]:
        total += codec.decode(codec.encode(delta), size)
    return codec.decode(codec.encode(total / np.float32(len(deltas))), size)


def six_sigma(x: Flat) -> Flat:
    """Whole-tensor uniform 8 bit within 6 standard deviations of the mean, decoded at once: what hivemind's
    uniform 8-bit codec and INTELLECT-1's ring do (buckets by their middle, tails clipped)."""
    middle, sigma = float(x.mean()), float(x.std())
    step = 12 * sigma / 256 or 1.0
    codes = np.clip(np.round((x - middle) / step), -128, 127)
    return (codes * step + middle).astype(np.float32)


def by_six_sigma(deltas: Sequence[Flat]) -> Flat:
    """A ring that re-encodes at every hop with one scale for the whole tensor."""
    total = six_sigma(deltas[0])
    for delta in deltas[1:-1]:
        total = six_sigma(total + delta)
    return six_sigma((total + deltas[-1]) / np.float32(len(deltas)))


def relative_error(found: Flat, deltas: Sequence[Flat]) -> float:
    exact = np.mean([delta.astype(np.float64) for delta in deltas], axis=0)
    return float(np.linalg.norm(found - exact) / np.linalg.norm(exact))


def mean_errors(
    peers: int, kind: str, values: int = 256 * BLOCK, seeds: int = 3
) -> tuple[float, float, float]:
    """Relative errors (root of lost over whole energy) of the ring, the direct plan and the 6-sigma ring."""
    runs = []
    for seed in range(seeds):
        deltas = draw(kind, peers, values, seed)
        runs.append([relative_error(way(deltas), deltas) for way in (by_ring, by_direct, by_six_sigma)])
    ring, direct, sigma = np.mean(runs, axis=0)
    return float(ring), float(direct), float(sigma)
