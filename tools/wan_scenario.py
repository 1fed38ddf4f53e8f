"""Scenario files of the WAN emulator: who is where, how far apart, how fast; read strictly, told in one line.

A scenario is a TOML file. Delays are one way, in milliseconds. Rates are those of the real network, in
Mbit/s; `scale` says by how much the emulator divides all of them, so that one machine can play many. Delays
are not scaled.

    about = "one line for people"
    scale = 10                    # emulated rate = rate in this file / scale
    seed = 1                      # of random loss and jitter
    congestion = "cubic"          # TCP's congestion control inside the namespaces
    tcp_buffer_mib = 6            # most that a socket holds; left out, enough for the fattest way
    [link]                        # what every ordered pair has unless something below says otherwise
    delay_ms = 1                  # also: jitter_ms, loss (0 to 1), rate_mbit, queue_kib
    [between]                     # pairs of regions, in both directions
    "eu us-east" = { delay_ms = 40, rate_mbit = 1000 }
    [[peers]]
    name = "berlin"
    region = "eu"
    up_mbit = 1000                # shared by all that this peer sends; also: down_mbit, queue_kib
    [[links]]                     # one ordered pair; "*" stands for every peer, both = true for the way back
    from = "berlin"
    to = "*"
    loss = 0.001
    [[changes]]                   # the same at a time after the start: `from`, `to`, or `peer` with its rates
    at_s = 30
    from = "berlin"
    to = "*"
    rate_mbit = 50

A rate of 0 means "not limited". `queue_kib` is what may wait in front of a link before its tail is dropped;
left out, it is a tenth of a second of the link's emulated rate, and at least 256 KiB. It is not scaled.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent / "wan"
PEERS_AT_MOST = 250  # addresses 10.77.0.1 to 10.77.0.250
QUEUE_S = 0.1  # default depth of a queue: between a router's few milliseconds and a home's bloat
QUEUE_AT_LEAST = 256 * 1024  # a few of the 64 KiB bundles in which the kernel hands us segments
TOP_KEYS = (
    "about",
    "scale",
    "seed",
    "congestion",
    "tcp_buffer_mib",
    "link",
    "between",
    "peers",
    "links",
    "changes",
)
PAIR_KEYS = ("delay_ms", "jitter_ms", "loss", "rate_mbit", "queue_kib")
PEER_RATES = ("up_mbit", "down_mbit", "queue_kib")


class ScenarioError(ValueError):
    """What is wrong with a scenario, in one line."""


@dataclass(frozen=True)
class PairSpec:
    """One direction between two peers, in real figures; queue_kib None means the default."""

    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    rate_mbit: float = 0.0
    queue_kib: float | None = None


@dataclass(frozen=True)
class PeerSpec:
    """One peer and its own line to the network, in real figures."""

    name: str
    region: str = ""
    up_mbit: float = 0.0
    down_mbit: float = 0.0
    queue_kib: float | None = None


@dataclass(frozen=True)
class Change:
    """What becomes different `at_s` seconds after the start: of ordered pairs, or of one peer's line."""

    at_s: float
    pairs: tuple[tuple[int, int], ...] = ()
    peer: int | None = None
    values: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Scenario:
    """A parsed scenario; `text` is its source, from which another process can make the same one again."""

    name: str
    about: str
    scale: float
    seed: int
    congestion: str
    tcp_buffer_mib: float | None
    peers: tuple[PeerSpec, ...]
    pairs: dict[tuple[int, int], PairSpec]
    changes: tuple[Change, ...]
    text: str

    def bits_per_s(self, mbit: float) -> float:
        """The emulated rate of a real one; 0 stays 0, which is "not limited"."""
        return mbit * 1e6 / self.scale

    def queue_bytes(self, mbit: float, queue_kib: float | None) -> int:
        if queue_kib is not None:
            return int(queue_kib * 1024)
        return max(QUEUE_AT_LEAST, int(self.bits_per_s(mbit) / 8 * QUEUE_S))

    def path_bits_per_s(self, source: int, target: int) -> float:
        """The emulated rate of the slowest part of a way; 0 if nothing limits it."""
        pair = self.pairs[source, target]
        rates = (self.peers[source].up_mbit, pair.rate_mbit, self.peers[target].down_mbit)
        return self.bits_per_s(min((rate for rate in rates if rate), default=0.0))

    def round_trip_s(self, source: int, target: int) -> float:
        """Delay there and back, without jitter and queues."""
        return (self.pairs[source, target].delay_ms + self.pairs[target, source].delay_ms) / 1e3


