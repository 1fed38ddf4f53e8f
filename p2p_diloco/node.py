"""Puts one peer together: founding a run, or joining one with nothing but an address.

Shared by `python -m p2p_diloco.peer` and by in-process swarms in tests; only what they bring differs
(trainer, discovery, watcher).
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from p2p_diloco import __version__
from p2p_diloco.bridge.api import Trainer
from p2p_diloco.bridge.shared import SharedState, StateAreas
from p2p_diloco.checkpoint import restore_newest
from p2p_diloco.config import PeerConfig, RunConfig, build_config, first_difference
from p2p_diloco.disk import RunFolder
from p2p_diloco.errors import (
    ConfigError,
    NetworkError,
    ProtocolViolation,
    RemoteError,
    RunMismatchError,
    SchemaMismatchError,
    UserError,
)
from p2p_diloco.failpoints import Failpoints
from p2p_diloco.identity import Identity, PeerId, show
from p2p_diloco.net import links as net
from p2p_diloco.net.discovery import Discovery
from p2p_diloco.net.driver import Driver, Watcher
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Layout, Schema
from p2p_diloco.numerics.state import FlatState
from p2p_diloco.numerics.work import WorkTable
from p2p_diloco.proto.peer import PeerMachine, PeerSetup
from p2p_diloco.proto.rounds import Round
from p2p_diloco.proto.statements import RECEIPT_BYTES
from p2p_diloco.wire import messages as msg
from p2p_diloco.wire.addresses import is_dialable, join_address
from p2p_diloco.wire.runid import parse_run_id, show_run_id

logger = logging.getLogger(__name__)

_LOOK_S = 2.0  # between looks for a run or its peers (guess)
_SAY_EVERY_S = 15.0  # between lines that say we are still looking (guess)


@dataclass
class Parts:
    """What the caller brings. `run` is None for a joiner without a config file."""

    identity: Identity
    run: RunConfig | None
    peer: PeerConfig
    make_trainer: Callable[[RunConfig, PeerConfig], Trainer]
    discovery: Discovery
    watcher: Watcher
    allocate: Callable[[int], StateAreas] = SharedState.create
    wall_ms: Callable[[], int] = lambda: time.time_ns() // 1_000_000
    clock_ns: Callable[[], int] = time.monotonic_ns
    failpoints: Failpoints = field(default_factory=Failpoints)
    nonce: int = field(default_factory=lambda: int.from_bytes(os.urandom(7), "big"))


async def found_run(parts: Parts) -> Driver:
    """Write genesis from our initial weights and stand ready as the run's first member."""
    run = parts.run or RunConfig()
    folder = RunFolder(parts.peer.run_dir, _rounds_kept(parts.peer))
    earlier = folder.genesis()
    if earlier is not None:
        return await _resume_run(parts, folder, earlier)
    trainer = parts.make_trainer(run, parts.peer)
    try:
        schema = await trainer.start()
        state = _make_state(parts, run, schema, Layout.choose(schema.total_values, run.chunk_values))
        trainer.attach(state.buffers)
        await trainer.write_initial()
        await asyncio.to_thread(state.initialise, 0)
        genesis = msg.Genesis(
            msg.PROTOCOL,
            run.canonical_bytes(),
            schema.to_bytes(),
            state.layout.chunk_values,
            state.root,
            parts.identity.public_key,
            os.urandom(16),
        )
        await parts.discovery.start()
        return await _assemble(parts, run, genesis, schema, state, trainer, folder, held_epoch=0)
    except BaseException:
        await trainer.stop(parts.peer.timeouts.leave_s)
        await parts.discovery.stop()
        raise


