"""Discovery through hivemind's DHTNode (1.1.12), with a guard for each thing that was seen to go wrong.

What it does about them: the daemon starts without initial peers and this class owns the reconnecting, so
dead seeds neither stop a start nor stay dead; every call has a deadline, shutdown too; the daemon is
watched and restarted, and dies with us; records are signed, bounded and checked by a validator before
anything unpacks them; the node's serializer refuses nested extension types; `strict=False`, since it
refuses joiners with 3 s of clock skew; NAT flags are explicit; one node per daemon.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import ipaddress
import logging
import os
import time
from collections.abc import Awaitable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

from p2p_diloco.errors import ConfigError, DiscoveryError, ProtocolViolation
from p2p_diloco.identity import Identity, PeerId
from p2p_diloco.net.dhtguard import make_serializer, make_validator
from p2p_diloco.net.discovery import (
    RECORD_BYTES,
    RECORD_TTL_S,
    PeerRecord,
    RunEntry,
    count_runs,
    make_record,
    read_record,
)
from p2p_diloco.net.watchdog import Watchdog

logger = logging.getLogger(__name__)

T = TypeVar("T")

_SHARDS: Final = 4  # keys that the records of a run are spread over (guess)
_INDEX_KEY: Final = "p2p-diloco/1/runs"
_CALL_S: Final = 8.0  # deadline of one DHT call (guess: hivemind's own RPCs wait 3 s)
_START_S: Final = 20.0  # deadline of a daemon start (guess: hivemind's is 15 s)
_STOP_S: Final = 1.5  # deadline of each step of a stop
_LOOK_S: Final = 1.0  # between two looks at daemon and seeds
_RETRY_FIRST_S, _RETRY_CAP_S = 1.0, 30.0  # back-off for seeds and daemon (guess)
_RENEW_S: Final = RECORD_TTL_S / 5


@dataclass
class _Seed:
    """One of --initial-peers."""

    maddr: str
    peer_id: str
    next_s: float = 0.0
    wait_s: float = _RETRY_FIRST_S
    up: bool = False
    said: bool = False


class DHTDiscovery:
    """`Discovery` over the DHT. Construction checks the multiaddrs; `start` never fails for the network."""

    def __init__(
        self, identity: Identity, host: str, port: int, initial_peers: Sequence[str], folder: Path
    ) -> None:
        self._identity = identity
        self._host, self._port = host, port
        self._seeds = [_Seed(text, _peer_of(text)) for text in initial_peers]
        self._key_path = folder / "libp2p.key"
        self._p2p: Any = None
        self._node: Any = None
        self._watchdog: Watchdog | None = None
        self._modules: dict[str, Any] = {}
        self._task: asyncio.Task[None] | None = None
        self._record: tuple[bytes, str, tuple[str, ...], str] | None = None
        self._sequence = time.time_ns() // 1_000_000  # so that a restarted peer's records are newer
        self._publish_next_s = 0.0
        self._known = 0
        self._maddrs: list[str] = []
        self._up_wait_s = _RETRY_FIRST_S
        self._stopped = False

    # --- Discovery ---

    async def start(self) -> None:
        """Bring the daemon up, try each seed once, and keep looking after both."""
        for name in ("hivemind.dht.node", "hivemind.p2p", "hivemind.dht.routing"):
            self._modules[name] = await asyncio.to_thread(importlib.import_module, name)
        logging.addLevelName(logging.WARNING, "WARNING")  # importing hivemind renames it for everybody
        logging.getLogger("hivemind").setLevel(logging.ERROR)
        _hush_hivemind(asyncio.get_running_loop())
        await self._bring_up()
        await self._greet_seeds()
        self._task = asyncio.get_running_loop().create_task(self._look_after(), name="dht")

    async def announce(self, run_id: bytes, name: str, addresses: tuple[str, ...], reachability: str) -> None:
        self._record = (run_id, name, addresses, reachability)
        await self._publish()

    async def find(self, run_id: bytes) -> list[PeerRecord]:
        found: dict[PeerId, PeerRecord] = {}
        keys = [_run_key(run_id, shard) for shard in range(_SHARDS)]
        for record in await self._read(keys):
            if record.run_id == run_id and record.peer_id != self._identity.peer_id:
                found[record.peer_id] = record
        return [found[peer] for peer in sorted(found)]

    async def runs(self) -> list[RunEntry]:
        records = await self._read([_INDEX_KEY])
        return count_runs([r for r in records if r.peer_id != self._identity.peer_id])

    def visible_maddrs(self) -> list[str]:
        return list(self._maddrs)

    def status(self) -> str:
        if self._node is None:
            return "DHT daemon is down, restarting it"
        up = sum(seed.up for seed in self._seeds)
        seeds = f", {up} of {len(self._seeds)} initial peers answer" if self._seeds else ""
        return f"DHT: {self._known} other nodes{seeds}"

    async def stop(self) -> None:
        self._stopped = True
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
            self._task = None
        await self._bring_down()

    # --- daemon ---

    async def _bring_up(self) -> None:
        """Start daemon and node; on failure everything is down again and a later look retries."""
        kind = "ip6" if ":" in self._host else "ip4"
        try:
            _write_key(self._key_path, self._identity)
            self._p2p = await asyncio.wait_for(
                self._modules["hivemind.p2p"].P2P.create(
                    host_maddrs=[f"/{kind}/{self._host}/tcp/{self._port}"],
                    identity_path=str(self._key_path),
                    auto_nat=False,
                    nat_port_map=False,
                    use_relay=False,
                    use_auto_relay=False,
                    use_ipfs=False,
                    startup_timeout=_START_S,
                ),
                _START_S + 5,
            )
            self._watchdog = await Watchdog.over(self._p2p._child.pid)
            node_module = self._modules["hivemind.dht.node"]
            self._node = await self._within(
                node_module.DHTNode.create(
                    p2p=self._p2p,
                    strict=False,
                    ensure_bootstrap_success=False,
                    cache_locally=False,
                    cache_on_store=False,
                    cache_nearest=0,
                    record_validator=make_validator(),
                ),
                "starting the DHT node",
            )
            self._node.protocol.serializer = make_serializer()
            visible = await self._within(self._p2p.get_visible_maddrs(latest=True), "asking for addresses")
        except (TimeoutError, DiscoveryError, OSError, RuntimeError, ValueError, EOFError) as error:
            logger.warning("the DHT daemon did not start (%s); trying again", error or type(error).__name__)
            await self._bring_down()
            return
        except Exception as error:  # noqa: BLE001 - hivemind raises its own kinds, some without a base
            logger.warning("the DHT daemon did not start (%r); trying again", error)
            await self._bring_down()
            return
        self._maddrs = _useful(str(maddr) for maddr in visible)
        if self._port == 0 and self._maddrs:
            self._port = int(self._maddrs[0].split("/tcp/")[1].split("/")[0])  # the same after a restart
        self._up_wait_s = _RETRY_FIRST_S
        self._publish_next_s = 0.0
        for seed in self._seeds:
            seed.up, seed.next_s = False, 0.0

    async def _bring_down(self) -> None:
        """Stop node and daemon, each within its deadline; the daemon is killed if it will not end."""
        node, p2p, watchdog = self._node, self._p2p, self._watchdog
        self._node = self._p2p = self._watchdog = None
        for what in (node, p2p):
            if what is None:
                continue
            try:
                await asyncio.wait_for(what.shutdown(), _STOP_S)
            except Exception as error:  # noqa: BLE001 - whatever it says, the daemon is killed below
                logger.debug("DHT shutdown: %r", error)
        if p2p is not None and p2p._child is not None and p2p._child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                p2p._child.kill()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(p2p._child.wait(), _STOP_S)
        if watchdog is not None:
            await watchdog.stop()

    async def _look_after(self) -> None:
        """Restart a dead daemon, greet seeds that are down, renew our record; until cancelled."""
        while True:
            await asyncio.sleep(_LOOK_S)
            child = None if self._p2p is None else self._p2p._child
            if child is None or child.returncode is not None:
                if child is not None:
                    logger.warning("the DHT daemon died (status %s); restarting it", child.returncode)
                await self._bring_down()
                await self._bring_up()
                if self._node is None:
                    await asyncio.sleep(self._up_wait_s)
                    self._up_wait_s = min(self._up_wait_s * 2, _RETRY_CAP_S)
                    continue
            await self._greet_seeds()
            known = self._count_nodes()
            if known > self._known:
                self._publish_next_s = min(self._publish_next_s, time.monotonic() + 1.0)
            self._known = known
            if time.monotonic() >= self._publish_next_s:
                await self._publish()

    # --- seeds ---

    async def _greet_seeds(self) -> None:
        """Connect to seeds that are due; one that is down is named once and retried with back-off."""
        if self._node is None:
            return
        if not self._count_nodes():  # an emptied routing table never refills by itself
            for seed in self._seeds:
                if seed.up:
                    seed.up, seed.next_s, seed.wait_s = False, 0.0, _RETRY_FIRST_S
        due = [seed for seed in self._seeds if not seed.up and time.monotonic() >= seed.next_s]
        await asyncio.gather(*(self._greet(seed) for seed in due))
        down = [seed for seed in self._seeds if not seed.up]
        if due and down and len(down) == len(self._seeds) and not self._count_nodes():
            logger.warning("none of the %d initial peers answers; still trying", len(self._seeds))

    async def _greet(self, seed: _Seed) -> None:
        try:
            peer_id = self._modules["hivemind.p2p"].PeerID.from_base58(seed.peer_id)
            multiaddr = self._modules["hivemind.p2p"].p2p_daemon.Multiaddr(seed.maddr)
            plain = multiaddr.decapsulate("/p2p/" + seed.peer_id)
            await self._within(self._p2p._client.connect(peer_id, [plain]), "connecting")
            answer = await self._within(
                self._node.protocol.call_ping(peer_id, validate=False, strict=False), "pinging"
            )
            if answer is None:
                raise DiscoveryError("it does not answer a ping")
            await self._within(self._node.find_nearest_nodes([self._node.node_id]), "looking around")
        except Exception as error:  # noqa: BLE001 - hivemind and its client raise many kinds
            seed.next_s = time.monotonic() + seed.wait_s
            seed.wait_s = min(seed.wait_s * 2, _RETRY_CAP_S)
            if not seed.said:
                seed.said = True
                logger.warning("initial peer %s does not answer (%s); skipped for now", seed.maddr, error)
            return
        if seed.said:
            logger.info("initial peer %s answers now", seed.maddr)
        seed.up, seed.said, seed.wait_s = True, False, _RETRY_FIRST_S

    def _count_nodes(self) -> int:
        return 0 if self._node is None else len(self._node.protocol.routing_table.uid_to_peer_id)

    # --- records ---

    async def _publish(self) -> None:
        """Store our record here and on others; a failure is retried at the next look."""
        self._publish_next_s = time.monotonic() + _RENEW_S
        if self._record is None or self._node is None:
            return
        self._sequence += 1
        run_id, name, addresses, reachability = self._record
        data = make_record(self._identity, run_id, name, addresses, self._sequence, reachability)
        expiry = time.time() + RECORD_TTL_S
        shard = self._identity.peer_id[0] % _SHARDS
        keys = [_run_key(run_id, shard), _INDEX_KEY]
        for exclude_self in (False, True) if self._count_nodes() else (False,):
            try:
                # The first store makes us a holder; only the second one says whether others are.
                await self._within(
                    self._node.store_many(
                        keys,
                        [data, data],
                        [expiry, expiry],
                        subkeys=[self._identity.public_key] * 2,
                        exclude_self=exclude_self,
                    ),
                    "storing our record",
                )
            except DiscoveryError as error:
                logger.info("discovery: %s", error)
                self._publish_next_s = time.monotonic() + _RETRY_FIRST_S * 2

    async def _read(self, keys: list[str]) -> list[PeerRecord]:
        """Checked records under these keys; DiscoveryError if the DHT does not answer."""
        if self._node is None:
            raise DiscoveryError("the DHT daemon is down")
        answers = await self._within(
            self._node.get_many(keys, sufficient_expiration_time=float("inf")), "reading the DHT"
        )
        found: list[PeerRecord] = []
        for key in keys:
            entry = answers.get(key)
            value: Any = None if entry is None else entry.value
            if value is None or not hasattr(value, "items"):
                continue
            for subkey, item in list(value.items())[:1024]:
                data = item.value
                if not isinstance(data, bytes) or len(data) > RECORD_BYTES:
                    continue
                try:
                    record = read_record(data)
                except ProtocolViolation as violation:
                    logger.debug("dropped a peer record: %s", violation)
                    continue
                if record.public_key == subkey:
                    found.append(record)
        return found

    async def _within(self, work: Awaitable[T], what: str) -> T:
        """Every DHT call has a deadline; whatever hivemind raises becomes a DiscoveryError."""
        try:
            return await asyncio.wait_for(work, _CALL_S)
        except TimeoutError:
            raise DiscoveryError(f"{what} took longer than {_CALL_S:g} s") from None
        except asyncio.CancelledError:
            raise
        except Exception as error:  # noqa: BLE001 - its kinds have no common base
            raise DiscoveryError(f"{what} failed: {error!r}") from None


def _hush_hivemind(loop: asyncio.AbstractEventLoop) -> None:
    """hivemind leaves tasks behind when its daemon dies; their errors are ours to know, not the user's."""
    before = loop.get_exception_handler()

    def handle(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        future = context.get("future")
        coroutine = future.get_coro() if isinstance(future, asyncio.Task) else None
        if getattr(coroutine, "__qualname__", "").startswith("ControlClient."):
            logger.debug("hivemind's client: %s", context.get("exception"))
        elif before is not None:
            before(loop, context)
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)


