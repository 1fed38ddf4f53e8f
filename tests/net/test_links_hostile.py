"""What strangers and bad peers may try: each loses its connection with one line, and the manager goes on."""

from __future__ import annotations

import asyncio
import logging
import pickle
import random
import socket
import struct
from collections.abc import AsyncIterator

import msgpack
import pytest
from support.linkpeers import LinkPeer, hello_of, peers, raw

from p2p_diloco.identity import Identity, show
from p2p_diloco.net.links import LinkDown, LinkUp, Received
from p2p_diloco.wire.framing import HEAD, pack_message
from p2p_diloco.wire.messages import GetGenesis, Hello, Ping, Pong


@pytest.fixture
async def server(caplog: pytest.LogCaptureFixture) -> AsyncIterator[LinkPeer]:
    """A manager that must still serve an honest peer at the end, and must not have logged any defect."""
    async with peers(1, timeouts={"handshake_s": 1.0}) as (made,):
        yield made
        honest = await LinkPeer().start()
        await honest.dial(made)
        made.manager.send(honest.peer_id, GetGenesis(1))
        await honest.until(Received)
        await honest.manager.stop()
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]
    for record in caplog.records:
        assert "\n" not in record.message


def closing_lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.message for r in caplog.records if r.levelname == "WARNING" and r.message.startswith("clos")]


JUNK = {
    "http": b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
    "pickle": pickle.dumps({"payload": [1] * 1000}),
    "zeros": bytes(4096),
    "random": random.Random(3).randbytes(4096),
    "a frame without TLS": pack_message(hello_of("full")),
    "TLS record of another version": b"\x16\x03\x01\xff\xff" + bytes(70000),
}


