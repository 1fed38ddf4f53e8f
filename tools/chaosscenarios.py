"""What is done to swarms in a chaos run, and what must hold afterwards. One function per scenario.

A scenario gets a `Stage`: it starts swarms there, says what it saw, and states what it expects. An
expectation that does not hold is noted and the scenario goes on, so that one run shows as much as possible.
"""

from __future__ import annotations

import contextlib
import random
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import chaosnet
from chaosreport import Report, left_out_s, longest_gap_s, seen_between
from chaosswarm import BACK_S, START_S, NeverCameError, Peer, Place, Swarm, loopback_places, now_ms
from chaosvotes import audit

from p2p_diloco.failpoints import POINTS

# A peer falls silent in the middle of a ring: the lane stalls (15 s), then a view (10 s) and votes (10 s) may
# time out once; gossip needs 2 s of probes and 5 s of suspicion; the rest is for slow machines.
EXPLAINED_S = 15 + 10 + 10 + 7 + 8
IN_FLIGHT_MS = 1000  # what was certified just before packets were lost may be written down just after
CONVENERS_ONLY = ("convened_persisted", "view")  # failpoints that not everybody comes by, if they exist
AFTER_A_FAILURE = "promise_persisted"
FIRST_EPOCH = 6  # failpoints wait for the epochs in which everybody has become a voter


@dataclass
class Options:
    """How much of everything; the test suite runs shorter ones."""

    out: Path
    peers: int = 5
    minutes: float = 2.0
    seed: int = 1
    sequences: int = 48  # per inner step and peer: sets how long an epoch takes
    spacing: int = 30  # epochs between two failpoints
    pauses_s: tuple[float, ...] = (5.0, 30.0, 120.0)
    cut_s: float = 45.0  # how long packets are lost
    full_s: float = 40.0  # how long a disk stays full


@dataclass
class Stage:
    """Where one scenario runs."""

    report: Report
    options: Options
    say: Callable[[str], None]
    swarms: list[Swarm] = field(default_factory=list)

    @contextlib.contextmanager
    def swarm(
        self, places: Sequence[Place] | None = None, disks: Mapping[str, str] | None = None
    ) -> Iterator[Swarm]:
        """A swarm (not yet started), by default on loopback; ``disks`` gives peers a small disk, by name.

        At its end: all processes ended, vote logs audited, small disks copied aside and taken down.
        """
        folder = self.options.out / f"{self.report.name}-{len(self.swarms) + 1}"
        made = Swarm(folder, places or loopback_places(self.options.peers), self.options.sequences)
        self.swarms.append(made)
        with contextlib.ExitStack() as stack:
            for name, size in (disks or {}).items():
                stack.enter_context(chaosnet.small_disk(folder / name, size))
                stack.callback(shutil.copytree, folder / name, folder / f"{name}-disk")
            try:
                yield made
                left = made.outlived()
                self.expect(not left, f"nothing is left of peers that died (of {' '.join(left)})")
            finally:
                made.stop()
                made.metrics()  # read to the end while the small disks are there
                folders = {p.short_id(): p.folder for p in made.peers if (p.folder / "identity.key").exists()}
                for line in audit(folders):
                    self.expect(False, f"vote audit: {line}")

    def expect(self, holds: bool, text: str) -> bool:
        if not holds:
            self.report.failures.append(text)
            self.say(f"DOES NOT HOLD: {text}")
        return holds

    def note(self, text: str) -> None:
        self.report.notes.append(text)
        self.say(text)

    def all_back(self, swarm: Swarm, *peers: Peer, since_ms: int = 0, limit_s: float = BACK_S) -> None:
        """Expect these peers (none: all) to contribute again, and say how long it took."""
        who = peers or tuple(swarm.peers)
        names = " ".join(peer.name for peer in who)
        took = swarm.until_back(*who, since_ms=since_ms, limit_s=limit_s)
        self.note(f"{names} back in two certificates in a row after {took:.1f} s")


