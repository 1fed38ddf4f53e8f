"""Who is here: SWIM gossip with suspicion, incarnations and local-health awareness. Pure.

Sources: SWIM (Das et al. 2002) for probes through helpers and suspicion; Lifeguard (arXiv:1707.00788)
for the observer that doubts itself first: each own failure, and each pause of its own, lengthens its
time-outs. A record is signed by its peer; suspicion and death are rumours that the peer itself refutes
with a higher incarnation.

Status of a member:

=========  ======================================================================
alive      answers, or nobody said otherwise
suspect    a probe or its link failed; becomes dead at a deadline unless refuted
dead       the deadline passed; a higher incarnation brings it back
left       said good-bye in a signed record
=========  ======================================================================
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2p_diloco.config import GossipConfig
from p2p_diloco.errors import ProtocolViolation
from p2p_diloco.identity import PeerId, show
from p2p_diloco.proto.dice import Dice
from p2p_diloco.proto.events import Close, Dial, Effect, Notice, Send
from p2p_diloco.proto.order import Edge
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire.addresses import is_dialable
from p2p_diloco.wire.messages import (
    MAX_RATES,
    MAX_UNREACHABLE,
    Ack,
    EdgeRate,
    Gossip,
    MemberRecord,
    Probe,
    Progress,
    Rumour,
    Signed,
)

_S = 1_000_000_000
_MAX_KNOWN = 1024  # members remembered; a flood of invented ones stops here
_FORGET_NS = 600 * _S  # dead and departed members are forgotten after ten minutes (guess)
_DIAL_FIRST_NS, _DIAL_CAP_NS = _S // 2, 30 * _S  # back-off between dials (guess)
LINK_WAIT_NS = 3 * _S  # how long others wait for a first link to come up (guess)
_HEALTH_CAP = 8  # Lifeguard's local health multiplier ends at 8
_EDGE_BAD_NS = 60 * _S  # how long a lane that failed keeps two peers apart in rings (guess)
_RATE_EPOCHS = 50  # a rate that no later epoch confirmed is forgotten: its edge is tried again (guess)
_LIVES = 1000  # incarnations of one life: room for its refutations
_NEWS_BYTES = 24 << 10  # records in one gossip message; leaves room within a control frame


@dataclass
class Member:
    """What we know of one other peer."""

    peer: PeerId
    record: Signed | None = None
    incarnation: int = 0
    sequence: int = -1
    addresses: tuple[str, ...] = ()
    status: str = "alive"
    since_ns: int = 0
    deadline_ns: int = 0
    linked: bool = False
    life: int = 0
    progress: Progress | None = None
    unreachable: tuple[PeerId, ...] = ()  # to whom it has no working link
    rates: dict[PeerId, int] = field(default_factory=dict)  # how fast it sends to whom, kbit/s
    edge_bad_until_ns: int = 0  # our own link to it failed under data
    banned: bool = False  # it contradicted itself, provably
    dial_next_ns: int = 0
    dial_wait_ns: int = _DIAL_FIRST_NS
    tells: dict[str, int] = field(default_factory=dict)  # news kind -> transmissions left


@dataclass
class _Pending:
    target: PeerId
    nonce: int
    indirect_ns: int
    fail_ns: int
    asked_helpers: bool = False


class Membership:
    """See the module's text. All methods return effects; `me` is never in `members`."""

    def __init__(
        self,
        statements: Statements,
        config: GossipConfig,
        random: Dice,
        addresses: tuple[str, ...],
        incarnation: int,
        now_ns: int,
    ) -> None:
        self._statements = statements
        self._config = config
        self._random = random
        self.me = statements.me
        self.members: dict[PeerId, Member] = {}
        self.incarnation = incarnation
        self.life = incarnation // _LIVES
        self._sequence = 0
        self._addresses = addresses
        self._left = False
        self.progress = Progress(0, bytes(32), "joining", 0, 0, math.nan, 0.0)
        self._health = 0
        self._rates: dict[PeerId, tuple[int, int]] = {}  # kbit/s to this peer, and the epoch that showed it
        self._order: list[PeerId] = []
        self._pending: _Pending | None = None
        self._relayed: dict[int, tuple[PeerId, int, int]] = {}  # our nonce -> asker, its nonce, expiry
        self._nonce = 0
        self._gossip_next_ns = now_ns
        self._full_next_ns = now_ns + round(config.full_exchange_s * _S)
        self._probe_next_ns = now_ns + round(config.probe_s * _S)
        self._own = self._sign_own()
        self._own_tells = 0
        self._tell_self()

    # --- what others ask ---

    def get(self, peer: PeerId) -> Member | None:
        return self.members.get(peer)

    def usable(self, peer: PeerId) -> bool:
        """True if work can be planned with this peer: ourselves, or linked and neither doubted nor gone."""
        if peer == self.me:
            return not self._left
        member = self.members.get(peer)
        return member is not None and member.linked and member.status == "alive" and not member.banned

    def reachable(self, peer: PeerId) -> bool:
        """True if a ring may hold this peer: it is usable, or others say that it is there for them."""
        if self.usable(peer):
            return True
        member = self.members.get(peer)
        if member is None or member.status != "alive" or member.banned or member.record is None:
            return False
        return any(peer not in self.members[other].unreachable for other in self.usable_peers())

    def unreachable(self, now_ns: int) -> tuple[PeerId, ...]:
        """Peers that are said to live, but to which we have no link that works."""
        found = [
            peer
            for peer in sorted(self.members)
            if self.members[peer].status == "alive"
            and not self.hopeful(peer, now_ns)
            and (not self.members[peer].linked or now_ns < self.members[peer].edge_bad_until_ns)
        ]
        return tuple(found[:MAX_UNREACHABLE])

    def cut_off_from(self, first: Iterable[PeerId], now_ns: int) -> tuple[PeerId, ...]:
        """Whom a ring must not put beside us: ``first`` (those that an attempt just failed for), who is
        unreachable, and those we hold for dead, the latest first: others may know better than we do."""
        gone = [peer for peer in sorted(self.members) if self._is_gone(self.members[peer])]
        gone.sort(key=lambda peer: -self.members[peer].since_ns)
        found = dict.fromkeys([*sorted(first), *self.unreachable(now_ns), *gone])
        return tuple(found)[:MAX_UNREACHABLE]

    @staticmethod
    def _is_gone(member: Member) -> bool:
        return member.status in ("suspect", "dead") and not member.linked and not member.banned

    def bad_edges(self, now_ns: int) -> frozenset[Edge]:
        """Pairs of peers of which at least one says that their link does not work."""
        edges = [frozenset((self.me, peer)) for peer in self.unreachable(now_ns)]
        for peer, member in self.members.items():
            edges += [frozenset((peer, other)) for other in member.unreachable if other != peer]
        return frozenset(edges)

    def edge_failed(self, peer: PeerId, now_ns: int) -> None:
        """Data to this peer did not get through: keep it out of our neighbourhood for a while."""
        member = self.members.get(peer)
        if member is not None:
            member.edge_bad_until_ns = now_ns + _EDGE_BAD_NS

    def note_rate(self, peer: PeerId, kbit_per_s: int) -> None:
        """We measured how fast we send to this peer; the newest `MAX_RATES` are kept."""
        before, _ = self._rates.pop(peer, (0, 0))
        # A slow round can have many reasons: down by halves, up at once.
        self._rates[peer] = (max(1, kbit_per_s, (kbit_per_s + before) // 2), self.progress.epoch)
        while len(self._rates) > MAX_RATES:
            del self._rates[next(iter(self._rates))]

    def rates(self) -> dict[tuple[PeerId, PeerId], int]:
        """What is known of how fast peers send to each other, kbit/s by (sender, receiver)."""
        found = {(self.me, peer): rate for peer, rate in self._fresh_rates()}
        for peer, member in self.members.items():
            found.update({(peer, other): rate for other, rate in member.rates.items()})
        return found

    def _fresh_rates(self) -> list[tuple[PeerId, int]]:
        oldest = self.progress.epoch - _RATE_EPOCHS
        return [(peer, rate) for peer, (rate, epoch) in self._rates.items() if epoch >= oldest]

    def life_of(self, peer: PeerId) -> int:
        """How often this peer has started, as far as we know."""
        member = self.members.get(peer)
        return self.life if peer == self.me else 0 if member is None else member.life

    def hopeful(self, peer: PeerId, now_ns: int) -> bool:
        """True if a link to this peer is on its way: it was heard of just now and nobody doubts it."""
        member = self.members.get(peer)
        if member is None or member.linked:
            return False
        return member.status == "alive" and now_ns - member.since_ns < LINK_WAIT_NS

    def usable_peers(self) -> list[PeerId]:
        """Usable others, sorted."""
        return [peer for peer in sorted(self.members) if self.usable(peer)]

    def linked_peers(self) -> list[PeerId]:
        return [peer for peer in sorted(self.members) if self.members[peer].linked]

    def next_wake_ns(self) -> int:
        times = [self._gossip_next_ns]
        pending = self._pending
        if pending is None:
            times.append(self._probe_next_ns)
        else:  # the next probe waits for this one
            times.append(pending.fail_ns if pending.asked_helpers else pending.indirect_ns)
        for member in self.members.values():
            if member.status == "suspect":
                times.append(member.deadline_ns)
            if self._wants_dial(member):
                times.append(member.dial_next_ns)
        return min(times)

    # --- events ---

    def link_up(self, peer: PeerId, addresses: Iterable[str], now_ns: int) -> list[Effect]:
        member = self._member(peer, now_ns)
        if member is None:
            return []
        if member.banned:
            return [Close(peer, "this key contradicted itself and is banned")]
        member.linked = True
        member.dial_wait_ns, member.dial_next_ns = _DIAL_FIRST_NS, now_ns
        if member.record is None:
            member.addresses = tuple(a for a in addresses if is_dialable(a))
        # It must hear what was said of it: its denial brings it back for all who have no link to it yet.
        news = self._send_full(peer, now_ns)
        if member.status in ("suspect", "dead"):
            return [*self._set_status(member, "alive", now_ns), *news]
        return news

    def link_down(self, peer: PeerId, reason: str, now_ns: int) -> list[Effect]:
        member = self.members.get(peer)
        if member is None:
            return []
        member.linked = False
        member.progress, member.unreachable = None, ()
        member.dial_next_ns = now_ns + member.dial_wait_ns
        if member.status == "alive":
            return self._suspect(member, member.incarnation, now_ns, f"link lost: {reason}")
        return []

    def dial_failed(self, peer: PeerId, now_ns: int) -> list[Effect]:
        member = self.members.get(peer)
        if member is not None:
            member.dial_wait_ns = min(member.dial_wait_ns * 2, _DIAL_CAP_NS)
            # Spread out: after a partition the first of all pairs that dial brings the news to everybody.
            member.dial_next_ns = now_ns + member.dial_wait_ns // 2
            member.dial_next_ns += self._random.randrange(member.dial_wait_ns // 2)
        return []

    def ban(self, peer: PeerId, now_ns: int) -> list[Effect]:
        """Have nothing more to do with this key."""
        member = self._member(peer, now_ns)
        if member is None or member.banned:
            return []
        member.banned = True
        return [Close(peer, "this key contradicted itself and is banned")] if member.linked else []

    def banned(self) -> list[PeerId]:
        return [peer for peer in sorted(self.members) if self.members[peer].banned]

    def slept(self, gap_ns: int) -> None:
        """This process was stopped for so long: nothing that did not happen meanwhile is others' fault."""
        self._health = min(_HEALTH_CAP, self._health + 2)
        if self._pending is not None:
            self._pending.indirect_ns += gap_ns
            self._pending.fail_ns += gap_ns
        for member in self.members.values():
            member.deadline_ns += gap_ns
            member.since_ns += gap_ns
        self._relayed = {n: (who, nonce, due + gap_ns) for n, (who, nonce, due) in self._relayed.items()}

    def learn(self, peer: PeerId, addresses: Iterable[str], now_ns: int) -> list[Effect]:
        """A hint from discovery: where a peer may be. It changes nothing that the peer itself said."""
        if peer == self.me:
            return []
        member = self._member(peer, now_ns)
        if member is not None and member.record is None:
            member.addresses = tuple(a for a in addresses if is_dialable(a))[:8]
        return self._dial_due(now_ns)

    def set_addresses(self, addresses: tuple[str, ...]) -> None:
        """Our own reachable addresses changed."""
        if addresses != self._addresses:
            self._addresses = addresses
            self._renew()

    def leave(self) -> list[Effect]:
        """Say good-bye to every linked peer."""
        self._left = True
        self._renew()
        return [Send(peer, Gossip(self.progress, (self._own,), ())) for peer in self.linked_peers()]

    def _news(self, records: Iterable[Signed], rumours: Iterable[Rumour], now_ns: int) -> Gossip:
        rates = tuple(EdgeRate(peer, rate) for peer, rate in self._fresh_rates())
        return Gossip(self.progress, tuple(records), tuple(rumours), self.unreachable(now_ns), rates)

    def on_gossip(self, peer: PeerId, message: Gossip, now_ns: int) -> list[Effect]:
        """Take in news; raises ProtocolViolation if a record is wrongly signed."""
        effects: list[Effect] = []
        member = self.members.get(peer)
        if member is not None:
            member.progress = message.progress
            member.unreachable = tuple(PeerId(other) for other in message.unreachable)
            member.rates = {PeerId(edge.peer): edge.kbit_per_s for edge in message.rates}
        for signed in message.records:
            effects += self._on_record(signed, now_ns)
        for rumour in message.rumours:
            effects += self._on_rumour(peer, rumour, now_ns)
        return effects

    def on_probe(self, peer: PeerId, message: Probe, now_ns: int) -> list[Effect]:
        if message.target == self.me:
            return [Send(peer, Ack(message.nonce, self.me))]
        target = self.members.get(PeerId(message.target))
        if target is None or not target.linked or len(self._relayed) >= 256:
            return []
        self._nonce += 1
        self._relayed[self._nonce] = (
            peer,
            message.nonce,
            now_ns + self._scaled(self._config.probe_timeout_s),
        )
        return [Send(target.peer, Probe(self._nonce, target.peer))]

    def on_ack(self, peer: PeerId, message: Ack, now_ns: int) -> list[Effect]:
        relayed = self._relayed.pop(message.nonce, None)
        if relayed is not None and message.target == peer:
            return [Send(relayed[0], Ack(relayed[1], message.target))]
        pending = self._pending
        if pending is None or pending.nonce != message.nonce or pending.target != message.target:
            return []
        self._pending = None
        self._health = max(0, self._health - 1)
        member = self.members.get(pending.target)
        if member is not None and member.status == "suspect" and peer == pending.target:
            return self._set_status(member, "alive", now_ns)
        return []

    def tick(self, now_ns: int) -> list[Effect]:
        effects = self._dial_due(now_ns)
        effects += self._expire(now_ns)
        effects += self._probe_step(now_ns)
        if now_ns >= self._gossip_next_ns:
            self._gossip_next_ns = now_ns + round(self._config.interval_s * _S)
            effects += self._gossip(now_ns)
        if now_ns >= self._full_next_ns:
            self._full_next_ns = now_ns + round(self._config.full_exchange_s * _S)
            linked = self.linked_peers()
            if linked:
                effects += self._send_full(self._random.choice(linked), now_ns)
        return effects

    def set_progress(self, progress: Progress, now_ns: int) -> list[Effect]:
        """Our own progress; a new epoch or phase is told to every linked peer at once, as they pace by it."""
        before, self.progress = self.progress, progress
        if (before.epoch, before.phase) == (progress.epoch, progress.phase):
            return []
        message = self._news((), (), now_ns)
        return [Send(peer, message) for peer in self.linked_peers()]

    # --- parts ---

    def _member(self, peer: PeerId, now_ns: int) -> Member | None:
        member = self.members.get(peer)
        if member is None and peer != self.me and len(self.members) < _MAX_KNOWN:
            member = self.members[peer] = Member(peer, since_ns=now_ns, dial_next_ns=now_ns)
            self._order.insert(self._random.randrange(len(self._order) + 1), peer)
        return member

    def _on_record(self, signed: Signed, now_ns: int) -> list[Effect]:
        author, body = self._statements.check(signed)
        if not isinstance(body, MemberRecord):
            raise ProtocolViolation(f"gossip carries a {signed.kind} statement as a record")
        for address in body.addresses:
            if not is_dialable(address):  # passing it on would break the author's signature or our word
                raise ProtocolViolation(f"a member record announces {address[:64]!r}, which nobody can dial")
        if author == self.me:
            if (body.incarnation, body.sequence) > (self.incarnation, self._sequence):
                self.incarnation = body.incarnation + 1  # an earlier life of ours said more than we have
                self._renew()
            return []
        member = self._member(author, now_ns)
        if member is None or (body.incarnation, body.sequence) <= (member.incarnation, member.sequence):
            return []
        newer_life = body.incarnation > member.incarnation
        member.record = signed
        member.incarnation, member.sequence = body.incarnation, body.sequence
        member.addresses = body.addresses
        member.life = max(member.life, body.life)
        member.tells["record"] = self._transmissions()
        if body.left:
            return self._set_status(member, "left", now_ns)
        if (newer_life and member.status in ("suspect", "dead")) or member.status == "left":
            return self._set_status(member, "alive", now_ns)
        return []

    def _on_rumour(self, source: PeerId, rumour: Rumour, now_ns: int) -> list[Effect]:
        peer = PeerId(rumour.peer)
        if peer == self.me:
            if rumour.status != "alive" and rumour.incarnation >= self.incarnation and not self._left:
                self.incarnation = rumour.incarnation + 1
                self._health = min(_HEALTH_CAP, self._health + 1)
                self._renew()
            return []
        member = self.members.get(peer)
        if member is None or rumour.incarnation < member.incarnation or member.status == "left":
            return []
        if rumour.status == "suspect" and member.status == "alive":
            return self._suspect(member, rumour.incarnation, now_ns, f"{show(source)} doubts it")
        if rumour.status == "dead" and member.status in ("alive", "suspect") and not member.linked:
            return self._set_status(member, "dead", now_ns)
        return []

    def _suspect(self, member: Member, incarnation: int, now_ns: int, why: str) -> list[Effect]:
        member.deadline_ns = now_ns + self._scaled(self._config.suspicion_s)
        member.incarnation = max(member.incarnation, incarnation)
        return self._set_status(member, "suspect", now_ns, why)

    def _set_status(self, member: Member, status: str, now_ns: int, why: str = "") -> list[Effect]:
        if member.status == status:
            return []
        if status == "alive" and not member.linked:  # somebody reaches it again: do not sit out the back-off
            member.dial_wait_ns, member.dial_next_ns = _DIAL_FIRST_NS, now_ns
        member.status, member.since_ns = status, now_ns
        member.tells["rumour"] = self._transmissions()
        level = "info" if status in ("alive", "left") else "warning"
        words = {"alive": "is back", "suspect": "is suspected", "dead": "is gone", "left": "has left"}
        detail = f" ({why})" if why else ""
        return [Notice(level, f"peer {show(member.peer)} {words[status]}{detail}")]

    def _expire(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        for peer in list(self.members):
            member = self.members[peer]
            if member.status == "suspect" and now_ns >= member.deadline_ns:
                effects += self._set_status(member, "dead", now_ns)
            gone = member.status in ("dead", "left") and not member.linked
            if gone and now_ns - member.since_ns > _FORGET_NS:
                del self.members[peer]
                self._order.remove(peer)
        for nonce in [n for n, (_, _, expiry) in self._relayed.items() if now_ns >= expiry]:
            del self._relayed[nonce]
        return effects

    def _probe_step(self, now_ns: int) -> list[Effect]:
        pending = self._pending
        if pending is not None:
            member = self.members.get(pending.target)
            if member is None or not member.linked:
                self._pending = None
            elif not pending.asked_helpers and now_ns >= pending.indirect_ns:
                pending.asked_helpers = True
                helpers = [p for p in self.usable_peers() if p != pending.target]
                self._random.shuffle(helpers)
                asked = helpers[: self._config.indirect_probes]
                return [Send(helper, Probe(pending.nonce, pending.target)) for helper in asked]
            elif now_ns >= pending.fail_ns:
                self._pending = None
                self._health = min(_HEALTH_CAP, self._health + 1)
                if member.status == "alive":
                    return self._suspect(member, member.incarnation, now_ns, "answers no probe")
        if self._pending is None and now_ns >= self._probe_next_ns:
            self._probe_next_ns = now_ns + self._scaled(self._config.probe_s)
            return self._probe_next(now_ns)
        return []

    def _probe_next(self, now_ns: int) -> list[Effect]:
        for _ in range(len(self._order)):
            peer = self._order.pop(0)
            self._order.append(peer)
            if not self.members[peer].linked:
                continue
            self._nonce += 1
            wait_ns = self._scaled(self._config.probe_timeout_s)
            self._pending = _Pending(peer, self._nonce, now_ns + wait_ns, now_ns + 2 * wait_ns)
            return [Send(peer, Probe(self._nonce, peer))]
        return []

    def _wants_dial(self, member: Member) -> bool:
        if member.banned:
            return False
        return not member.linked and member.status in ("alive", "suspect", "dead") and bool(member.addresses)

    def _dial_due(self, now_ns: int) -> list[Effect]:
        effects: list[Effect] = []
        if self._left:
            return effects
        for peer in sorted(self.members):
            member = self.members[peer]
            if self._wants_dial(member) and now_ns >= member.dial_next_ns:
                # The answer (LinkUp or DialFailed) moves this; until then no second dial.
                member.dial_next_ns = now_ns + _DIAL_CAP_NS
                effects.append(Dial(peer, member.addresses))
        return effects

    def _gossip(self, now_ns: int) -> list[Effect]:
        linked = self.linked_peers()
        if not linked:
            return []
        chosen = self._random.sample(linked, min(self._config.fanout, len(linked)))
        records: list[Signed] = []
        rumours: list[Rumour] = []
        if self._own_tells > 0:
            self._own_tells -= len(chosen)
            records.append(self._own)
        for peer in sorted(self.members):
            member = self.members[peer]
            if member.tells.get("record", 0) > 0 and member.record is not None and len(records) < 16:
                member.tells["record"] -= len(chosen)
                records.append(member.record)
            if member.tells.get("rumour", 0) > 0 and member.status != "left" and len(rumours) < 64:
                member.tells["rumour"] -= len(chosen)
                rumours.append(Rumour(peer, member.incarnation, member.status))
        message = self._news(records, rumours, now_ns)
        return [Send(peer, message) for peer in chosen]

    def _send_full(self, peer: PeerId, now_ns: int) -> list[Effect]:
        """All records, in as many messages as their size needs, and what is said of this peer itself."""
        records = [self._own]
        records += [
            m.record for _, m in sorted(self.members.items()) if m.record is not None and m.peer != peer
        ]
        member = self.members.get(peer)
        about = (member.status, member.incarnation) if member is not None else ("alive", 0)
        rumours = [Rumour(peer, about[1], about[0])] if about[0] in ("suspect", "dead") else []
        effects: list[Effect] = []
        batch: list[Signed] = []
        size = 0
        for record in records:
            if batch and size + len(record.body) + 160 > _NEWS_BYTES:
                effects.append(Send(peer, self._news(batch, (), now_ns)))
                batch, size = [], 0
            batch.append(record)
            size += len(record.body) + 160
        effects.append(Send(peer, self._news(batch, rumours, now_ns)))
        return effects

    def _renew(self) -> None:
        self._sequence += 1
        self._own = self._sign_own()
        self._tell_self()

    def _sign_own(self) -> Signed:
        record = MemberRecord(self.incarnation, self._sequence, int(self._left), self._addresses, self.life)
        return self._statements.make(record)

    def _tell_self(self) -> None:
        self._own_tells = self._transmissions()

    def _transmissions(self) -> int:
        """How often one piece of news is passed on: a few times log2 of the swarm (SWIM's lambda log n)."""
        return 4 * (1 + math.ceil(math.log2(len(self.members) + 2)))

    def _scaled(self, seconds: float) -> int:
        return round(seconds * _S) * (1 + self._health)