@pytest.mark.parametrize("name", JUNK)
async def test_junk_on_the_port_is_closed_with_a_line(
    server: LinkPeer, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    writer.write(JUNK[name])
    async with asyncio.timeout(10):
        try:
            while await reader.read(4096):
                pass
        except ConnectionError:
            pass  # closed with our bytes unread, which TCP shows as a reset
    writer.transport.abort()
    assert len(closing_lines(caplog)) == 1
    assert not server.events


async def test_a_hundred_sockets_that_send_only_a_header_cost_a_deadline_and_nothing_more(
    server: LinkPeer, caplog: pytest.LogCaptureFixture
) -> None:
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(100)]
    for plain in sockets:
        plain.setblocking(False)
        with plain.dup() as copy:
            try:
                copy.send(b"\x16\x03\x01\x02\x00")
            except ConnectionError:
                continue  # turned away already
    loop = asyncio.get_running_loop()

    async def until_closed(plain: socket.socket) -> None:
        try:
            while await loop.sock_recv(plain, 100):
                pass
        except ConnectionError:
            pass
        plain.close()

    async with asyncio.timeout(20):
        await asyncio.gather(*(until_closed(plain) for plain in sockets))
    turned_away = [r for r in caplog.records if "too many handshakes" in r.message]
    assert len(turned_away) + len(closing_lines(caplog)) == 100
    assert len(turned_away) >= 70  # one host gets half of the 50 places


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xff\xff\xff\xff\x00", "frame of 4294967295 bytes where 2048 are allowed"),
        (b"\xff\xff\xff\xff\x02", "frame of 4294967295 bytes where 0 are allowed"),
        (b"\x00\x00\x00\x01\x01x", "where 0 are allowed"),
        (b"\x00\x00\x00\x00\x09", "unknown class 9"),
        (b"\x00\x00\x00\x00\x00", "message"),
        (HEAD.pack(1000, 0) + b"\x91" * 1000, "nested deeper"),
        (HEAD.pack(5, 0) + b"\xdd\xff\xff\xff\xff", "ends in the middle"),
        (HEAD.pack(5, 0) + b"\xc6\xff\xff\xff\xff", "ends in the middle"),
        (HEAD.pack(7, 0) + b"\xc7\x04\x05abcd", "msgpack type"),
        (HEAD.pack(len(pickle.dumps([1])), 0) + pickle.dumps([1]), "message"),
        (pack_message(GetGenesis(1)), "the first message was no HELLO"),
    ],
)
async def test_a_bad_first_frame_is_closed_with_a_line_before_anything_is_allocated(
    server: LinkPeer, frame: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw(server) as client:
        client.writer.write(frame)
        await client.closed()
    assert [words in line for line in closing_lines(caplog)] == [True], closing_lines(caplog)
    assert not server.events


async def test_a_client_that_shakes_hands_and_never_says_hello_is_closed_at_the_deadline(
    server: LinkPeer, caplog: pytest.LogCaptureFixture
) -> None:
    async with raw(server) as client:
        client.writer.write(b"\x00")
        await client.closed()
    assert len(closing_lines(caplog)) == 1
    assert not server.events


@pytest.mark.parametrize(
    ("frame", "words"),
    [
        (b"\xff\xff\xff\xff\x00", "are allowed"),
        (b"\xff\xff\xff\xff\x01", "are allowed"),
        (b"\xff\xff\xff\xff\x02", "are allowed"),
        (HEAD.pack(3, 2) + b"abc", "shorter than its header"),
        (HEAD.pack(60, 2) + bytes(60), "malformed header"),
        (HEAD.pack(3, 0) + b"abc", "message"),
        (pack_message(hello_of("full")), "second HELLO"),
        (HEAD.pack(65_000, 1) + bytes(65_000), "message"),
    ],
)
async def test_a_linked_peer_that_breaks_the_framing_loses_its_link_and_is_named(
    server: LinkPeer, frame: bytes, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    cheat = Identity.generate()
    async with raw(server, cheat) as client:
        await client.say(hello_of("full"))
        assert isinstance(await client.hear(), Hello)
        client.writer.write(frame)
        down = (await server.until(LinkDown))[0]
        assert (down.peer, down.blame) == (cheat.peer_id, "remote")
        assert words in down.reason
        await client.closed()
    lines = closing_lines(caplog)
    assert len(lines) == 1
    assert show(cheat.peer_id) in lines[0]


async def test_a_flood_of_control_messages_closes_the_link_and_names_the_peer(
    server: LinkPeer, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = Identity.generate()
    async with raw(server, noisy) as client:
        await client.say(hello_of("full"))
        await client.hear()
        client.writer.write(pack_message(Ping(1, 2)) * 4000)
        down = (await server.until(LinkDown))[0]
        assert "control messages a second" in down.reason
    assert show(noisy.peer_id) in closing_lines(caplog)[0]


async def test_pongs_that_nobody_asked_for_change_nothing(server: LinkPeer) -> None:
    liar = Identity.generate()
    async with raw(server, liar) as client:
        await client.say(hello_of("full"), Pong(0, 1), Pong(77, 1 << 60), GetGenesis(3))
        await server.until(Received)
        assert server.manager.clock_offset_s(liar.peer_id) is None


async def test_a_data_flood_on_random_bytes_raises_nothing_but_closed_links(server: LinkPeer) -> None:
    rng = random.Random(4)
    for _ in range(20):
        async with raw(server) as client:
            await client.say(hello_of("full"))
            await client.hear()
            body = msgpack.packb(["gossip", {"x": rng.randbytes(rng.randrange(50))}])
            junk = rng.choice([rng.randbytes(200), struct.pack("!IB", len(body), 0) + body])
            client.writer.write(junk)
            client.writer.write_eof() if client.writer.can_write_eof() else client.close()
    await server.until(LinkDown, len(server.of(LinkUp)))
    assert not server.of(Received)


async def test_above_the_connection_limit_newcomers_are_turned_away_and_links_stay() -> None:
    async with peers(1, max_connections=4) as (full,):
        guests = [LinkPeer() for _ in range(6)]
        results = await asyncio.gather(*(guest.dial(full) for guest in guests), return_exceptions=True)
        assert sum(isinstance(result, bytes) for result in results) == 4
        assert len(full.manager.peers()) == 4
        for guest in guests:
            await guest.manager.stop()
        await full.until(LinkDown, 4)
        late = LinkPeer()
        assert await late.dial(full) == full.peer_id  # there is room again
        await late.manager.stop()
