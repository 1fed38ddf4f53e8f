"""What goes wrong in one simulated run: drawn from a seed beforehand as a plan, then carried out.

A plan is plain data, so that a failing one can be printed, replayed and made smaller. Random faults have
per-plan rates; aimed ones strike at the n-th effect of a kind, because random kills nearly always miss the
instants that matter.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from p2p_diloco.proto import events as ev
from p2p_diloco.sim.network import Rates
from p2p_diloco.sim.world import SimPeer, World
from p2p_diloco.wire.messages import kind_of

_S = 1_000_000_000


@dataclass(frozen=True)
class Fault:
    """One thing at one time. `what` names a method of `Faults`; `who` and `whom` are peer indices."""

    at_s: float
    what: str
    who: tuple[int, ...] = ()
    whom: tuple[int, ...] = ()
    seconds: float = 0.0
    value: float = 0.0


@dataclass(frozen=True)
class Aim:
    """Kill `who` just before (or right after) its n-th effect of this kind. -1: whoever comes first.
    kind: send:KIND (its own statement of that kind, or a message), frame:KIND, persist:KIND, compute:OP."""

    kind: str
    who: int = -1
    nth: int = 0
    after: bool = False
    restart_s: float = 5.0


@dataclass(frozen=True)
class Plan:
    """Everything that will happen. `peers` start at once, joiners come by faults of kind ``join``."""

    peers: int = 4
    min_peers: int = 4
    rates: dict[str, float] = field(default_factory=dict)  # loss, duplicate, replay, delay_ms
    clocks: tuple[float, ...] = ()
    slowness: tuple[float, ...] = ()
    faults: tuple[Fault, ...] = ()
    aims: tuple[Aim, ...] = ()
    fault_s: float = 40.0
    quorum: str = "majority"
    chunks: int = 6

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Plan:
        made = dict(data)
        made["faults"] = tuple(
            Fault(**{**f, "who": tuple(f["who"]), "whom": tuple(f["whom"])}) for f in data["faults"]
        )
        made["aims"] = tuple(Aim(**a) for a in data["aims"])
        made["clocks"], made["slowness"] = tuple(data["clocks"]), tuple(data["slowness"])
        return cls(**made)


AIMS = (
    "persist:vote", "persist:promise", "persist:certificate", "send:vote", "send:ready", "send:view",
    "send:promise", "send:verdict", "frame:reduce", "frame:gather", "frame:state", "compute:roots",
    "compute:swap", "compute:begin", "send:get_chunk", "send:get_leaves", "compute:install_finish",
)  # fmt: skip
KINDS = (
    "crash", "split", "bridge", "mute", "clog", "pause", "cut", "disk_full", "forget", "join", "leave",
    "bad_delta", "trainer", "slow",
)  # fmt: skip


def draw(seed: int) -> Plan:
    """The plan of a seed. Each kind of fault has a rate of its own, zero in many plans."""
    dice = random.Random(f"plan {seed}")
    peers = dice.choice((1, 2, 2, 3, 3, 3, 4, 4, 4, 5, 5, 6, 7))
    rates = {
        "loss": dice.choice((0.0, 0.0, 0.0, dice.uniform(0, 0.3))),
        "duplicate": dice.choice((0.0, 0.0, dice.uniform(0, 0.5))),
        "replay": dice.choice((0.0, 0.0, dice.uniform(0, 0.5))),
        "delay_ms": dice.choice((10.0, 30.0, 30.0, 100.0, 400.0)),
    }
    faults: list[Fault] = []
    for kind in KINDS:
        if dice.random() < 0.3:
            count = 1 if kind in ("forget", "leave") else dice.choice((1, 1, 2, 4))
            faults += [_draw_fault(dice, kind, peers) for _ in range(count)]
    aims = [
        Aim(
            dice.choice(AIMS),
            dice.choice((-1, dice.randrange(peers))),
            dice.choice((0, 0, 1, 2, 5, dice.randrange(30))),
            dice.random() < 0.5,
            dice.choice((0.5, 2.0, 5.0, 20.0, 1000.0)),
        )
        for _ in range(dice.choice((0, 0, 1, 1, 2, 3)))
    ]
    drift = dice.random() < 0.3
    slow = dice.random() < 0.2
    return Plan(
        peers=peers,
        min_peers=dice.choice((1, peers, peers)),
        rates=rates,
        clocks=tuple(dice.uniform(0.9, 1.1) if drift else 1.0 for _ in range(peers)),
        slowness=tuple(dice.choice((1.0, 1.0, 8.0)) if slow else 1.0 for _ in range(peers)),
        faults=tuple(sorted(faults, key=lambda f: f.at_s)),
        aims=tuple(aims),
        fault_s=dice.choice((15.0, 30.0, 45.0)),
        quorum=dice.choice(("majority",) * 5 + ("two_thirds",)),
        chunks=dice.choice((1, 3, 6, 12)),
    )


def _draw_fault(dice: random.Random, kind: str, peers: int) -> Fault:
    everyone = list(range(peers))
    dice.shuffle(everyone)
    border = dice.randint(1, max(1, peers - 1))
    at = dice.uniform(0.1, 40.0)
    seconds = dice.choice((0.2, 1.0, 5.0, 12.0, 25.0))
    one, two = everyone[0], everyone[-1]
    if kind in ("split", "bridge"):
        return Fault(at, kind, tuple(sorted(everyone[:border])), tuple(sorted(everyone[border:])), seconds)
    return Fault(at, kind, (one,), (two,) if two != one else (), seconds, dice.random())


class Faults:
    """Carries a plan out in a world. `heal` ends everything that is still going on."""

    def __init__(self, world: World, plan: Plan) -> None:
        self.world, self.plan = world, plan
        self.over = False
        self.done: list[str] = []  # what really happened, for the report
        self._counts = [0] * len(plan.aims)
        self._struck = [False] * len(plan.aims)
        self._bad_rounds: dict[int, int] = {}
        self.left: set[int] = set()

    def start(self) -> None:
        plan, world = self.plan, self.world
        network = world.network
        low = round(plan.rates.get("delay_ms", 30.0) * 1e6 / 10)
        network.rates = Rates(
            plan.rates.get("loss", 0.0),
            plan.rates.get("duplicate", 0.0),
            plan.rates.get("replay", 0.0),
            (low, 10 * low),
        )
        world.on_effect = self.on_effect
        original = world.delta_of
        world.delta_of = lambda peer, epoch: self._delta(peer, original(peer, epoch))
        for fault in plan.faults:
            if fault.at_s < plan.fault_s:
                world.after(round(fault.at_s * _S), self._doing(fault))

    def _doing(self, fault: Fault) -> Callable[[], None]:
        def strike() -> None:
            if not self.over:
                self._note(f"{fault.what} {fault.who} {fault.whom} {fault.seconds:g}s")
                getattr(self, "_" + fault.what)(fault)

        return strike

    def _note(self, text: str) -> None:
        self.done.append(f"{self.world.now_ns / _S:.3f}s {text}")

    def heal(self) -> None:
        """End all faults; every peer that did not leave is alive again soon."""
        self.over = True
        world = self.world
        world.network.heal()
        for peer in world.peers:
            peer.slowness, peer.store.full = 1.0, False
            if peer.alive and peer.paused_until_ns:
                peer.paused_until_ns = 0
                waiting, peer.backlog = peer.backlog, []
                for event in [*waiting, ev.Tick()]:
                    world.feed(peer, event)
            if not peer.alive and peer.index not in self.left:
                self._restart(peer)

    # --- aimed ---

    def on_effect(self, peer: SimPeer, effect: ev.Effect) -> bool:
        if self.over:
            return True
        name = _name(peer, effect)
        for index, aim in enumerate(self.plan.aims):
            if self._struck[index] or aim.kind != name or aim.who not in (-1, peer.index):
                continue
            self._counts[index] += 1
            if self._counts[index] <= aim.nth:
                continue
            self._struck[index] = True
            self._note(f"kill {peer.index} {'after' if aim.after else 'before'} {name}")
            if not aim.after:
                self._kill(peer, aim.restart_s)
                return False
            # Right after: a record is on disk and nothing that depends on it has left.
            delay = 1_000_000 if name.startswith("persist:") else 0
            self.world.after(delay, self._killing(peer, aim.restart_s))
            if delay:
                return self._write_and_die(peer, effect)
        return True

    def _killing(self, peer: SimPeer, restart_s: float) -> Callable[[], None]:
        life = peer.lives
        return lambda: self._kill(peer, restart_s) if peer.lives == life else None

    def _write_and_die(self, peer: SimPeer, effect: ev.Effect) -> bool:
        """Put the record on disk now; the kill comes before the peer hears of it."""
        assert isinstance(effect, ev.Persist)
        if not peer.store.full:
            peer.disk.append((effect.kind, effect.data))
        return False

    # --- at a time ---

    def _kill(self, peer: SimPeer, restart_s: float) -> None:
        if not peer.alive:
            return
        self.world.kill(peer)
        if restart_s < 900:
            life = peer.lives
            self.world.after(
                round(restart_s * _S),
                lambda: self._restart(peer) if peer.lives == life and not self.over else None,
            )

    def _restart(self, peer: SimPeer) -> None:
        if not peer.alive and peer.index not in self.left:
            self.world.restart(peer)

    def _peer(self, fault: Fault) -> SimPeer:
        return self.world.peers[fault.who[0]]

    def _crash(self, fault: Fault) -> None:
        self._kill(self._peer(fault), fault.seconds)

    def _pause(self, fault: Fault) -> None:
        self.world.pause(self._peer(fault), fault.seconds)

    def _split(self, fault: Fault) -> None:
        self._cut_pairs([(a, b) for a in fault.who for b in fault.whom], fault.seconds)

    def _bridge(self, fault: Fault) -> None:
        """Two sides that see each other only through one peer of the first."""
        self._cut_pairs([(a, b) for a in fault.who[1:] for b in fault.whom], fault.seconds)

    def _cut(self, fault: Fault) -> None:
        self._cut_pairs([(a, b) for a in fault.who for b in fault.whom], fault.seconds)

    def _cut_pairs(self, pairs: list[tuple[int, int]], seconds: float) -> None:
        world = self.world
        for a, b in pairs:
            world.cut(world.peers[a], world.peers[b])
        gone = {frozenset(pair) for pair in pairs}
        world.after(round(seconds * _S), lambda: world.network.cut.difference_update(gone))

    def _mute(self, fault: Fault) -> None:
        world = self.world
        for a in fault.who:
            for b in fault.whom:
                world.mute(world.peers[a], world.peers[b])
                world.after(round(fault.seconds * _S), self._unmuting((a, b)))

    def _unmuting(self, pair: tuple[int, int]) -> Callable[[], None]:
        def unmute() -> None:
            self.world.network.mute.pop(pair, None)

        return unmute

    def _clog(self, fault: Fault) -> None:
        until = self.world.now_ns + round(min(fault.seconds, 12.0) * _S)
        for a in fault.who:
            for b in fault.whom:
                self.world.network.clogged[a, b] = until

    def _disk_full(self, fault: Fault) -> None:
        peer = self._peer(fault)
        peer.store.full = True
        self.world.after(round(fault.seconds * _S), lambda: setattr(peer.store, "full", False))

    def _forget(self, fault: Fault) -> None:
        """The machine dies and its vote log is gone (the rest of its folder is not). Its vote is lost for
        one epoch, so this must not be a voter that the others cannot do without for ever."""
        peer = self._peer(fault)
        if peer.alive and self._spares_a_voter():
            self._kill(peer, fault.seconds)
            peer.store.records = [entry for entry in peer.disk if entry[0] == "certificate"]
            peer.store.forgot = True

    def _spares_a_voter(self) -> bool:
        """True if the others decide without one voter for good, however its good-bye fares, and even if all
        that will ever abstain do so in this epoch (docs/RELIABILITY.md, what is known not to hold)."""
        heads = [p.live.chain for p in self.world.peers if p.alive]
        abstainers = {
            f.who for f in self.plan.faults if f.what in ("bad_delta", "trainer", "forget", "leave")
        }
        needed = (3 if self.plan.quorum == "majority" else 5) + max(0, len(abstainers) - 1)
        return min((len(chain.voters) for chain in heads), default=0) >= needed

    def _join(self, fault: Fault) -> None:
        if len(self.world.peers) < 10:
            self.world.add()

    def _leave(self, fault: Fault) -> None:
        peer = self._peer(fault)
        if peer.alive and self._spares_a_voter() and not peer.paused_until_ns:
            self.left.add(peer.index)
            self.world.feed(peer, ev.LeaveRequested("planned"))

    def _bad_delta(self, fault: Fault) -> None:
        self._bad_rounds[fault.who[0]] = self._bad_rounds.get(fault.who[0], 0) + 1

    def _trainer(self, fault: Fault) -> None:
        peer, world = self._peer(fault), self.world
        if peer.alive and not peer.paused_until_ns:
            life = peer.lives
            peer.trainer += 1
            world.feed(peer, ev.TrainerLost("planned"))
            world.after(
                round(fault.seconds * _S),
                lambda: world.feed(peer, ev.TrainerBack()) if peer.lives == life else None,
            )

    def _slow(self, fault: Fault) -> None:
        peer = self._peer(fault)
        peer.slowness = 1.0 + 20 * fault.value
        self.world.after(round(fault.seconds * _S), lambda: setattr(peer, "slowness", 1.0))

    def _copy(self, fault: Fault) -> None:
        """A second host starts with a copy of the identity file and an empty run folder."""
        self.world.add_copy(self._peer(fault))

    def _delta(self, peer: SimPeer, values: Any) -> Any:
        if self._bad_rounds.get(peer.index, 0) > 0 and values.size and not self.over:
            self._bad_rounds[peer.index] -= 1
            values = values.copy()
            values[values.size // 2] = float("nan")
        return values


def _name(peer: SimPeer, effect: ev.Effect) -> str:
    """The kind of an effect as an `Aim` names it."""
    match effect:
        case ev.SendFrame(kind=kind):
            return f"frame:{kind}"
        case ev.Persist(kind=kind):
            return f"persist:{kind}"
        case ev.Compute(op=op):
            return f"compute:{op}"
        case ev.Send(message=message):
            signed = getattr(message, "signed", None)
            if signed is not None:
                own = signed.public_key == peer.identity.public_key
                return f"send:{signed.kind}" if own else "send:relay"
            return f"send:{kind_of(message)}"
    return ""
