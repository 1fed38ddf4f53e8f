"""Small makers of signed statements, views and certificates for tests of the pure machines."""

from __future__ import annotations

import hashlib

from p2p_diloco.identity import Identity
from p2p_diloco.proto.chain import Chain
from p2p_diloco.proto.plans import Plan
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire import messages as msg

ROOT0 = bytes([7]) * 32


def identities(count: int) -> list[Identity]:
    """Reproducible identities, sorted by PeerId."""
    made = [Identity.generate(hashlib.sha256(bytes([i])).digest()) for i in range(count)]
    return sorted(made, key=lambda identity: identity.peer_id)


class Cast:
    """Some identities around one chain that the first of them founded."""

    def __init__(self, count: int, quorum: str = "majority") -> None:
        self.people = identities(count)
        founder = self.people[0].public_key
        self.genesis = msg.Genesis(msg.PROTOCOL, b"{}", b"x", 4096, ROOT0, founder, bytes(16))
        self.speak = [Statements(identity, self.genesis.run_id()) for identity in self.people]
        self.chain = Chain(self.genesis, self.speak[0], quorum)

    def by_id(self, peer_id: bytes) -> Statements:
        return next(s for s in self.speak if s.me == peer_id)

    def ready(self, who: int, weight: int = 10, life: int = 0, trial: int = 0) -> msg.Signed:
        head = self.chain.head
        root = head.certificate.state_root
        body = msg.Ready(self.chain.epoch + 1, head.digest, root, weight, bytes(32), life, trial)
        return self.speak[who].make(body)

    def plan(self, members: list[int], attempt: int = 0, weights: tuple[int, ...] = ()) -> Plan:
        """The ring of these members in this order."""
        weigh = weights or (10,) * len(members)
        readies = [self.ready(m, w) for m, w in zip(members, weigh, strict=True)]
        bodies = [self.chain.check_ready(signed)[1] for signed in readies]
        return Plan.of(self.chain.epoch + 1, attempt, readies, bodies)

    def view(self, members: list[int], attempt: int = 0, author: int | None = None) -> msg.Signed:
        convener = self.by_id(self.chain.convener(attempt)) if author is None else self.speak[author]
        body = msg.View(
            self.chain.epoch + 1,
            self.chain.head.digest,
            attempt,
            "run",
            tuple(self.ready(m) for m in members),
            (),
            (),
            (),
        )
        return convener.make(body)

    def vote(self, who: int, view: msg.Signed, root: bytes, attempt: int = 0) -> msg.Signed:
        head = self.chain.head
        body = msg.Vote(self.chain.epoch + 1, head.digest, attempt, view.digest(), bytes(32), root)
        return self.speak[who].make(body)

    def abstain(self, who: int) -> msg.Signed:
        head = self.chain.head
        return self.speak[who].make(msg.Abstain(self.chain.epoch + 1, head.digest, "test", 0))

    def certificate(
        self, members: list[int], voters: list[int], abstained: tuple[int, ...] = (), root: bytes = b""
    ) -> msg.Certificate:
        state_root = root or bytes([self.chain.epoch + 1]) * 32
        view = self.view(members)
        return msg.Certificate(
            self.chain.epoch + 1,
            self.chain.head.digest,
            (view,),
            bytes(32),
            state_root,
            tuple(self.vote(v, view, state_root) for v in voters),
            tuple(self.abstain(a) for a in abstained),
        )