async def _resume_run(parts: Parts, folder: RunFolder, genesis: msg.Genesis) -> Driver:
    """Go on with the run in our folder from what our disk holds, with nobody else there yet.

    Only from the newest certified epoch: going on from an older one would decide an epoch twice.
    """
    run = _run_of(genesis)
    if parts.run is not None and parts.run != run:
        raise RunMismatchError(f"{folder.path} holds another run: {first_difference(parts.run, run)}")
    trainer = parts.make_trainer(run, parts.peer)
    try:
        schema = await trainer.start()
        _check_schema(schema, genesis)
        state = _make_state(parts, run, schema, Layout(schema.total_values, genesis.chunk_values))
        trainer.attach(state.buffers)
        epoch = await asyncio.to_thread(restore_newest, folder, state, schema)
        certified = await asyncio.to_thread(folder.newest_epoch)
        if epoch < 0 or epoch < certified:
            held = "no state of it" if epoch < 0 else f"only the state of epoch {epoch}"
            raise UserError(
                f"{folder.path} holds a run certified to epoch {certified}, but {held}; "
                "rejoin with --initial-peers, or found a new run with another --run-dir"
            )
        await parts.discovery.start()
        return await _assemble(parts, run, genesis, schema, state, trainer, folder, held_epoch=epoch)
    except BaseException:
        await trainer.stop(parts.peer.timeouts.leave_s)
        await parts.discovery.stop()
        raise


def _rounds_kept(peer: PeerConfig) -> int:
    """How many epochs' rounds stay on disk at most: twice what lies between two checkpoints, since one may
    fail; a checkpoint that is written lets go of those before it."""
    return 2 * peer.checkpoint_every_epochs + 3


def _check_schema(schema: Schema, genesis: msg.Genesis) -> None:
    theirs = Schema.from_bytes(genesis.schema)
    if schema.hash() != theirs.hash():
        raise SchemaMismatchError(schema.first_difference(theirs))


async def join_run(parts: Parts) -> Driver:
    """Find a run, learn its genesis from any peer, check it, and stand ready to catch up."""
    trainer: Trainer | None = None
    try:
        await parts.discovery.start()
        folder = RunFolder(parts.peer.run_dir, _rounds_kept(parts.peer))
        genesis = folder.genesis() or await _fetch_genesis(parts, await _choose_run(parts))
        wanted = parts.peer.run_id
        if wanted and parse_run_id(wanted) != genesis.run_id():
            raise RunMismatchError(
                f"{folder.path} belongs to run {show_run_id(genesis.run_id())}, not {wanted}"
            )
        run = _run_of(genesis)
        if parts.run is not None and parts.run != run:
            raise RunMismatchError(first_difference(parts.run, run))
        trainer = parts.make_trainer(run, parts.peer)
        schema = await trainer.start()
        _check_schema(schema, genesis)
        state = _make_state(parts, run, schema, Layout(schema.total_values, genesis.chunk_values))
        trainer.attach(state.buffers)
        epoch = await asyncio.to_thread(restore_newest, folder, state, schema)
        return await _assemble(parts, run, genesis, schema, state, trainer, folder, held_epoch=epoch)
    except BaseException:
        if trainer is not None:
            await trainer.stop(parts.peer.timeouts.leave_s)
        await parts.discovery.stop()
        raise


def _make_state(parts: Parts, run: RunConfig, schema: Schema, layout: Layout) -> FlatState:
    buffers = parts.allocate(schema.total_values)
    return FlatState(layout, Codec(run.codec.kind), run.outer.lr, run.outer.momentum, buffers)


def _run_of(genesis: msg.Genesis) -> RunConfig:
    """The run config in a genesis record; ConfigError if this version cannot read it."""
    try:
        data = json.loads(genesis.config)
    except ValueError as error:
        raise ConfigError(f"the run's genesis record holds no config: {error}") from None
    if not isinstance(data, dict):
        raise ConfigError("the run's genesis record holds no config")
    return build_config(RunConfig, data, "run")