def kill_points(stage: Stage) -> None:
    """SIGKILL at each named failpoint; whoever died is started again and must contribute again."""
    ordinary = [point for point in POINTS if point not in (*CONVENERS_ONLY, AFTER_A_FAILURE)]
    with stage.swarm() as swarm:
        _kill_one_by_one(stage, swarm, ordinary)
    for point in POINTS:
        if point in CONVENERS_ONLY:
            _kill_conveners(stage, point)
        if point == AFTER_A_FAILURE:
            _kill_after_a_failure(stage, point)


def quick(stage: Stage) -> None:
    """A short one: two failpoints and a pause of 5 s, in one swarm."""
    with stage.swarm() as swarm:
        _kill_one_by_one(stage, swarm, ["gather", "vote_persisted"], together=True)
        _pause(stage, swarm, swarm.peers[0], 5.0)


def _kill_one_by_one(stage: Stage, swarm: Swarm, points: Sequence[str], together: bool = False) -> None:
    """Found a swarm in which peer after peer dies at its point; the founder's turn comes last.

    A restarted peer is armed with the next point that has nobody yet. ``together`` waits only at the end for
    all to come back (few points only: a minority may be dead at once).
    """
    due = [f"{point}@{FIRST_EPOCH + i * stage.options.spacing}+" for i, point in enumerate(points)]
    order = [*swarm.peers[1:], swarm.peers[0]]
    swarm.found(**{peer.name: kill for peer, kill in zip(order, due, strict=False)})
    for index, kill in enumerate(due):
        victim = order[index % len(order)]
        swarm.until_died(victim, f"kill at {kill}", START_S)
        stage.say(f"{victim.name} died at {kill}, in epoch {swarm.height(victim) + 1}")
        later = index + len(order)
        swarm.restart(victim, due[later] if later < len(due) else "")
        if not together:
            stage.all_back(swarm, victim)
    if together:
        stage.all_back(swarm, *order[: len(due)])
    swarm.until_epochs(2, EXPLAINED_S)


def _kill_conveners(stage: Stage, point: str) -> None:
    """All peers are armed with a point of conveners: those of successive attempts die, view unsent.

    Peers that died come back unarmed. Once one of those convenes, the point "view" kills who passes its view
    on, so that every peer may die once; but each attempt needs a quorum that holds the state: it is not lost.
    """
    kill = f"{point}@{FIRST_EPOCH}"
    with stage.swarm() as swarm:
        swarm.found(**{peer.name: kill for peer in swarm.peers})
        dead: list[Peer] = []
        end = time.monotonic() + START_S + BACK_S
        while swarm.height() < FIRST_EPOCH or any(not peer.alive for peer in swarm.peers):
            for peer in swarm.peers:
                if not peer.alive:
                    swarm.until_died(peer, f"kill at {kill}", 1.0)
                    if peer in dead:
                        raise NeverCameError(f"{peer.name} died twice\n{swarm.last_words()}")
                    dead.append(peer)
                    swarm.restart(peer)
            if time.monotonic() > end:
                raise NeverCameError(f"epoch {FIRST_EPOCH} did not come\n{swarm.last_words()}")
            swarm.pass_time(0.2)
        stage.note(f"died at {kill}: {' '.join(peer.name for peer in dead)}")
        if stage.expect(bool(dead), f"the convener died at {kill}"):
            others = [text for peer in swarm.peers for text in peer.notices()]
            named = [p.name for p in dead if any("convener" in t and p.short_id() in t for t in others)]
            stage.expect(bool(named), f"others say that one of those that died at {kill} was the convener")
        stage.all_back(swarm)


def _kill_after_a_failure(stage: Stage, point: str) -> None:
    """One peer dies in the ring, so that the attempt fails; another one dies at a point that follows that."""
    with stage.swarm() as swarm:
        first, second = swarm.peers[1:3]
        swarm.found(**{first.name: f"reduce@{FIRST_EPOCH}+", second.name: f"{point}@{FIRST_EPOCH}+"})
        for victim, at in ((first, "reduce"), (second, point)):
            swarm.until_died(victim, f"kill at {at}@{FIRST_EPOCH}+", START_S)
            stage.say(f"{victim.name} died at {at} of epoch {swarm.height(victim) + 1}")
            swarm.restart(victim)
        stage.all_back(swarm, first, second)