def names() -> list[str]:
    """The scenarios that come with the project."""
    return sorted(path.stem for path in FOLDER.glob("*.toml"))


def load(what: str | Path, scale: float | None = None) -> Scenario:
    """Read a scenario by its name in tools/wan/ or by its path; `scale` replaces the one in the file."""
    path = FOLDER / f"{what}.toml" if str(what) in names() else Path(what)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        known = ", ".join(names())
        raise ScenarioError(f"{what}: cannot be read ({error}); scenarios by name: {known}") from error
    return parse(text, path.stem, scale)


def parse(text: str, name: str = "scenario", scale: float | None = None) -> Scenario:
    """Turn TOML into a scenario, or say in one line what is wrong with it."""
    try:
        return _Reader(tomllib.loads(text)).scenario(name, text, scale)
    except tomllib.TOMLDecodeError as error:
        raise ScenarioError(f"{name}: not TOML: {error}") from error
    except ScenarioError as error:
        raise ScenarioError(f"{name}: {error}") from error


def change_of(scenario: Scenario, entry: dict[str, Any]) -> Change:
    """Read one change as a scenario file writes it; `at_s` may be left out."""
    return _change({"at_s": 0, **entry}, "change", [peer.name for peer in scenario.peers])


class _Reader:
    """Reads the parsed TOML top to bottom; every complaint names the place."""

    def __init__(self, data: dict[str, Any]) -> None:
        _only(data, TOP_KEYS, "")
        self.data = data

    def scenario(self, name: str, text: str, scale: float | None) -> Scenario:
        peers = self.peers()
        names = [peer.name for peer in peers]
        real_scale = _number(self.data, "scale", "", 1.0)
        buffer = self.data.get("tcp_buffer_mib")
        factor = real_scale if scale is None else scale
        if not factor > 0:
            raise ScenarioError(f"scale must be more than 0, not {factor}")
        changes = [_change(entry, f"changes[{n}]", names) for n, entry in enumerate(self.tables("changes"))]
        return Scenario(
            name=name,
            about=_text(self.data, "about", ""),
            scale=factor,
            seed=int(_number(self.data, "seed", "", 1)),
            congestion=_text(self.data, "congestion", "", "cubic"),
            tcp_buffer_mib=None if buffer is None else _number(self.data, "tcp_buffer_mib", "", 0.0),
            peers=peers,
            pairs=self.pairs(peers, names),
            changes=tuple(sorted(changes, key=lambda change: change.at_s)),
            text=text,
        )

    def tables(self, key: str) -> list[dict[str, Any]]:
        found = self.data.get(key, [])
        if not isinstance(found, list) or not all(isinstance(entry, dict) for entry in found):
            raise ScenarioError(f"{key} must be written as [[{key}]] tables")
        return found

    def peers(self) -> tuple[PeerSpec, ...]:
        peers: list[PeerSpec] = []
        for n, entry in enumerate(self.tables("peers")):
            where = f"peers[{n}]"
            _only(entry, ("name", "region", *PEER_RATES), where)
            values = _values(entry, PEER_RATES, where)
            name = _text(entry, "name", where, f"peer{n + 1}")
            if not re.fullmatch(r"[a-z0-9][a-z0-9-]{0,31}", name):
                raise ScenarioError(
                    f"{where}: name {name!r} must be small letters, digits and '-', at most 32"
                )
            if name in [peer.name for peer in peers]:
                raise ScenarioError(f"{where}: a second peer is called {name!r}")
            peers.append(PeerSpec(name, _text(entry, "region", where, ""), **values))
        if not 2 <= len(peers) <= PEERS_AT_MOST:
            raise ScenarioError(f"2 to {PEERS_AT_MOST} [[peers]] are needed, not {len(peers)}")
        return tuple(peers)

    def pairs(self, peers: tuple[PeerSpec, ...], names: list[str]) -> dict[tuple[int, int], PairSpec]:
        """Defaults, then what is said between regions, then what is said of single links."""
        base = PairSpec(**_pair_values(self.data.get("link", {}), "link"))
        between = self.between({peer.region for peer in peers})
        homeless = [peer.name for peer in peers if between and not peer.region]
        if homeless:
            raise ScenarioError(f"peer {homeless[0]} has no region, but [between] tells of regions")
        pairs: dict[tuple[int, int], PairSpec] = {}
        for a, source in enumerate(peers):
            for b, target in enumerate(peers):
                if a != b:
                    values = between.get(frozenset((source.region, target.region)))
                    if values is None and between:
                        regions = " ".join(sorted((source.region, target.region)))
                        raise ScenarioError(
                            f'between: "{regions}" is missing ({source.name} and {target.name})'
                        )
                    pairs[a, b] = replace(base, **(values or {}))
        for n, entry in enumerate(self.tables("links")):
            where = f"links[{n}]"
            _only(entry, ("from", "to", "both", *PAIR_KEYS), where)
            for pair in _ends(entry, where, names):
                pairs[pair] = replace(pairs[pair], **_values(entry, PAIR_KEYS, where))
        return pairs

    def between(self, regions: set[str]) -> dict[frozenset[str], dict[str, float]]:
        table = self.data.get("between", {})
        if not isinstance(table, dict):
            raise ScenarioError("between must be a table")
        found: dict[frozenset[str], dict[str, float]] = {}
        for key, entry in table.items():
            where = f'between: "{key}"'
            ends = key.split()
            if len(ends) != 2:
                raise ScenarioError(f"{where} must name two regions")
            unknown = [end for end in ends if end not in regions]
            if unknown:
                raise ScenarioError(f"{where}: no peer is in region {unknown[0]!r}")
            if frozenset(ends) in found:
                raise ScenarioError(f"{where} is given twice (once per pair is enough, it holds both ways)")
            found[frozenset(ends)] = _pair_values(entry, where)
        return found


