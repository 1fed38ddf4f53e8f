"""Link managers on loopback that remember their events, and TLS clients for what no manager would send."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

from p2p_diloco.config import PeerConfig, TimeoutConfig
from p2p_diloco.identity import Identity, PeerId
from p2p_diloco.net import links as net
from p2p_diloco.net.tls import client_context
from p2p_diloco.wire.framing import HEAD, pack_message
from p2p_diloco.wire.messages import PROTOCOL, Hello, Message, Refuse, decode

RUN = bytes(range(32))
PAYLOAD = 1 << 20
_nonces = itertools.count(1)

E = TypeVar("E")


def hello_of(mode: str, **changes: Any) -> Hello:
    fields: dict[str, Any] = {
        "protocol": PROTOCOL,
        "version": "0",
        "mode": mode,
        "run_id": RUN,
        "schema_hash": bytes(32),
        "config_hash": bytes(32),
        "listen": (),
        "nonce": 0,
        "wall_time_ms": 0,
        "lane": 0,
    }
    return Hello(**{**fields, **changes})


async def eventually(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Wait for something that has no event of its own, such as a counter."""
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110 - see above
            await asyncio.sleep(0.005)


class LinkPeer:
    """One manager and what it reported."""

    def __init__(self, identity: Identity | None = None, **changes: Any) -> None:
        self.identity = identity or Identity.generate()
        self.events: list[net.LinkEvent] = []
        self.port = 0
        self.nonce = next(_nonces)
        self._changed = asyncio.Event()
        judge: Callable[[Hello, PeerId], Refuse | None] = changes.pop("judge", lambda hello, peer: None)
        timeouts = changes.pop("timeouts", {})
        manager_only = {key: changes.pop(key) for key in ("wall_ms", "bootstrap_reply") if key in changes}
        self.manager = net.LinkManager(
            self.identity,
            RUN,
            PeerConfig(timeouts=TimeoutConfig(**timeouts), **changes),
            lambda mode: hello_of(mode, nonce=self.nonce, listen=(self.address,) if self.port else ()),
            judge,
            self._on_event,
            PAYLOAD,
            **manager_only,
        )

    def _on_event(self, event: net.LinkEvent) -> None:
        self.events.append(event)
        self._changed.set()

    @property
    def peer_id(self) -> PeerId:
        return self.identity.peer_id

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def start(self) -> LinkPeer:
        self.port = await self.manager.start("127.0.0.1", 0)
        return self

    async def dial(self, other: LinkPeer) -> PeerId:
        return await self.manager.dial([other.address], other.peer_id)

    def of(self, kind: type[E]) -> list[E]:
        return [event for event in self.events if isinstance(event, kind)]

    async def until(self, kind: type[E], count: int = 1, limit_s: float = 20.0) -> list[E]:
        """Wait until so many events of a kind have come."""
        async with asyncio.timeout(limit_s):
            while len(self.of(kind)) < count:
                self._changed.clear()
                await self._changed.wait()
        return self.of(kind)


@contextlib.asynccontextmanager
async def peers(count: int, **changes: Any) -> AsyncIterator[list[LinkPeer]]:
    """Started managers with equal settings; at the end all are stopped and no task of theirs may be left."""
    before = asyncio.all_tasks()
    made = [await LinkPeer(**dict(changes)).start() for _ in range(count)]
    try:
        yield made
    finally:
        await asyncio.gather(*(peer.manager.stop() for peer in made))
    left = [repr(task) for task in asyncio.all_tasks() - before if task is not asyncio.current_task()]
    assert not left, left[:3]


class Raw:
    """A TLS client with an identity that says just what a test wants."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    @classmethod
    async def connect(cls, port: int, identity: Identity) -> Raw:
        context = client_context(RUN, identity)
        return cls(*await asyncio.open_connection("127.0.0.1", port, ssl=context))

    async def say(self, *messages: Message) -> None:
        self.writer.write(b"".join(pack_message(message) for message in messages))
        await self.writer.drain()

    async def hear(self) -> Message:
        async with asyncio.timeout(10):
            length, _ = HEAD.unpack(await self.reader.readexactly(HEAD.size))
            return decode(await self.reader.readexactly(length))

    async def closed(self) -> None:
        """Until the other side has closed; whatever it sends before is thrown away."""
        async with asyncio.timeout(10):
            with contextlib.suppress(OSError):
                while await self.reader.read(1 << 16):
                    pass

    def close(self) -> None:
        self.writer.transport.abort()


@contextlib.asynccontextmanager
async def raw(peer: LinkPeer, identity: Identity | None = None) -> AsyncIterator[Raw]:
    client = await Raw.connect(peer.port, identity or Identity.generate())
    try:
        yield client
    finally:
        client.close()