def kill_loop(stage: Stage) -> None:
    """Every few seconds SIGKILL a random peer and start it again; at most a minority is down at once.

    A peer counts as down until it has been in two certificates in a row: only then it votes again, and with
    it down more than half of the voters could be gone.
    """
    dice = random.Random(stage.options.seed)
    stage.note(f"seed {stage.options.seed}")
    with stage.swarm() as swarm:
        _found(swarm)
        end = time.monotonic() + 60 * stage.options.minutes
        starts: dict[str, float] = {}  # when the dead are to be started again
        next_kill = time.monotonic()
        kills = 0
        while time.monotonic() < end or starts:
            for peer in swarm.peers:
                if peer.name in starts and time.monotonic() >= starts[peer.name]:
                    del starts[peer.name]
                    swarm.restart(peer)
            up = [p for p in swarm.peers if p.alive and swarm.row_since(p, p.started_ms) >= 2]
            room = (len(swarm.peers) - 1) // 2 - (len(swarm.peers) - len(up))
            if room > 0 and next_kill <= time.monotonic() < end:
                victim = dice.choice(up)
                swarm.kill(victim)
                kills += 1
                pause_s = dice.uniform(0.5, 8.0)
                starts[victim.name] = time.monotonic() + pause_s
                next_kill = time.monotonic() + dice.uniform(2.0, 6.0)
                stage.say(f"killed {victim.name} at epoch {swarm.height()}, dead for {pause_s:.1f} s")
            swarm.pass_time(0.2)
            _nobody_fell(swarm, starts)
        stage.note(f"{kills} kills in {stage.options.minutes:g} minutes")
        stage.all_back(swarm)


def _nobody_fell(swarm: Swarm, starts: Mapping[str, float]) -> None:
    for peer in swarm.peers:
        if not peer.alive and peer.name not in starts:
            raise NeverCameError(f"{peer.name} ended by itself with {peer.status}\n{swarm.last_words()}")


def pauses(stage: Stage) -> None:
    """SIGSTOP one peer with its trainer for 5, 30 and 120 s: the others go on, and it finds back."""
    with stage.swarm() as swarm:
        _found(swarm)
        begin_ms = now_ms()
        for number, seconds in enumerate(stage.options.pauses_s):
            _pause(stage, swarm, swarm.peers[number % len(swarm.peers)], seconds)
        _steady(stage, swarm, begin_ms)


def _pause(stage: Stage, swarm: Swarm, victim: Peer, seconds: float) -> None:
    healthy = [peer for peer in swarm.peers if peer is not victim]
    with swarm.paused(victim) as fault:
        swarm.pass_time(seconds)
        until_ms = now_ms()
    names = [peer.name for peer in healthy]
    epochs = seen_between(swarm.metrics(), names, fault.at_ms + IN_FLIGHT_MS, until_ms)
    stage.note(f"{victim.name} stopped for {seconds:g} s: others certified {len(epochs)} epochs")
    if seconds > EXPLAINED_S / 2:
        stage.expect(bool(epochs), f"the others certified while {victim.name} was stopped")
    stage.all_back(swarm, victim, since_ms=until_ms)
    for peer in healthy:
        out = left_out_s(swarm.certificates(), peer.short_id(), fault.at_ms, now_ms())
        stage.expect(out <= EXPLAINED_S, f"{peer.name} was left out for {out:.1f} s, too long")


def _found(swarm: Swarm) -> None:
    """Start everybody and wait until everybody votes."""
    swarm.found()
    swarm.until_back(*swarm.peers, limit_s=START_S)


def _steady(stage: Stage, swarm: Swarm, begin_ms: int) -> None:
    """Nobody waited for a certificate longer than the time-outs explain."""
    gap = longest_gap_s(swarm.certificates(), begin_ms, now_ms()) or 0.0
    stage.expect(gap <= EXPLAINED_S, f"a gap of {gap:.1f} s is at most {EXPLAINED_S} s")


