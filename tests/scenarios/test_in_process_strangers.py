"""A swarm in one event loop under clients that mean no good: they lose their connections, and it goes on."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import pickle
import resource
import socket
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from support.swarm import Node, Swarm, make_run, normal_deltas, swarm

from p2p_diloco.config import TimeoutConfig
from p2p_diloco.identity import Identity, show
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire import messages as msg
from p2p_diloco.wire.framing import HEAD, pack_message

GROWTH_BYTES = 48 << 20  # far below what any of the claimed sizes would take


def resident_bytes() -> int:
    """Memory of this process: now where the system tells, else its peak so far."""
    gc.collect()
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


@pytest.fixture
async def made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> AsyncIterator[Swarm]:
    """A running swarm of three that must certify on, with all three, in the memory that it had."""
    deltas = normal_deltas(1000)
    timeouts = TimeoutConfig(straggler_s=5.0, handshake_s=2.0)
    async with swarm(tmp_path, 3, 1000, deltas, make_run(3), pace_s=0.02, timeouts=timeouts) as running:
        await running.at_epoch(3)
        before, epoch = resident_bytes(), running.nodes[0].epoch
        yield running
        assert running.nodes[0].epoch > epoch, "no epoch was certified meanwhile"
        reached = max(node.epoch for node in running.nodes)
        await running.at_epoch(reached + 3)
        assert resident_bytes() - before < GROWTH_BYTES
        assert running.contributors(reached + 3) == [0, 1, 2]
        running.assert_bitwise_equal(0, reached + 2)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


def lines(caplog: pytest.LogCaptureFixture, words: str) -> list[str]:
    """Warnings with these words."""
    return [r.message for r in caplog.records if r.levelno == logging.WARNING and words in r.message]


BAD_FIRST_BYTES = {
    "a frame of 4 GiB": (b"\xff\xff\xff\xff\x00", "frame of 4294967295 bytes where 2048 are allowed"),
    "a data frame of 4 GiB": (b"\xff\xff\xff\xff\x02", "frame of 4294967295 bytes where 0 are allowed"),
    "a bare pickle": (pickle.dumps({"x": [1] * 100}), "bytes where 2048 are allowed"),
    "a framed pickle": (HEAD.pack(14, 0) + pickle.dumps([1])[:14].ljust(14), "message"),
    "a bomb of depth": (HEAD.pack(2000, 0) + b"\x91" * 2000, "nested deeper"),
    "a bomb of width": (HEAD.pack(5, 0) + b"\xdd\xff\xff\xff\xff", "ends in the middle"),
    "a string of 4 GiB": (HEAD.pack(5, 0) + b"\xdb\xff\xff\xff\xff", "ends in the middle"),
}


@pytest.mark.parametrize("name", BAD_FIRST_BYTES)
async def test_bad_first_bytes_after_tls_are_closed_with_a_line_while_epochs_go_on(
    made: Swarm, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    data, words = BAD_FIRST_BYTES[name]
    epoch = made.nodes[0].epoch
    for _ in range(5):
        async with made.stranger() as client:
            client.writer.write(data)
            await client.closed()
    await made.at_epoch(epoch + 2)
    said = lines(caplog, "closed the connection from 127.0.0.1: ")
    assert len(said) == 5
    assert all(words in line for line in said), said[0]


async def test_a_hundred_sockets_that_say_nothing_or_half_a_record_are_all_closed_while_epochs_go_on(
    made: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    loop = asyncio.get_running_loop()

    async def one(place: int) -> None:
        with socket.socket() as plain:
            plain.setblocking(False)
            with contextlib.suppress(ConnectionError):  # turned away before we came to speak
                await loop.sock_connect(plain, ("127.0.0.1", made.nodes[0].port))
                if place % 2:
                    await loop.sock_sendall(plain, b"\x16\x03\x01\x02\x00")
                while await loop.sock_recv(plain, 100):
                    pass

    async with asyncio.timeout(20):
        await asyncio.gather(*(one(place) for place in range(100)))
    closed = lines(caplog, "closed the connection from 127.0.0.1")
    turned_away = lines(caplog, "turned 127.0.0.1 away: too many handshakes")
    assert len(closed) + len(turned_away) == 100
    assert closed


async def test_a_flood_of_hellos_on_one_connection_closes_it_and_names_the_peer(
    made: Swarm, caplog: pytest.LogCaptureFixture
) -> None:
    noisy = Identity.generate()
    epoch = made.nodes[0].epoch
    async with made.stranger(noisy) as client:
        client.writer.write(pack_message(made.hello()) * 5000)
        await client.closed()
    await made.at_epoch(epoch + 2)
    assert lines(caplog, f"closing the link to peer {show(noisy.peer_id)}: a second HELLO on an open link")


async def test_a_flood_of_connections_that_say_hello_leaves_one_link_of_each_identity(made: Swarm) -> None:
    few = [Identity.generate() for _ in range(3)]
    links = made.nodes[0].driver.links
    epoch = made.nodes[0].epoch
    async with contextlib.AsyncExitStack() as stack:
        for nonce in range(30):
            client = await stack.enter_async_context(made.stranger(few[nonce % 3]))
            await client.say(made.hello(nonce=nonce))
            assert isinstance(await client.hear(), msg.Hello)
        strangers = {identity.peer_id for identity in few}
        assert strangers <= set(links.peers())
        assert len(links.peers()) == 2 + 3
        await made.at_epoch(epoch + 2)
    await made.until(lambda: len(links.peers()) == 2)


# --- lies of a peer that is linked -------------------------------------------------------------------


def forged_statement(made: Swarm, liar: Node) -> msg.Message:
    """Our READY with a signature that is not one."""
    chain = liar.driver.machine.chain
    root = chain.head.certificate.state_root
    body = msg.Ready(chain.epoch + 1, chain.head.digest, root, 5, bytes(32))
    signed = Statements(liar.identity, made.run_id).make(body)
    return msg.Statement(msg.Signed(signed.public_key, signed.kind, signed.body, bytes(64)))


def forged_verdict(made: Swarm, liar: Node) -> msg.Message:
    """A certificate on the head: a good view by the liar, and the voters' votes under its own signature."""
    chain = liar.driver.machine.chain
    mine = Statements(liar.identity, made.run_id)
    epoch, previous, root = chain.epoch + 1, chain.head.digest, chain.head.certificate.state_root
    ready = mine.make(msg.Ready(epoch, previous, root, 5, bytes(32)))
    view = mine.make(msg.View(epoch, previous, 0, "run", (ready,), (), (), ()))
    vote = mine.make(msg.Vote(epoch, previous, 0, view.digest(), bytes(32), bytes(32)))
    votes = tuple(
        msg.Signed(node.identity.public_key, "vote", vote.body, vote.signature) for node in made.nodes
    )
    return msg.Verdict(msg.Certificate(epoch, previous, (view,), bytes(32), bytes(32), votes, ()))


