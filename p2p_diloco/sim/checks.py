"""The safety invariants of docs/DESIGN.md, section 8, watched from outside after every event.

Written from the design page and not from the machines: quorums, ballots and sums are worked out again here.
A broken one raises `BrokenRuleError` at once, with the peer and the time.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from p2p_diloco.identity import PeerId, peer_id_of, show
from p2p_diloco.proto.chain import Link
from p2p_diloco.sim.reference import Reference
from p2p_diloco.sim.world import SimPeer, World
from p2p_diloco.wire import messages as msg

_MAX_HELD_BYTES = 257 << 20
_MAX_JOBS = 4096


class BrokenRuleError(AssertionError):
    """An invariant that does not hold. `rule` is its short name."""

    def __init__(self, rule: str, text: str) -> None:
        super().__init__(f"{rule}: {text}")
        self.rule = rule


@dataclass
class _Said:
    """What one key said in one epoch on one head."""

    votes: dict[int, msg.Vote] = field(default_factory=dict)
    promised: int = 0
    abstained: bool = False


class Checker:
    """Hooks itself into a world; `BrokenRuleError` comes out of the event that broke the rule."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.history: dict[int, bytes] = {0: b""}  # epoch -> certificate digest
        self.links: dict[int, Link] = {}
        self.reference: Reference | None = None
        self._heights: dict[tuple[int, int], int] = {}
        self._said: dict[tuple[PeerId, int, bytes], _Said] = {}
        self._roots: dict[tuple[int, bytes], bytes] = {}
        self._views: dict[tuple[PeerId, int, bytes, int], bytes] = {}
        self._disk_seen: dict[int, int] = {}
        self._on_disk: dict[int, set[bytes]] = {}
        self._chosen: dict[tuple[int, bytes], tuple[int, tuple[bytes, bytes, bytes]]] = {}
        self._ballots: dict[tuple[int, bytes, int, tuple[bytes, bytes, bytes]], set[PeerId]] = {}
        self._gone: dict[tuple[int, bytes], set[PeerId]] = {}
        self.certificates_seen = 0
        world.watch = self.after_event
        world.on_send = self.before_send
        world.on_round = self.after_round

    # --- hooks ---

    def after_round(self, peer: SimPeer, commitment: bytes) -> None:
        assert peer.table is not None
        if self.reference is None:
            world = self.world
            codec, outer = peer.table.state.codec, world.run.outer
            self.reference = Reference(world.layout, codec, outer.lr, outer.momentum, world.genesis_anchor)
        self.reference.deltas[commitment] = peer.table.state.buffers.delta.copy()

    def before_send(self, peer: SimPeer, message: msg.Message) -> None:
        """Persist before send: our own words must be on our disk before they leave."""
        if not isinstance(message, msg.Statement) or message.signed.public_key != peer.identity.public_key:
            return
        if message.signed.kind == "view":
            self._one_view(peer, message.signed)
        if message.signed.kind not in ("vote", "promise", "abstain"):
            return
        self._read_disk(peer)
        if message.signed.digest() not in self._on_disk.get(peer.index, set()):
            raise self._broken("persist-first", peer, f"sends a {message.signed.kind} that is not on disk")

    def _one_view(self, peer: SimPeer, signed: msg.Signed) -> None:
        view = msg.decode_body("view", signed.body)
        assert isinstance(view, msg.View)
        key = (peer.peer_id, view.epoch, view.previous, view.attempt)
        if self._views.setdefault(key, signed.digest()) != signed.digest():
            raise self._broken("one-view", peer, f"sends two views of attempt {view.attempt} of {view.epoch}")

    def after_event(self, peer: SimPeer) -> None:
        if peer.machine is None:
            return
        self._read_disk(peer)
        self._check_height(peer)
        self._check_state(peer)
        self._check_memory(peer)

    # --- what was written ---

    def _read_disk(self, peer: SimPeer) -> None:
        seen = self._disk_seen.get(peer.index, 0)
        if len(peer.disk) < seen:
            seen = 0  # the log was lost: what was said stays said
        for kind, data in peer.disk[seen:]:
            if kind == "vote":
                self._on_statement(peer, msg.unpack_object(msg.VoteRecord, data).vote)
            elif kind in ("promise", "abstain"):
                self._on_statement(peer, msg.unpack_object(msg.Signed, data))
        self._disk_seen[peer.index] = len(peer.disk)

    def _on_statement(self, peer: SimPeer, signed: msg.Signed) -> None:
        known = self._on_disk.setdefault(peer.index, set())
        if signed.digest() in known:
            return
        known.add(signed.digest())
        body = msg.decode_body(signed.kind, signed.body)
        if not isinstance(body, msg.Vote | msg.Promise | msg.Abstain):
            return
        author = peer_id_of(signed.public_key)
        said = self._said.setdefault((author, body.epoch, body.previous), _Said())
        if isinstance(body, msg.Vote):
            self._on_vote(peer, author, said, body)
        elif isinstance(body, msg.Promise):
            self._on_promise(peer, said, body)
        else:
            if said.votes:
                raise self._broken("abstain", peer, f"abstains in epoch {body.epoch} after voting in it")
            said.abstained = True
            self._gone.setdefault((body.epoch, body.previous), set()).add(author)

    def _on_vote(self, peer: SimPeer, author: PeerId, said: _Said, vote: msg.Vote) -> None:
        before = said.votes.get(vote.attempt)
        if before is not None and before != vote:
            raise self._broken("one-vote", peer, f"votes twice in attempt {vote.attempt} of {vote.epoch}")
        if vote.attempt < said.promised:
            text = f"votes in attempt {vote.attempt} of {vote.epoch} after promising {said.promised}"
            raise self._broken("promise", peer, text)
        said.votes[vote.attempt] = vote
        value = (vote.view_hash, vote.chunk_root, vote.state_root)
        root = self._roots.setdefault((vote.epoch, vote.view_hash + vote.chunk_root), vote.state_root)
        if root != vote.state_root:
            raise self._broken("equal-roots", peer, f"equal chunks, other state root in epoch {vote.epoch}")
        key = (vote.epoch, vote.previous)
        chosen = self._chosen.get(key)
        if chosen is not None and vote.attempt > chosen[0] and value != chosen[1]:
            text = f"votes in attempt {vote.attempt} against what attempt {chosen[0]} of {vote.epoch} chose"
            raise self._broken("chosen", peer, text)
        ballot = self._ballots.setdefault((*key, vote.attempt, value), set())
        ballot.add(author)
        voters = self._voters(vote.epoch)
        if chosen is None and voters and self._quorum(voters, self._gone.get(key, set()), ballot):
            self._chosen[key] = (vote.attempt, value)

    def _on_promise(self, peer: SimPeer, said: _Said, promise: msg.Promise) -> None:
        said.promised = max(said.promised, promise.attempt)
        highest = max((a for a in said.votes if a < promise.attempt), default=-1)
        reported = -1
        if promise.vote:
            vote = msg.decode_body("vote", promise.vote[0].body)
            assert isinstance(vote, msg.Vote)
            reported = vote.attempt
        if reported < highest:
            text = f"promises attempt {promise.attempt} without its vote in attempt {highest}"
            raise self._broken("promise", peer, text)

    def _voters(self, epoch: int) -> tuple[PeerId, ...]:
        """Who decides this epoch: from the contributors of the two certificates before it."""
        before = self.links.get(epoch - 1)
        if before is None:
            founder = self.world.peers[0].peer_id
            return (founder,) if epoch == 1 else ()
        if epoch == 2:
            return tuple(sorted(before.contributors))
        earlier = self.links.get(epoch - 2)
        old = earlier.contributors if earlier is not None else (self.world.peers[0].peer_id,)
        return tuple(sorted(set(before.contributors) & set(old)))

    def _quorum(self, voters: tuple[PeerId, ...], gone: set[PeerId], signers: set[PeerId]) -> bool:
        left = [v for v in voters if v not in gone] or [min(voters)]
        present = [v for v in left if v in signers]
        if self.world.run.agreement.quorum == "two_thirds":
            return 3 * len(present) > 2 * len(left)
        return 2 * len(present) > len(left) or (2 * len(present) == len(left) and min(left) in present)

    # --- what was decided ---

    def _check_height(self, peer: SimPeer) -> None:
        chain = peer.live.chain
        life = (peer.index, peer.lives)
        known = self._heights.get(life)
        if known is not None and chain.epoch < known:
            raise self._broken("height", peer, f"went back from epoch {known} to {chain.epoch}")
        for epoch in range((known or 0) + 1, chain.epoch + 1):
            self._on_certified(peer, epoch, chain.link(epoch))
        self._heights[life] = chain.epoch

    def _on_certified(self, peer: SimPeer, epoch: int, link: Link) -> None:
        known = self.history.get(epoch)
        if known is not None:
            if known != link.digest:
                raise self._broken("one-certificate", peer, f"holds another certificate of epoch {epoch}")
            return
        self.history[epoch] = link.digest
        self.certificates_seen += 1
        self._check_signers(peer, epoch, link)
        self.links[epoch] = link
        if self.reference is None or self.reference.epoch != epoch - 1:
            raise self._broken("order", peer, f"epoch {epoch} was certified before epoch {epoch - 1}")
        root = self.reference.advance(link)
        if root != link.certificate.state_root:
            text = f"the state of epoch {epoch} is not the mean of what its certificate names"
            raise self._broken("reference", peer, text)

    def _check_signers(self, peer: SimPeer, epoch: int, link: Link) -> None:
        certificate = link.certificate
        voters = self._voters(epoch)
        gone = {peer_id_of(signed.public_key) for signed in certificate.abstentions}
        signers = {peer_id_of(signed.public_key) for signed in certificate.votes}
        if not self._quorum(voters, gone, signers):
            who = ", ".join(show(PeerId(s)) for s in sorted(signers))
            raise self._broken("quorum", peer, f"certificate {epoch} has no quorum of votes ({who})")
        members = [peer_id for peer_id, _ in link.members]
        if len(set(members)) != len(members):
            raise self._broken("ring", peer, f"an id is twice in the ring of epoch {epoch}")

    # --- what is held ---

    def _check_state(self, peer: SimPeer) -> None:
        machine, table = peer.live, peer.table
        assert table is not None
        if machine.epoch.state in ("joining", "finishing", "closing"):
            return
        if table.state.root != machine.chain.head.certificate.state_root:
            text = f"is {machine.epoch.state} at epoch {machine.chain.epoch} with another state"
            raise self._broken("certified-root", peer, text)

    def _check_memory(self, peer: SimPeer) -> None:
        sizes = peer.live.sizes()
        bounds = {"held_bytes": _MAX_HELD_BYTES, "jobs": _MAX_JOBS, "future": 1024, "members": 1024}
        for name, bound in bounds.items():
            if sizes[name] > bound:
                raise self._broken("memory", peer, f"{name} is {sizes[name]}, over {bound}")

    def _broken(self, rule: str, peer: SimPeer, text: str) -> BrokenRuleError:
        at = self.world.now_ns / 1e9
        return BrokenRuleError(rule, f"seed {self.world.seed} at {at:.3f}s: peer {peer.index} {text}")
