"""The two inner loops of the codec that numpy is slow at, and who runs them in which thread.

Over rows of 256 values numpy pays per row: the largest magnitude of each row runs at 10 GB/s and a factor
per row at 12, where torch's kernels reach 50 and 34 in the same cache (docs/LOG.md). Both give the
same bits, since a maximum is exact and a product of two fp32 values has one correctly rounded result; there
is no sum of products here that one of them could fuse. So which one a thread uses is its own business.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]


@dataclass(frozen=True)
class Kernels:
    """``peaks(rows, out)``: the largest value of each row, NaN if it has one; fp32 [n, k] to [n].
    ``scale(rows, factors, out)``: each row times its factor; ``out`` may be ``rows``. All are writable and
    C-contiguous."""

    name: str
    peaks: Callable[[Array, Array], None]
    scale: Callable[[Array, Array, Array], None]


def _numpy_peaks(rows: Array, out: Array) -> None:
    np.max(rows, axis=1, out=out)


def _numpy_scale(rows: Array, factors: Array, out: Array) -> None:
    np.multiply(rows, factors[:, None], out=out)


NUMPY = Kernels("numpy", _numpy_peaks, _numpy_scale)


class _Chosen(threading.local):
    kernels: Kernels = NUMPY


_chosen = _Chosen()
_importing = threading.Lock()


def chosen() -> Kernels:
    """What the codec uses in this thread: numpy's, unless `use_torch` was called in it."""
    return _chosen.kernels


def torch_kernels() -> Kernels:
    """The same on torch's CPU kernels; imports torch, which takes seconds."""
    import torch

    from_numpy: Callable[[Any], Any] = torch.from_numpy

    def peaks(rows: Array, out: Array) -> None:
        torch.amax(from_numpy(rows), 1, out=from_numpy(out))

    def scale(rows: Array, factors: Array, out: Array) -> None:
        torch.mul(from_numpy(rows), from_numpy(factors)[:, None], out=from_numpy(out))

    return Kernels("torch", peaks, scale)


def use_torch() -> None:
    """For a thread that does nothing but numerics: torch's kernels from now on, on this thread alone.

    torch would split each of these calls over all cores, against the other workers. Its limit is kept per
    thread, but setting it also changes what threads begin with that come later; so that is put back from a
    thread of its own.
    """
    import torch

    with _importing:
        before = torch.get_num_threads()
        torch.set_num_threads(1)
        helper = threading.Thread(target=torch.set_num_threads, args=(before,), name="torch threads")
        helper.start()
        helper.join()
    _chosen.kernels = torch_kernels()