async def _choose_run(parts: Parts) -> bytes:
    """The run to join: the one that was asked for, or the only one that discovery shows."""
    if parts.peer.run_id:
        return parse_run_id(parts.peer.run_id)
    said = -_SAY_EVERY_S
    while True:
        try:
            entries = await parts.discovery.runs()
        except NetworkError as error:
            logger.info("discovery: %s", error)
            entries = []
        if len(entries) == 1:
            return entries[0].run_id
        if len(entries) > 1:
            names = ", ".join(f"{show_run_id(entry.run_id)} ({entry.name})" for entry in entries[:8])
            raise UserError(f"several runs are there; choose one with --run-id: {names}")
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            parts.watcher.notice("info", f"looking for a run; {parts.discovery.status()}")
        await asyncio.sleep(_LOOK_S)


async def _fetch_genesis(parts: Parts, run_id: bytes) -> msg.Genesis:
    """Ask peers of the run, one after the other, until one gives the genesis that hashes to the run id."""
    said = -_SAY_EVERY_S
    while True:
        try:
            records = await parts.discovery.find(run_id)
        except NetworkError as error:
            logger.info("discovery: %s", error)
            records = []
        for record in records:
            try:
                return await _ask_genesis(parts, run_id, record.peer_id, record.addresses)
            except (NetworkError, RemoteError, TimeoutError) as error:
                logger.info("peer %s gave no genesis: %s", show(record.peer_id), error or "no answer in time")
        if time.monotonic() - said >= _SAY_EVERY_S:
            said = time.monotonic()
            parts.watcher.notice(
                "info", f"looking for peers of run {show_run_id(run_id)}; {parts.discovery.status()}"
            )
        await asyncio.sleep(_LOOK_S)


async def _ask_genesis(parts: Parts, run_id: bytes, peer: PeerId, addresses: tuple[str, ...]) -> msg.Genesis:
    answer: asyncio.Future[msg.Genesis] = asyncio.get_running_loop().create_future()

    def on_event(event: net.LinkEvent) -> None:
        if isinstance(event, net.Received) and isinstance(event.message, msg.GenesisReply):
            if not answer.done():
                answer.set_result(event.message.genesis)
        elif isinstance(event, net.LinkDown) and not answer.done():
            answer.set_exception(ProtocolViolation(f"closed the link: {event.reason}"))

    hello = _hello_maker(parts, run_id, b"", b"", lambda: ())
    links = net.LinkManager(
        parts.identity, run_id, parts.peer, hello, lambda hello, peer: None, on_event, max_payload_bytes=0
    )
    try:
        await links.dial(addresses, peer, mode="bootstrap")
        links.send(peer, msg.GetGenesis(0))
        genesis = await asyncio.wait_for(answer, parts.peer.timeouts.request_s)
    finally:
        await links.stop()
    if genesis.run_id() != run_id:
        raise ProtocolViolation("sent a genesis record that does not hash to the run id")
    return genesis


def _hello_maker(
    parts: Parts, run_id: bytes, schema_hash: bytes, config_hash: bytes, listen: Callable[[], tuple[str, ...]]
) -> Callable[[str], msg.Hello]:
    def make(mode: str) -> msg.Hello:
        return msg.Hello(
            msg.PROTOCOL,
            __version__,
            mode,
            run_id,
            schema_hash,
            config_hash,
            listen(),
            parts.nonce,
            parts.wall_ms(),
            0,
        )

    return make


def make_judge(
    run_id: bytes, schema: Schema, config_hash: bytes
) -> Callable[[msg.Hello, PeerId], msg.Refuse | None]:
    """Why a HELLO is refused, in one line each; None if it is welcome."""
    schema_hash, schema_bytes = schema.hash(), schema.to_bytes()

    def judge(hello: msg.Hello, peer: PeerId) -> msg.Refuse | None:
        if hello.protocol != msg.PROTOCOL:
            return msg.Refuse("protocol", f"protocol {hello.protocol} there, {msg.PROTOCOL} here")
        if hello.run_id != run_id:
            text = f"run {show_run_id(hello.run_id)} there, {show_run_id(run_id)} here"
            return msg.Refuse("run", text)
        if hello.mode != "full":
            return None
        if hello.schema_hash != schema_hash:
            enclosed = schema_bytes if len(schema_bytes) <= 48 << 10 else b""
            return msg.Refuse("schema", "the parameters differ; our schema is enclosed", enclosed)
        if hello.config_hash != config_hash:
            return msg.Refuse("config", "the run config differs from the genesis record's")
        return None

    return judge


