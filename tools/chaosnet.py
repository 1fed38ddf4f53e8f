"""Network namespaces with a bridge between them, one-way packet loss, and small disks: Linux, root, `ip`.

Each peer gets a namespace with one Ethernet device; a further namespace holds the bridge that joins them, so
nothing here touches the machine's own network. Addresses of neighbours are fixed by hand. Packets from A to B
are dropped by letting A believe in a hardware address for B that nobody has: they leave A without an error,
and no FIN, RST or ICMP comes back, as when a router in between dies. That needs no firewall tool.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from chaosswarm import Place

NOWHERE = "02:00:00:00:ff:ff"  # a locally administered hardware address that no device here has
COMMAND_S = 20.0
PORT, DHT_PORT, PROBE_PORT = 4001, 4002, 4003
# One datagram, and status 0 for whoever gets it within a second.
_LISTEN = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.bind((sys.argv[1], {PROBE_PORT}))
    s.settimeout(1)
    print("ready", flush=True)
    s.recv(9)
"""
_SPEAK = f"""
import socket, sys
with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
    s.sendto(b"x", (sys.argv[1], {PROBE_PORT}))
"""


class CannotBeMadeError(Exception):
    """This machine or user may not make what a scenario needs; the text is the exact reason."""


def command(*words: str) -> str:
    """Run one command to its end; CannotBeMadeError with what it said if it fails."""
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=COMMAND_S, check=False)
    except OSError as error:
        raise CannotBeMadeError(f"{words[0]}: {error.strerror}") from None
    if done.returncode:
        said = (done.stderr or done.stdout).strip().splitlines()
        raise CannotBeMadeError(f"{' '.join(words)}: {said[-1] if said else f'status {done.returncode}'}")
    return done.stdout


@dataclass
class Network:
    """The namespaces of one swarm. ``dropped`` holds the directed pairs whose packets are lost now."""

    hub: str
    names: list[str]
    dropped: set[tuple[int, int]] = field(default_factory=set)

    def places(self) -> list[Place]:
        prefixes = [("ip", "netns", "exec", name) for name in self.names]
        return [Place(host(i), PORT, DHT_PORT, prefix) for i, prefix in enumerate(prefixes)]

    def drop(self, sources: Iterable[int], targets: Iterable[int]) -> None:
        """From now on packets from each source to each target are lost (peers are counted from 0)."""
        for pair in _pairs(sources, targets):
            self._believe(*pair, NOWHERE)
            self.dropped.add(pair)

    def split(self, one: Sequence[int], other: Sequence[int]) -> None:
        """Lose all packets between two groups, both ways."""
        self.drop(one, other)
        self.drop(other, one)

    def heal(self) -> None:
        """Deliver all packets again."""
        for source, target in sorted(self.dropped):
            self._believe(source, target, hardware(target))
        self.dropped.clear()

    def delivers(self, source: int, target: int) -> bool:
        """True if a packet that one peer's namespace sends comes out in another's."""
        inside = [
            ["ip", "netns", "exec", self.names[index], sys.executable, "-c"] for index in (source, target)
        ]
        listener = subprocess.Popen(
            [*inside[1], _LISTEN, host(target)], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        try:
            assert listener.stdout is not None
            listener.stdout.readline()  # it listens now
            command(*inside[0], _SPEAK, host(target))
            return listener.wait(COMMAND_S) == 0
        finally:
            listener.kill()
            listener.communicate()

    def _believe(self, source: int, target: int, address: str) -> None:
        neighbour = ("neigh", "replace", host(target), "lladdr", address, "nud", "permanent", "dev", "eth0")
        command("ip", "-n", self.names[source], *neighbour)


def host(index: int) -> str:
    return f"10.77.0.{index + 1}"


def hardware(index: int) -> str:
    return f"02:00:00:00:00:{index + 1:02x}"


def _pairs(sources: Iterable[int], targets: Iterable[int]) -> list[tuple[int, int]]:
    return [pair for pair in itertools.product(sources, targets) if pair[0] != pair[1]]


@contextlib.contextmanager
def network(count: int) -> Iterator[Network]:
    """Make the namespaces of ``count`` peers and remove them at the end, half-made ones too."""
    stem = f"chaos{os.getpid()}"
    made = Network(f"{stem}-hub", [f"{stem}-{i + 1}" for i in range(count)])
    try:
        _build(made)
        yield made
    finally:
        for name in [*made.names, made.hub]:
            if (Path("/run/netns") / name).exists():
                command("ip", "netns", "del", name)


def _build(made: Network) -> None:
    command("ip", "netns", "add", made.hub)
    command("ip", "-n", made.hub, "link", "add", "br0", "type", "bridge")
    command("ip", "-n", made.hub, "link", "set", "br0", "up")
    for index, name in enumerate(made.names):
        command("ip", "netns", "add", name)
        port = f"port{index + 1}"
        pair = ("type", "veth", "peer", "name", "eth0", "netns", name, "address", hardware(index))
        command("ip", "-n", made.hub, "link", "add", port, *pair)
        command("ip", "-n", made.hub, "link", "set", port, "master", "br0", "up")
        command("ip", "-n", name, "link", "set", "lo", "up")
        command("ip", "-n", name, "address", "add", f"{host(index)}/24", "dev", "eth0")
        command("ip", "-n", name, "link", "set", "eth0", "up")
    count = len(made.names)
    for source, target in _pairs(range(count), range(count)):
        made._believe(source, target, hardware(target))


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A tmpfs of that size on ``folder``, taken down at the end."""
    folder.mkdir(parents=True, exist_ok=True)
    command("mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        command("umount", "--lazy", str(folder))


def fill(path: Path) -> int:
    """Write into ``path`` until the disk takes no more, as another program would; returns the bytes."""
    block = b"\xff" * 4096
    with open(path, "ab", buffering=0) as file:
        while True:
            try:
                if file.write(block) < len(block):
                    break
            except OSError:
                break
        return file.tell()
