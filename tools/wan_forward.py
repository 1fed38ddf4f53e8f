"""The process that carries the WAN emulator's packets: one loop over all devices. Started by tools/wan.py.

It gets the open tun devices as file descriptors, the scenario as one JSON line on standard input, and answers
further lines (statistics, changes) on standard output. When standard input ends without a good-bye, whoever
started it has died: it then removes the namespaces itself, so that even SIGKILL leaves nothing behind.

select() and not epoll: its time-out counts in microseconds, epoll's in milliseconds.
"""

from __future__ import annotations

import errno
import gc
import json
import os
import select
import signal
import sys
import time
from struct import unpack_from
from typing import Any

from wan_link import Network, Pair
from wan_scenario import ScenarioError, change_of, parse

BATCH = 32  # packets read from one device before the others get their turn
HEADER = 10  # struct virtio_net_hdr: how a bundle is to be cut; passed on as it came
PACKET = 65535 + HEADER
SEGMENT_HEADER = 52  # IPv4 and TCP with time stamps, which each segment of a bundle would carry
WAIT_S = 0.5  # longest sleep


class Forwarder:
    """Moves packets between the devices by the network's arithmetic."""

    def __init__(self, network: Network, devices: list[int]) -> None:
        self.network, self.devices = network, devices
        self.ends = {fd: n for n, fd in enumerate(devices)}
        # The last byte of the address 10.77.0.n is the peer's number plus one.
        self.routes: list[dict[int, Pair]] = [
            {b + 1: pair for (a, b), pair in network.pairs.items() if a == n} for n in range(len(devices))
        ]
        self.strangers = self.refused = 0
        self.more = b""
        self.running, self.said_goodbye = True, False

    def run(self) -> None:
        """Until a good-bye or the end of standard input."""
        network, devices, clock = self.network, self.devices, time.monotonic
        watched = [*devices, 0]
        while self.running:
            wait_s = min(WAIT_S, max(0.0, network.next_s() - clock()))
            for fd in select.select(watched, (), (), wait_s)[0]:
                if fd:
                    self.take(fd)
                else:
                    self.obey()
            for peer, packet in network.due(clock()):
                try:
                    os.write(devices[peer], packet)
                except OSError:  # the device is down or out of memory, as a network card can be
                    self.refused += 1

    def take(self, fd: int) -> None:
        """Read what a peer sends."""
        read, send, clock = os.read, self.network.send, time.monotonic
        routes = self.routes[self.ends[fd]]
        for _ in range(BATCH):
            try:
                packet = read(fd, PACKET)
            except BlockingIOError:
                return
            except OSError as error:
                if error.errno != errno.EIO:  # EIO: the device was set down, which a test may want
                    raise
                return
            pair = routes.get(packet[29]) if len(packet) >= 30 and packet[26:29] == b"\x0a\x4d\x00" else None
            if pair is None or packet[10] >> 4 != 4:
                self.strangers += 1
                continue
            size, segments = len(packet) - HEADER, 1
            if packet[1]:  # a bundle: count the headers that it would have in pieces
                segments = max(1, -(-(size - SEGMENT_HEADER) // (unpack_from("H", packet, 4)[0] or size)))
                size += (segments - 1) * SEGMENT_HEADER
            send(clock(), pair, packet, size, segments)

    def obey(self) -> None:
        """Do what the lines on standard input ask for."""
        data = os.read(0, 65536)
        if not data:
            self.running = False
            return
        *lines, self.more = (self.more + data).split(b"\n")
        for line in lines:
            answer = self.answer(json.loads(line))
            os.write(1, json.dumps(answer).encode() + b"\n")

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        match order["do"]:
            case "statistics":
                return {**self.network.statistics(), "strangers": self.strangers, "refused": self.refused}
            case "change":
                try:
                    change = change_of(self.network.scenario, order["change"])
                except ScenarioError as error:
                    return {"error": str(error)}
                self.network.apply(change, time.monotonic())
                return {}
            case "stop":
                self.running, self.said_goodbye = False, True
                return {}
            case other:
                return {"error": f"no such order: {other}"}


def remove_namespaces(namespaces: list[str]) -> None:
    """End what runs in them and remove them; the caller has died."""
    from wan import end_processes, remove  # only here: wan.py is not needed to carry packets

    for name in namespaces:
        end_processes(name)
        remove(name)


def go_first() -> None:
    """Run before ordinary processes: a late emulator is a slow network. On busy CPUs it was 0.02 ms late on
    average this way, 0.15 ms with the best priority of the ordinary kind."""
    try:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(1))
    except PermissionError:
        os.setpriority(os.PRIO_PROCESS, 0, -20)


def main() -> int:
    with open(0, "rb", buffering=0, closefd=False) as orders:  # unbuffered: later lines are read elsewhere
        start = json.loads(orders.readline())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    scenario = parse(start["text"], start["name"], start["scale"])
    forwarder = Forwarder(Network(scenario, time.monotonic()), start["devices"])
    go_first()
    gc.disable()  # nothing here makes cycles, and a collection would delay packets
    os.write(1, b"{}\n")
    forwarder.run()
    if not forwarder.said_goodbye:
        remove_namespaces(start["namespaces"])
    return 0


if __name__ == "__main__":
    sys.exit(main())
