"""In-process swarms: real sockets and TLS on loopback, memory discovery, plain functions as trainers."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

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
from p2p_diloco.node import Parts, found_run, join_run
from p2p_diloco.numerics.layout import Schema, TensorSpec
from p2p_diloco.numerics.state import FlatState, StateBuffers

DeltaOf = Callable[[int, int], np.ndarray]


def make_run(min_peers: int, codec: str = "int8", outer: OuterConfig | None = None, epochs: int = 0) -> RunConfig:
    return RunConfig(
        inner=InnerConfig(steps=10),
        outer=outer or OuterConfig(),
        codec=CodecConfig(kind=codec),
        agreement=AgreementConfig(min_peers=min_peers, epochs=epochs),
    )


@dataclass
class Node:
    """One peer of an in-process swarm."""

    index: int
    identity: Identity
    trainer: FunctionTrainer
    driver: Driver
    notices: list[str]
    metrics: list[tuple[str, dict[str, Any]]]
    task: asyncio.Task[str] | None = None
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    roots: dict[int, bytes] = field(default_factory=dict)
    anchors: dict[int, np.ndarray] = field(default_factory=dict)

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
    ) -> None:
        self.folder, self.run, self.values, self.delta_of = folder, run, values, delta_of
        self.hub = MemoryHub()
        self.nodes: list[Node] = []
        self.schema = Schema((TensorSpec("weights", (values,), dtype),) if values else ())
        self.timeouts = timeouts or TimeoutConfig(straggler_s=5.0)
        self.changed = asyncio.Event()

    async def add(self, **changes: Any) -> Node:
        """Start one more peer; the first founds the run. ``changes``: schema, seed, wall_ms, identity, run."""
        index = len(self.nodes)
        peer = PeerConfig(
            run_dir=self.folder / f"peer{index}-{changes.get('life', 0)}",
            host="127.0.0.1",
            initial_peers=("memory",) if index else (),
            timeouts=self.timeouts,
            gossip=GossipConfig(interval_s=0.1, probe_s=0.5),
            **changes.get("peer", {}),
        )
        identity = changes.get("identity") or Identity.generate()
        schema = changes.get("schema", self.schema)
        initial = np.random.default_rng(changes.get("seed", 0)).standard_normal(schema.total_values)
        trainer = FunctionTrainer(
            schema, initial.astype(np.float32), lambda command, anchor, out: self._train(index, command, out)
        )
        notices: list[str] = []
        metrics: list[tuple[str, dict[str, Any]]] = []

        def on_metric(kind: str, values: dict[str, Any]) -> None:
            metrics.append((kind, values))
            self.changed.set()

        def on_notice(level: str, text: str) -> None:
            notices.append(f"{level}: {text}")
            self.changed.set()

        parts = Parts(
            identity=identity,
            run=changes.get("run", self.run if index == 0 else None),
            peer=peer,
            make_trainer=lambda run, config: trainer,
            discovery=MemoryDiscovery(self.hub, identity),
            watcher=Watcher(notice=on_notice, metric=on_metric),
            allocate=StateBuffers.allocate,
        )
        if "wall_ms" in changes:
            parts.wall_ms = changes["wall_ms"]
        driver = await (join_run(parts) if index else found_run(parts))
        node = Node(index, identity, trainer, driver, notices, metrics)
        self.nodes.append(node)
        node.task = asyncio.get_running_loop().create_task(driver.run())
        return node

    def _train(self, index: int, command: Round, out: np.ndarray) -> tuple[int, float]:
        node = self.nodes[index]
        node.roots[command.epoch - 1] = node.state.root
        if index == 0 and command.epoch <= 7:  # what the tests look at; more would only fill memory
            node.anchors[command.epoch - 1] = node.state.anchor.copy()
        out[:] = self.delta_of(index, command.epoch)
        self.changed.set()
        return 100 + index, 1.0

    async def until(self, condition: Callable[[], bool], limit_s: float = 60.0) -> None:
        """Wait, woken by events, until the condition holds; a peer that ended with an error fails the wait."""
        async with asyncio.timeout(limit_s):
            while not condition():
                for node in self.nodes:
                    if node.task is not None and node.task.done() and not node.task.cancelled():
                        node.task.result()
                self.changed.clear()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(self.changed.wait(), 0.2)

    async def at_epoch(self, epoch: int, nodes: list[Node] | None = None, limit_s: float = 60.0) -> None:
        """Until all given peers hold the certified state of ``epoch`` or a later one."""
        chosen = nodes or self.nodes
        try:
            await self.until(lambda: all(n.state.epoch >= epoch for n in chosen), limit_s)
        except TimeoutError:
            raise AssertionError(self.report()) from None

    def report(self) -> str:
        lines = []
        for node in self.nodes:
            machine = node.driver.machine
            lines.append(f"peer {node.index} epoch {machine.chain.epoch} {machine.epoch.state}")
            lines += [f"    {text}" for text in machine.epoch.history[-5:] + node.notices[-6:]]
        return "\n".join(lines)

    def kill(self, node: Node) -> None:
        """End a peer without a good-bye: its tasks stop and its sockets close, as after SIGKILL."""
        assert node.task is not None
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
    """A running swarm of ``peers``; everything is stopped at the end."""
    made = Swarm(folder, run or make_run(peers), values, delta_of, **more)
    try:
        for _ in range(peers):
            await made.add()
        yield made
    finally:
        await made.stop()


def normal_deltas(values: int, seed: int = 0, dtype: str = "float32") -> DeltaOf:
    """Deltas that differ by peer and epoch; bf16 ones are rounded to what that type holds."""

    def delta(index: int, epoch: int) -> np.ndarray:
        x = np.random.default_rng([seed, index, epoch]).standard_normal(values).astype(np.float32)
        if dtype == "bfloat16":
            x = (x.view(np.uint32) & np.uint32(0xFFFF0000)).view(np.float32)
        return x

    return delta