@contextlib.contextmanager
def _swarm_on_network(stage: Stage, count: int) -> Iterator[tuple[Swarm, chaosnet.Network]]:
    """A swarm with all its peers in, and the network that it lives on."""
    with chaosnet.network(count) as net:
        net.drop([0], [1])
        works = not net.delivers(0, 1) and net.delivers(1, 0)
        net.heal()
        if not works or not net.delivers(0, 1):
            raise chaosnet.CannotBeMadeError("packets between namespaces cannot be dropped one way here")
        with stage.swarm(net.places()) as swarm:
            _found(swarm)
            yield swarm, net


def halves(stage: Stage) -> None:
    """The network splits in two: the majority goes on, the minority waits, and one history remains."""
    count = min(6, max(5, stage.options.peers))
    with _swarm_on_network(stage, count) as (swarm, net):
        few, many = swarm.peers[: (count - 1) // 2], swarm.peers[(count - 1) // 2 :]
        inside = list(range(len(few)))
        net.split(inside, [i for i in range(count) if i not in inside])
        fault = swarm.note("split", *few)
        swarm.pass_time(stage.options.cut_s)
        net.heal()
        healed_ms = now_ms()
        stage.say("healed")
        stage.all_back(swarm, since_ms=healed_ms)
        metrics, since_ms = swarm.metrics(), fault.at_ms + IN_FLIGHT_MS
        theirs = seen_between(metrics, [p.name for p in many], since_ms, healed_ms)
        ours = seen_between(metrics, [p.name for p in few], since_ms, healed_ms)
        stage.note(f"split for {stage.options.cut_s:g} s, {len(few)} from {len(many)} peers")
        stage.note(f"the majority certified {len(theirs)} epochs, the minority {len(ours)}")
        stage.expect(bool(theirs), "the majority went on")
        stage.expect(not ours, f"the minority certified nothing (but {ours})")
        waits = [peer.name for peer in few if any("QuorumLost" in text for text in peer.notices(since_ms))]
        stage.note(f"told of the lost quorum: {' '.join(waits) or 'nobody'}")


def one_way(stage: Stage) -> None:
    """Packets from one peer to another are lost in one direction, then those in the other direction only.

    The two follow each other in the order of ids, so that they are neighbours in the ring unless measured
    rates say otherwise: a pair that has nothing to send to each other would show nothing.
    """
    with _swarm_on_network(stage, stage.options.peers) as (swarm, net):
        order = sorted(swarm.peers, key=lambda peer: peer.peer_id())
        for source, target in (order[1:3], order[2:0:-1]):
            net.drop([swarm.peers.index(source)], [swarm.peers.index(target)])
            fault = swarm.note(f"loss from {source.name} to {target.name}")
            swarm.pass_time(stage.options.cut_s)
            net.heal()
            healed_ms = now_ms()
            _judge_one_way(stage, swarm, source, target, fault.at_ms, healed_ms)
            stage.all_back(swarm, since_ms=healed_ms)
            _steady(stage, swarm, fault.at_ms)


def _judge_one_way(
    stage: Stage, swarm: Swarm, source: Peer, target: Peer, since_ms: int, healed_ms: int
) -> None:
    during = seen_between(swarm.metrics(), [p.name for p in swarm.peers], since_ms, healed_ms)
    seen = [entry for entry in swarm.certificates() if entry.epoch in during]
    out = {p.name: left_out_s(swarm.certificates(), p.short_id(), since_ms, healed_ms) for p in swarm.peers}
    times = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in out.items())
    lost = f"{source.name} to {target.name} lost for {stage.options.cut_s:g} s"
    stage.note(f"{lost}: {len(during)} epochs certified; longest left out: {times}")
    stage.expect(bool(during), "epochs were certified while packets were lost one way")
    attempts = max((entry.attempt for entry in seen), default=0)
    many = 2 * len(swarm.peers)
    stage.expect(attempts <= many, f"{lost}: no epoch takes more than {many} attempts (one took {attempts})")
    for peer in swarm.peers:
        if peer not in (source, target):
            whole = f"{peer.name}, whose links are whole, is not left out for long ({out[peer.name]:.1f} s)"
            stage.expect(out[peer.name] <= EXPLAINED_S, whole)