async def _assemble(
    parts: Parts,
    run: RunConfig,
    genesis: msg.Genesis,
    schema: Schema,
    state: FlatState,
    trainer: Trainer,
    folder: RunFolder,
    held_epoch: int,
) -> Driver:
    run_id = genesis.run_id()
    incarnation = await asyncio.to_thread(folder.open_run, genesis)
    listening: list[str] = []
    drivers: list[Driver] = []

    def on_event(event: net.LinkEvent) -> None:
        if drivers:
            drivers[0].on_link_event(event)

    codec_bytes = RECEIPT_BYTES + state.codec.payload_bytes(
        min(state.layout.chunk_values, schema.total_values)
    )
    state_bytes = 8 * min(state.layout.chunk_values, schema.total_values)
    hello = _hello_maker(parts, run_id, schema.hash(), run.hash(), lambda: tuple(listening))
    links = net.LinkManager(
        parts.identity,
        run_id,
        parts.peer,
        hello,
        make_judge(run_id, schema, run.hash()),
        on_event,
        max_payload_bytes=max(codec_bytes, state_bytes),
        wall_ms=parts.wall_ms,
        bootstrap_reply=lambda message: (
            msg.GenesisReply(genesis) if isinstance(message, msg.GetGenesis) else None
        ),
    )
    port = await links.start(parts.peer.host, parts.peer.port)
    listening += own_addresses(parts.peer, port)
    certificates = await asyncio.to_thread(folder.certificates)
    rounds = [
        Round.of(epoch, root, payloads)
        for epoch in (len(certificates), len(certificates) + 1)
        for root, payloads in await asyncio.to_thread(folder.rounds, epoch)
    ]
    setup = PeerSetup(
        run=run,
        peer=parts.peer,
        genesis=genesis,
        chunks=state.layout.chunks,
        addresses=tuple(listening),
        incarnation=incarnation,
        held_epoch=held_epoch,
        certificates=certificates,
        log=folder.log(),
        rounds=tuple(rounds),
        forgot=folder.forgot,
    )
    machine = PeerMachine(parts.identity, setup, random.Random(parts.nonce), parts.clock_ns())
    driver = Driver(
        machine,
        links,
        WorkTable(state, schema),
        trainer,
        parts.discovery,
        folder,
        parts.watcher,
        parts.failpoints,
        parts.clock_ns,
    )
    drivers.append(driver)
    reachability = "direct" if listening else "outbound"
    await parts.discovery.announce(run_id, run.name, tuple(listening), reachability)
    return driver


def own_addresses(peer: PeerConfig, port: int) -> list[str]:
    """What to announce: the configured addresses, else the bound one; never 0.0.0.0 or port 0."""
    if peer.announce:
        for address in peer.announce:
            if not is_dialable(address):
                raise ConfigError(f"peer.announce: {address} is no address that others can dial")
        return list(peer.announce)
    if peer.host not in ("0.0.0.0", "::", ""):
        return [join_address(peer.host, port)]
    return [join_address(host, port) for host in _outward_hosts()]


def _outward_hosts() -> list[str]:
    """The address that this machine would use towards others (no packet is sent), and loopback."""
    hosts: list[str] = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # TEST-NET-1; connecting a datagram socket only picks a route
            hosts.append(probe.getsockname()[0])
        except OSError as error:
            logger.info("no outward address found (%s); announcing loopback only", error.strerror)
    if "127.0.0.1" not in hosts:
        hosts.append("127.0.0.1")
    return hosts
