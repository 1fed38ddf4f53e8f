"""In-process swarms: real sockets and TLS on loopback, memory discovery, plain functions as trainers."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import gc
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from support.linkpeers import Raw

from p2p_diloco.bridge import FunctionTrainer, Round
from p2p_diloco.config import (
    AgreementConfig,
    CodecConfig,
    GossipConfig,
    InnerConfig,
    OuterConfig,
    PeerConfig,
    RunConfig,
    TimeoutConfig,
)
from p2p_diloco.identity import Identity
from p2p_diloco.net.discovery import MemoryDiscovery, MemoryHub
from p2p_diloco.net.driver import Driver, Watcher
from p2p_diloco.net.tls import client_context
from p2p_diloco.node import Parts, found_run, join_run
from p2p_diloco.numerics.layout import Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers
from p2p_diloco.proto.events import Effect
from p2p_diloco.wire.messages import PROTOCOL, Hello

DeltaOf = Callable[[int, int], np.ndarray]
_SMALL = 10_000  # values up to which every peer's anchors are kept


def make_run(
    min_peers: int,
    codec: str = "int8",
    outer: OuterConfig | None = None,
    epochs: int = 0,
    chunk_values: int = 0,
) -> RunConfig:
    return RunConfig(
        chunk_values=chunk_values,
        inner=InnerConfig(steps=10),
        outer=outer or OuterConfig(),
        codec=CodecConfig(kind=codec),
        agreement=AgreementConfig(min_peers=min_peers, epochs=epochs),
    )


class Trainer(FunctionTrainer):
    """Ends rounds at once, after ``pace_s``, or (``holding``) not before it is told to."""

    pace_s = 0.0
    holding = False

    def start_round(self, command: Round) -> None:
        self.auto = not self.holding and not self.pace_s
        super().start_round(command)
        if self.pace_s:
            asyncio.get_running_loop().call_later(self.pace_s, self._end, command)

    def _end(self, command: Round) -> None:
        if self.held is command and not self.holding:
            self.release()


class Discovery(MemoryDiscovery):
    """Memory discovery whose records, like those of a DHT, outlive a peer that died."""

    dead = False

    async def stop(self) -> None:
        if not self.dead:
            await super().stop()


@dataclass
class Node:
    """One peer of an in-process swarm. ``last_effect(effect)``: if True, the peer dies before that effect."""

    index: int
    identity: Identity
    trainer: Trainer
    driver: Driver
    discovery: Discovery
    notices: list[str]
    metrics: list[tuple[str, dict[str, Any]]]
    task: asyncio.Task[str] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    roots: dict[int, bytes] = field(default_factory=dict)
    anchors: dict[int, np.ndarray] = field(default_factory=dict)
    dialled: list[str] = field(default_factory=list)
    last_effect: Callable[[Effect], bool] | None = None
    dead: bool = False

    @property
    def port(self) -> int:
        """Where it listens."""
        return int(self.driver.machine.setup.addresses[0].rpartition(":")[2])

    @property
    def epoch(self) -> int:
        return self.driver.machine.chain.epoch

    @property
    def state(self) -> FlatState:
        return self.driver.table.state


class Swarm:
    """Starts peers, waits for epochs by event, stops everything."""

    def __init__(
        self,
        folder: Path,
        run: RunConfig,
        values: int,
        delta_of: DeltaOf,
        dtype: str = "float32",
        timeouts: TimeoutConfig | None = None,
        schema: Schema | None = None,
        tokens_of: Callable[[int], int] = lambda index: 100 + index,
        pace_s: float = 0.0,
    ) -> None:
        self.folder, self.run, self.values, self.delta_of = folder, run, values, delta_of
        self.hub = MemoryHub()
        self.nodes: list[Node] = []
        self.schema = schema or Schema((TensorSpec("weights", (values,), dtype),) if values else ())
        self.tokens_of, self.pace_s = tokens_of, pace_s
        self.hold_epoch = -1
        self.timeouts = timeouts or TimeoutConfig(straggler_s=5.0)
        self.changed = asyncio.Event()

    async def add(self, **changes: Any) -> Node:
        """Start one more peer; the first founds the run.

        ``changes``: schema, seed (of its initial weights), wall_ms, identity, run, peer (config keys).
        """
        index = len(self.nodes)
        config: dict[str, Any] = {
            "run_dir": self.folder / f"peer{index}-{changes.get('life', 0)}",
            "host": "127.0.0.1",
            "initial_peers": ("memory",) if index else (),
            "timeouts": self.timeouts,
            "gossip": GossipConfig(interval_s=0.1, probe_s=0.5),
        }
        peer = PeerConfig(**{**config, **changes.get("peer", {})})
        identity = changes.get("identity") or Identity.generate()
        schema = changes.get("schema", self.schema)
        initial = np.random.default_rng(changes.get("seed", 0)).standard_normal(schema.total_values)
        trainer = Trainer(
            schema, initial.astype(np.float32), lambda command, anchor, out: self._train(index, command, out)
        )
        trainer.pace_s, trainer.holding = self.pace_s, self.hold_epoch >= 0
        notices: list[str] = []
        metrics: list[tuple[str, dict[str, Any]]] = []

        def on_metric(kind: str, values: dict[str, Any]) -> None:
            metrics.append((kind, values))
            self.changed.set()

        def on_notice(level: str, text: str) -> None:
            notices.append(f"{level}: {text}")
            self.changed.set()

        discovery = Discovery(self.hub, identity)
        parts = Parts(
            identity=identity,
            run=changes.get("run", self.run if index == 0 else None),
            peer=peer,
            make_trainer=lambda run, config: trainer,
            discovery=discovery,
            watcher=Watcher(notice=on_notice, metric=on_metric),
            allocate=StateBuffers.allocate,
        )
        if "wall_ms" in changes:
            parts.wall_ms = changes["wall_ms"]
        driver = await (join_run(parts) if index else found_run(parts))
        node = Node(index, identity, trainer, driver, discovery, notices, metrics)
        self._listen_in(node)
        self.nodes.append(node)
        node.task = asyncio.get_running_loop().create_task(driver.run())
        return node

    def _listen_in(self, node: Node) -> None:
        """Note what the peer dials, and let it die at the effect that a test names."""
        handle, dial = node.driver.machine.handle, node.driver.links.dial

        def watched_handle(event: Any, now_ns: int) -> list[Effect]:
            if node.dead:
                return []
            effects = handle(event, now_ns)
            for place, effect in enumerate(effects):
                if node.last_effect is not None and node.last_effect(effect):
                    self.kill(node)
                    return effects[:place]
            return effects

        async def watched_dial(addresses: Any, *more: Any, **options: Any) -> Any:
            node.dialled += addresses
            return await dial(addresses, *more, **options)

        node.driver.machine.handle = watched_handle  # type: ignore[method-assign]
        node.driver.links.dial = watched_dial  # type: ignore[method-assign]

    def _train(self, index: int, command: Round, out: np.ndarray) -> tuple[int, float]:
        node = self.nodes[index]
        before = command.epoch - 1
        if node.state.epoch == before and node.epoch == before:  # else it trains for an epoch that is over
            node.roots[before] = node.state.root
            small = self.values <= _SMALL
            if before <= (300 if small else 6) and (small or index == 0):  # more would only fill memory
                node.anchors[before] = node.state.anchor.copy()
        out[:] = self.delta_of(index, command.epoch)
        node.trainer.holding = 0 <= self.hold_epoch <= command.epoch
        self.changed.set()
        return self.tokens_of(index), 1.0

    async def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait, woken by events, until the condition holds; a peer that ended with an error fails it."""
        end = asyncio.get_running_loop().time() + limit_s
        while not condition():
            self.check_tasks()
            if asyncio.get_running_loop().time() > end:
                raise AssertionError(self.report())
            self.changed.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self.changed.wait(), 0.2)

    async def at_epoch(self, epoch: int, nodes: list[Node] | None = None, limit_s: float = 60.0) -> None:
        """Until all given peers hold the certified state of ``epoch`` or a later one."""
        chosen = nodes or self.nodes
        await self.until(lambda: all(n.state.epoch >= epoch for n in chosen), limit_s)

    def check_tasks(self) -> None:
        """Raise what a peer ended with, if it was an error."""
        for node in self.nodes:
            if node.task is not None and node.task.done() and not node.task.cancelled():
                node.task.result()

    async def hold(self, epoch: int = 0) -> int:
        """Stop the clockwork once ``epoch`` (by default one of the next) is certified: all live peers come to
        hold one epoch's state, and their trainers its next round, and know so of each other. Returns that
        epoch; at once if they do already."""
        # Two ahead: some may have ended the round under way, and must not end another one than the rest.
        self.hold_epoch = epoch or max(node.epoch for node in self.nodes) + 2
        alive = [node for node in self.nodes if not node.dead]

        def still() -> bool:
            epochs = {node.state.epoch for node in alive} | {node.epoch for node in alive}
            held = all(node.trainer.held is not None and node.trainer.holding for node in alive)
            return len(epochs) == 1 and held and all(self._knows(a, b) for a in alive for b in alive)

        await self.until(still)
        return alive[0].epoch

    @staticmethod
    def _knows(viewer: Node, other: Node) -> bool:
        """True if ``viewer`` has heard that ``other`` trains on the state that it holds."""
        if viewer is other:
            return True
        member = viewer.driver.machine.members.get(other.identity.peer_id)
        progress = None if member is None else member.progress
        return progress is not None and (progress.epoch, progress.phase) == (viewer.epoch, "training")

    def resume(self) -> None:
        """Let held rounds end, and later ones by themselves."""
        self.hold_epoch = -1
        for node in self.nodes:
            node.trainer.holding = False
            if node.trainer.held is not None:
                node.trainer.release()

    def contributors(self, epoch: int, seen_by: int = 0) -> list[int]:
        """Indexes of the peers that the certificate of ``epoch`` names, sorted."""
        index_of = {node.identity.peer_id: node.index for node in self.nodes}
        link = self.nodes[seen_by].driver.machine.chain.link(epoch)
        return sorted(index_of[peer] for peer in link.contributors)

    def reference(self, last: int, seen_by: int) -> list[np.ndarray]:
        """Anchors of epochs 0..last in fp64, recomputed from the contributors that the certificates name."""
        index_of = {node.identity.peer_id: node.index for node in self.nodes}
        anchor = np.random.default_rng(0).standard_normal(self.values).astype(np.float32).astype(np.float64)
        momentum = np.zeros_like(anchor)
        lr, mu = self.run.outer.lr, self.run.outer.momentum
        layout = self.nodes[seen_by].state.layout
        anchors = [anchor]
        for epoch in range(1, last + 1):
            link = self.nodes[seen_by].driver.machine.chain.link(epoch)
            mean = np.zeros_like(anchor)
            for chunk in range(layout.chunks):  # one that a later attempt reused has its own contributors
                start, stop = layout.bounds(chunk)
                members = link.plan_of(chunk)
                for peer, ready in members:
                    assert ready.weight == self.tokens_of(index_of[peer])
                    share = self.delta_of(index_of[peer], epoch)[start:stop].astype(np.float64)
                    mean[start:stop] += ready.weight * share
                mean[start:stop] /= sum(ready.weight for _, ready in members)
            momentum = mu * momentum + mean
            anchor = anchor - lr * (mean + mu * momentum)
            anchors.append(anchor)
        return anchors

    def assert_follows_reference(self, last: int, nodes: list[Node]) -> None:
        """At each epoch that a peer held, its anchor was the reference's (for the fp32 codec)."""
        expected = self.reference(last, nodes[0].index)
        for node in nodes:
            seen = sorted(epoch for epoch in node.anchors if epoch <= last)
            assert seen, f"peer {node.index} held none of the epochs"
            for epoch in seen:
                np.testing.assert_allclose(node.anchors[epoch], expected[epoch], rtol=1e-4, atol=1e-4)

    @property
    def run_id(self) -> bytes:
        return self.nodes[0].driver.machine.setup.genesis.run_id()

    def hello(self, **changes: Any) -> Hello:
        """What a new peer of this swarm would say first, with some fields changed."""
        hello = Hello(PROTOCOL, "0", "full", self.run_id, self.schema.hash(), self.run.hash(), (), 7, 0, 0)
        return dataclasses.replace(hello, **changes)

    @contextlib.asynccontextmanager
    async def stranger(self, identity: Identity | None = None, target: int = 0) -> AsyncIterator[Raw]:
        """A TLS client of a peer that says just what a test wants."""
        context = client_context(self.run_id, identity or Identity.generate())
        port = self.nodes[target].port
        client = Raw(*await asyncio.open_connection("127.0.0.1", port, ssl=context))
        try:
            yield client
        finally:
            client.close()

    def report(self) -> str:
        lines = []
        for node in self.nodes:
            machine = node.driver.machine
            lines.append(f"peer {node.index} epoch {machine.chain.epoch} {machine.epoch.state}")
            lines += [f"    {text}" for text in machine.epoch.history[-5:] + node.notices[-12:]]
        return "\n".join(lines)

    def kill(self, node: Node) -> None:
        """End a peer as SIGKILL does: no good-bye, what it has not sent is lost, its sockets close."""
        assert node.task is not None
        node.dead = node.discovery.dead = True
        for connection in list(node.driver.links._connections):
            connection.abort()
        node.task.cancel()

    async def stop(self) -> None:
        for node in self.nodes:
            if node.task is not None and not node.task.done():
                node.driver.leave("test over")
        tasks = [node.task for node in self.nodes if node.task is not None]
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        for node in self.nodes:
            node.identity.close()

    def assert_bitwise_equal(self, first: int, last: int) -> None:
        """At every epoch, all peers that held it held the same bits."""
        for epoch in range(first, last + 1):
            roots = {node.roots[epoch] for node in self.nodes if epoch in node.roots}
            assert len(roots) == 1, f"epoch {epoch}: {roots}"


@contextlib.asynccontextmanager
async def swarm(
    folder: Path, peers: int, values: int, delta_of: DeltaOf, run: RunConfig | None = None, **more: Any
) -> AsyncIterator[Swarm]:
    """A running swarm of ``peers``; at its end no task and no stray error may be left."""
    made = Swarm(folder, run or make_run(peers), values, delta_of, **more)
    loop = asyncio.get_running_loop()
    before, strays = asyncio.all_tasks(), []
    loop.set_exception_handler(lambda _, context: strays.append(context))
    try:
        for _ in range(peers):
            await made.add()
        yield made
    finally:
        await made.stop()
    made.check_tasks()
    left = [repr(task) for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    assert not left, left[:3]
    gc.collect()  # a task whose error nobody looked at says so when it is collected
    loop.set_exception_handler(None)
    assert not strays, strays[:3]


def normal_deltas(values: int, seed: int = 0, dtype: str = "float32") -> DeltaOf:
    """Deltas that differ by peer and epoch; bf16 ones are rounded to what that type holds."""

    def delta(index: int, epoch: int) -> np.ndarray:
        x = np.random.default_rng([seed, index, epoch]).standard_normal(values).astype(np.float32)
        if dtype == "bfloat16":
            x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return x

    return delta