def verdict_of_one(made: Swarm, liar: Node) -> msg.Message:
    """A certificate on the head that is sound but for its quorum: only the liar voted."""
    verdict = forged_verdict(made, liar)
    assert isinstance(verdict, msg.Verdict)
    own = [v for v in verdict.certificate.votes if v.public_key == liar.identity.public_key]
    certificate = verdict.certificate
    return msg.Verdict(
        msg.Certificate(
            certificate.epoch, certificate.previous, certificate.view, bytes(32), bytes(32), tuple(own), ()
        )
    )


LIES = {
    "a statement": (forged_statement, "wrong signature under a ready statement"),
    "a certificate": (forged_verdict, "wrong signature under a vote statement"),
    "a minority": (verdict_of_one, "has no quorum of votes"),
}


@pytest.mark.parametrize("lie", LIES)
async def test_a_lie_of_a_live_peer_closes_its_link_with_the_reason_and_the_swarm_goes_on(
    made: Swarm, lie: str, caplog: pytest.LogCaptureFixture
) -> None:
    make, words = LIES[lie]
    epoch = await made.hold()
    liar = made.nodes[2]
    liar.driver.links.send(made.nodes[0].identity.peer_id, make(made, liar))
    line = f"closing the link to peer {show(liar.identity.peer_id)}: "
    await made.until(lambda: bool(lines(caplog, line)))
    said = lines(caplog, line)
    assert len(said) == 1
    assert words in said[0]
    assert await made.hold() == epoch  # the link is up again: an honest restart would be welcome, too
    assert [node.epoch for node in made.nodes] == [epoch] * 3
    made.resume()
    await made.at_epoch(epoch + 2)