def _run_key(run_id: bytes, shard: int) -> str:
    return f"p2p-diloco/1/run/{run_id.hex()}/{shard}"


def _peer_of(text: str) -> str:
    """The libp2p id in a multiaddr; ConfigError if it is none."""
    parts = text.split("/")
    if (
        len(parts) < 7
        or parts[0]
        or parts[1] not in ("ip4", "ip6", "dns", "dns4", "dns6")
        or parts[-2] != "p2p"
    ):
        raise ConfigError(f"peer.initial_peers: {text!r} is not like /ip4/1.2.3.4/tcp/5678/p2p/Qm...")
    try:
        if parts[1].startswith("ip"):
            ipaddress.ip_address(parts[2])
        port = int(parts[4])
    except ValueError:
        port = 0
    if not 0 < port < 65536:
        raise ConfigError(f"peer.initial_peers: {text!r} has no valid address and port")
    return parts[-1]


def _useful(maddrs: Any) -> list[str]:
    """Outward addresses first, loopback last; never an unspecified one."""
    texts = [
        text for text in maddrs if "/0.0.0.0/" not in text and "/ip6/::/" not in text and "/tcp/" in text
    ]
    return sorted(texts, key=lambda text: ("/127." in text or "/::1/" in text, text))


def _write_key(path: Path, identity: Identity) -> None:
    """Our ed25519 key in libp2p's own format: protobuf {type: Ed25519, data: seed and public key}."""
    data = identity.private_bytes() + identity.public_key
    encoded = bytes([0x08, 0x01, 0x12, len(data)]) + data
    if path.exists() and path.read_bytes() == encoded:
        return
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(encoded)