def half_open(stage: Stage) -> None:
    """A peer is cut off and dies there: no FIN or RST tells the others, only its silence."""
    with _swarm_on_network(stage, stage.options.peers) as (swarm, net):
        victim = swarm.peers[1]
        others = [peer for peer in swarm.peers if peer is not victim]
        net.split([1], [i for i in range(len(swarm.peers)) if i != 1])
        swarm.pass_time(0.3)
        fault = swarm.kill(victim, what="cut and SIGKILL")
        took = swarm.until_epochs(3, EXPLAINED_S * 2, *others)
        stage.note(f"three more epochs without {victim.name} after {took:.1f} s")
        without = [c for c in swarm.certificates() if c.seen_ms > fault.at_ms + IN_FLIGHT_MS]
        alone = all(victim.short_id() not in entry.contributors for entry in without[1:])
        stage.expect(alone, f"{victim.name} is in no later certificate while it is dead")
        net.heal()
        swarm.restart(victim)
        stage.all_back(swarm, victim)
        _steady(stage, swarm, fault.at_ms)


def full_disk(stage: Stage) -> None:
    """The disk of one peer fills up: the swarm goes on, and the peer does not say what it could not write."""
    with stage.swarm(disks={"peer2": "8m"}) as swarm:
        _found(swarm)
        victim, filler = swarm.peers[1], swarm.peers[1].folder / "filler"
        others = [peer for peer in swarm.peers if peer is not victim]
        fault = swarm.note("full disk", victim)
        end = time.monotonic() + stage.options.full_s
        while time.monotonic() < end:  # again and again: old checkpoints make room when they go
            size = chaosnet.fill(filler)
            swarm.pass_time(0.5)
        stage.say(f"{size} bytes filled the disk of {victim.name}")
        stage.expect(victim.alive, f"{victim.name} lives on with a full disk")
        epochs = seen_between(swarm.metrics(), [p.name for p in others], fault.at_ms, now_ms())
        stage.note(f"full for {stage.options.full_s:g} s: the others certified {len(epochs)} epochs")
        stage.expect(bool(epochs), "the others went on")
        said = [line for line in victim.life().splitlines() if "disk" in line or "No space" in line]
        stage.note(f"{victim.name} said: {said[0] if said else 'nothing about its disk'}")
        filler.unlink()
        if victim.alive:
            stage.all_back(swarm, victim, since_ms=now_ms())
            swarm.pass_time(5)
            swarm.kill(victim)
        swarm.restart(victim)  # what it wrote after the disk was full must be readable
        stage.all_back(swarm, victim)


def cold_restart(stage: Stage) -> None:
    """SIGKILL all peers at once and start all again in their folders: one history, and it goes on."""
    with stage.swarm() as swarm:
        _found(swarm)
        swarm.until_epochs(12, START_S)
        swarm.kill(*swarm.peers)
        fault = swarm.faults[-1]
        swarm.faults[-1] = type(fault)(fault.at_ms, (), "SIGKILL of all")  # all of them are to recover
        height = swarm.height()
        stage.note(f"killed all at epoch {height}")
        founder = swarm.peers[0]
        swarm.start(founder, ["--config", str(swarm.config)])
        for peer in swarm.peers[1:]:
            swarm.restart(peer)
        end = time.monotonic() + START_S
        while swarm.height() <= height and time.monotonic() < end:
            if not founder.alive and founder.status == 2:  # it asks to rejoin through others
                stage.note(f"the founder's own command ended: {(founder.life().splitlines() or [''])[-1]}")
                swarm.restart(founder)
            swarm.pass_time(0.5)
        if swarm.height() <= height:
            words = swarm.last_words(4)
            raise NeverCameError(f"nobody certified again after SIGKILL of all (cold restart)\n{words}")
        stage.all_back(swarm, limit_s=START_S)


SCENARIOS: dict[str, Callable[[Stage], None]] = {
    scenario.__name__: scenario
    for scenario in (
        kill_points,
        kill_loop,
        pauses,
        halves,
        one_way,
        half_open,
        full_disk,
        cold_restart,
        quick,
    )
}