# --- reading single values ---


def _only(table: dict[str, Any], allowed: Iterable[str], where: str) -> None:
    unknown = sorted(set(table) - set(allowed))
    if unknown:
        place = f"{where}: " if where else ""
        raise ScenarioError(f"{place}unknown key {unknown[0]!r} (known: {', '.join(allowed)})")


def _number(table: dict[str, Any], key: str, where: str, default: float) -> float:
    value = table.get(key, default)
    place = f"{where}: " if where else ""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise ScenarioError(f"{place}{key} must be a number, 0 or more, not {value!r}")
    if key == "loss" and value > 1:
        raise ScenarioError(f"{place}loss must be between 0 and 1, not {value!r}")
    return value


def _text(table: dict[str, Any], key: str, where: str, default: str = "") -> str:
    value = table.get(key, default)
    if not isinstance(value, str):
        raise ScenarioError(f"{where}: {key} must be text, not {value!r}" if where else f"{key} must be text")
    return value


def _values(table: dict[str, Any], keys: Iterable[str], where: str) -> dict[str, float]:
    return {key: _number(table, key, where, 0.0) for key in keys if key in table}


def _pair_values(entry: Any, where: str) -> dict[str, float]:
    if not isinstance(entry, dict):
        raise ScenarioError(f"{where} must be a table such as {{ delay_ms = 40 }}")
    _only(entry, PAIR_KEYS, where)
    return _values(entry, PAIR_KEYS, where)


def _peer(name: Any, where: str, names: list[str]) -> int:
    if name not in names:
        raise ScenarioError(f"{where}: no peer is called {name!r}")
    return names.index(name)


def _ends(entry: dict[str, Any], where: str, names: list[str]) -> tuple[tuple[int, int], ...]:
    """The ordered pairs that `from`, `to` and `both` stand for."""
    sides = []
    for key in ("from", "to"):
        if key not in entry:
            raise ScenarioError(f"{where}: {key!r} is missing")
        everybody = entry[key] == "*"
        sides.append(list(range(len(names))) if everybody else [_peer(entry[key], where, names)])
    found = [(a, b) for a in sides[0] for b in sides[1] if a != b]
    if not found:
        raise ScenarioError(f"{where}: a link from a peer to itself")
    both = entry.get("both", False)
    if not isinstance(both, bool):
        raise ScenarioError(f"{where}: both must be true or false, not {both!r}")
    if both:
        found += [(b, a) for a, b in found if (b, a) not in found]
    return tuple(found)


def _change(entry: dict[str, Any], where: str, names: list[str]) -> Change:
    if "at_s" not in entry:
        raise ScenarioError(f"{where}: 'at_s' is missing")
    at_s = _number(entry, "at_s", where, 0.0)
    if "peer" in entry:
        _only(entry, ("at_s", "peer", *PEER_RATES), where)
        values = _values(entry, PEER_RATES, where)
        change = Change(at_s, peer=_peer(entry["peer"], where, names), values=values)
    else:
        _only(entry, ("at_s", "from", "to", "both", *PAIR_KEYS), where)
        change = Change(at_s, pairs=_ends(entry, where, names), values=_values(entry, PAIR_KEYS, where))
    if not change.values:
        raise ScenarioError(f"{where}: changes nothing")
    return change
