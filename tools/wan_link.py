"""The network that the WAN emulator plays, as arithmetic: the caller brings the clock and the packets.

A packet goes through its sender's uplink, its pair's link, and its receiver's downlink. Each is a rate with a
queue in front whose tail is dropped; the link also has delay, jitter and random loss. Nothing here waits or
reads a clock, so tests run it in virtual time.

The kernel hands over bundles of TCP segments (up to 64 KiB) where a real network would carry them one by one.
Therefore a stage passes a bundle's first bit on at once (begin) and its last bit when it is through (finish),
rather than store it whole three times; and a bundle of n segments is lost with the chance that at least one
of its n is.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from heapq import heappop, heappush
from random import Random

from wan_scenario import Change, Scenario

FOREVER = float("inf")


class Stage:
    """A rate (bits per second, 0 for none) and the bytes that may wait for it."""

    __slots__ = ("free_s", "queue_bytes", "seconds_per_byte")

    def __init__(self, bits_per_s: float, queue_bytes: int) -> None:
        self.seconds_per_byte = 8 / bits_per_s if bits_per_s else 0.0
        self.queue_bytes = queue_bytes
        self.free_s = 0.0

    def offer(self, begin_s: float, size: int) -> float | None:
        """The moment when the last bit of a packet that begins to arrive now is through; None: no room."""
        cost = self.seconds_per_byte
        if not cost:
            return begin_s
        wait_s = self.free_s - begin_s
        if wait_s <= 0:
            self.free_s = begin_s + size * cost  # an idle link takes any packet
        elif wait_s / cost + size > self.queue_bytes:
            return None
        else:
            self.free_s += size * cost
        return self.free_s

    def change(self, now_s: float, bits_per_s: float, queue_bytes: int) -> None:
        """Go on at another rate: those that come now find the bytes that wait moving at the new one."""
        before, self.seconds_per_byte = self.seconds_per_byte, 8 / bits_per_s if bits_per_s else 0.0
        self.queue_bytes = queue_bytes
        if before:
            waiting = max(0.0, self.free_s - now_s) / before
            self.free_s = now_s + waiting * self.seconds_per_byte
        else:
            self.free_s = now_s


@dataclass
class Counters:
    """What became of the packets (bundles) of one ordered pair; bytes as on a real wire, with headers."""

    packets: int = 0
    bytes: int = 0
    delivered_packets: int = 0
    delivered_bytes: int = 0
    lost: int = 0
    dropped_up: int = 0
    dropped_link: int = 0
    dropped_down: int = 0

    def as_dict(self) -> dict[str, int]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


class Pair:
    """One direction between two peers."""

    __slots__ = (
        "counters",
        "delay_s",
        "down",
        "jitter_s",
        "last_s",
        "loss",
        "random",
        "stage",
        "target",
        "up",
    )

    def __init__(self, up: Stage, stage: Stage, down: Stage, target: int, random: Random) -> None:
        self.up, self.stage, self.down, self.target, self.random = up, stage, down, target, random
        self.delay_s = self.jitter_s = self.loss = self.last_s = 0.0
        self.counters = Counters()


class Network:
    """All peers' lines and all ordered pairs, with the packets that are under way."""

    def __init__(self, scenario: Scenario, start_s: float) -> None:
        self.scenario, self.start_s = scenario, start_s
        self._peers, self._specs = list(scenario.peers), dict(scenario.pairs)
        self._lines: list[tuple[Stage, Stage]] = []
        for peer in self._peers:
            rates = (peer.up_mbit, peer.down_mbit)
            up, down = (self._stage(rate, peer.queue_kib) for rate in rates)
            self._lines.append((up, down))
        self.pairs: dict[tuple[int, int], Pair] = {}
        for (a, b), spec in self._specs.items():
            stage = self._stage(spec.rate_mbit, spec.queue_kib)
            random = Random(f"{scenario.seed} {a} {b}")
            self.pairs[a, b] = Pair(self._lines[a][0], stage, self._lines[b][1], b, random)
            self._tune(a, b)
        self._changes = list(scenario.changes)
        # (moment, number, pair, finish, size, packet); finish < 0: it is through the downlink
        self._heap: list[tuple[float, int, Pair, float, int, bytes]] = []
        self._number = 0
        self.deliveries, self.late_total_s, self.late_most_s = 0, 0.0, 0.0

    def _stage(self, mbit: float, queue_kib: float | None) -> Stage:
        return Stage(self.scenario.bits_per_s(mbit), self.scenario.queue_bytes(mbit, queue_kib))

    def _tune(self, a: int, b: int) -> None:
        pair, spec = self.pairs[a, b], self._specs[a, b]
        pair.delay_s, pair.jitter_s, pair.loss = spec.delay_ms / 1e3, spec.jitter_ms / 1e3, spec.loss

    def send(self, now_s: float, pair: Pair, packet: bytes, size: int, segments: int = 1) -> None:
        """Take a packet at its sender: drop it, lose it, or put it on its way."""
        counters = pair.counters
        counters.packets += 1
        counters.bytes += size
        up_s = pair.up.offer(now_s, size)
        if up_s is None:
            counters.dropped_up += 1
            return
        # What the uplink has room for begins when what waits before it is through.
        begin_s = max(now_s, up_s - size * pair.up.seconds_per_byte)
        through_s = pair.stage.offer(begin_s, size)
        if through_s is None:
            counters.dropped_link += 1
            return
        begin_s = max(begin_s, through_s - size * pair.stage.seconds_per_byte)
        if pair.loss and pair.random.random() >= (1 - pair.loss) ** segments:
            counters.lost += 1
            return
        delay_s = pair.delay_s
        if pair.jitter_s:
            delay_s += pair.jitter_s * pair.random.random()
        finish_s = max(up_s, through_s) + delay_s
        begin_s += delay_s
        if finish_s < pair.last_s:  # jitter and changes delay, they do not reorder
            begin_s, finish_s = begin_s + pair.last_s - finish_s, pair.last_s
        pair.last_s = finish_s
        self._number += 1
        if pair.down.seconds_per_byte:
            heappush(self._heap, (begin_s, self._number, pair, finish_s, size, packet))
        else:
            heappush(self._heap, (finish_s, self._number, pair, -1.0, size, packet))

    def due(self, now_s: float) -> list[tuple[int, bytes]]:
        """What has arrived by now, in order: (peer, packet)."""
        while self._changes and self.start_s + self._changes[0].at_s <= now_s:
            self.apply(self._changes.pop(0), now_s)
        heap, arrived = self._heap, []
        while heap and heap[0][0] <= now_s:
            moment_s, _, pair, finish_s, size, packet = heappop(heap)
            if finish_s < 0:
                late_s = now_s - moment_s
                self.deliveries += 1
                self.late_total_s += late_s
                if late_s > self.late_most_s:
                    self.late_most_s = late_s
                pair.counters.delivered_packets += 1
                pair.counters.delivered_bytes += size
                arrived.append((pair.target, packet))
                continue
            # It reached the downlink, where other peers' packets compete: only now is its turn known.
            through_s = pair.down.offer(moment_s, size)
            if through_s is None:
                pair.counters.dropped_down += 1
                continue
            self._number += 1
            heappush(heap, (max(finish_s, through_s), self._number, pair, -1.0, size, packet))
        return arrived

    def next_s(self) -> float:
        """When something will be due."""
        moment_s = self._heap[0][0] if self._heap else FOREVER
        if self._changes:
            moment_s = min(moment_s, self.start_s + self._changes[0].at_s)
        return moment_s

    def apply(self, change: Change, now_s: float) -> None:
        """Change links or a peer's line from now on; packets under way keep their times."""
        scenario = self.scenario
        if change.peer is not None:
            peer = self._peers[change.peer] = replace(self._peers[change.peer], **change.values)
            for stage, mbit in zip(self._lines[change.peer], (peer.up_mbit, peer.down_mbit), strict=True):
                stage.change(now_s, scenario.bits_per_s(mbit), scenario.queue_bytes(mbit, peer.queue_kib))
        for a, b in change.pairs:
            spec = self._specs[a, b] = replace(self._specs[a, b], **change.values)
            queue = scenario.queue_bytes(spec.rate_mbit, spec.queue_kib)
            self.pairs[a, b].stage.change(now_s, scenario.bits_per_s(spec.rate_mbit), queue)
            self._tune(a, b)

    def statistics(self) -> dict[str, object]:
        """Counters of every pair that was used, and how late the emulator itself was."""
        used = {ends: pair.counters for ends, pair in self.pairs.items() if pair.counters.packets}
        peers = self.scenario.peers
        return {
            "pairs": {f"{peers[a].name} {peers[b].name}": each.as_dict() for (a, b), each in used.items()},
            "under_way": len(self._heap),
            "late_mean_ms": 1e3 * self.late_total_s / max(1, self.deliveries),
            "late_most_ms": 1e3 * self.late_most_s,
        }
