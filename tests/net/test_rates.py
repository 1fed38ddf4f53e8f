"""How fast a link is, by a clock that the test turns."""

from __future__ import annotations

import pytest

from p2p_diloco.net.rates import RateMeter


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def send(meter: RateMeter, clock: Clock, bytes_per_s: float, seconds: float, piece: int = 12_500) -> None:
    """One frame after the other, each in pieces, all held up by the link."""
    end_s = clock.now_s + seconds
    while clock.now_s < end_s:
        meter.begin()
        for _ in range(4):
            clock.now_s += piece / bytes_per_s
            meter.sent(piece)
        meter.end()


def test_a_link_that_holds_us_up_is_measured() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    send(meter, clock, 1_250_000, 2.0)
    assert meter.take_kbit_per_s() == pytest.approx(10_000, rel=0.01)
    assert meter.take_kbit_per_s() == 0, "each rate is taken once"


def test_what_the_kernel_takes_at_first_does_not_count() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    meter.begin()
    meter.sent(4_000_000)
    send(meter, clock, 1_250_000, 1.0)
    meter.end()
    assert meter.take_kbit_per_s() == pytest.approx(10_000, rel=0.01)


def test_a_link_that_is_never_busy_for_long_has_no_rate() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for _ in range(50):
        send(meter, clock, 125_000_000, 0.1)
        clock.now_s += 0.1
    assert meter.take_kbit_per_s() == 0


def test_a_slow_start_does_not_speak_for_a_link_and_one_odd_window_neither() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    for share in (0.1, 0.2, 0.4, 0.7):
        send(meter, clock, 1_250_000 * share, 0.3, piece=1250)
    send(meter, clock, 1_250_000, 3.0)
    clock.now_s += 1.0
    send(meter, clock, 5_000_000, 0.6)
    assert meter.take_kbit_per_s() == pytest.approx(10_000, rel=0.05)


def test_a_slow_link_is_measured_too() -> None:
    clock = Clock()
    meter = RateMeter(clock)
    send(meter, clock, 125_000, 8.0, piece=128 << 10)
    assert meter.take_kbit_per_s() == pytest.approx(1_000, rel=0.05)
