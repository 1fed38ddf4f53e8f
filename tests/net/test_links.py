"""Links between managers: HELLO, one link per pair, refusals, restarts, liveness, clocks, good-byes."""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time

import pytest
import uvloop
from support.linkpeers import LinkPeer, eventually, hello_of, peers, raw

from p2p_diloco.errors import DialError, LinkLostError, ProtocolViolation, RefusedByPeer
from p2p_diloco.identity import Identity, show
from p2p_diloco.net.links import LinkDown, LinkUp, Received
from p2p_diloco.net.sockets import secure
from p2p_diloco.net.tls import client_context, server_context
from p2p_diloco.wire.messages import GetGenesis, Gone, Hello, Leaves, Refuse

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


async def test_a_dial_makes_one_link_and_messages_go_both_ways_in_order() -> None:
    async with peers(2) as (one, two):
        assert await one.dial(two) == two.peer_id
        up = (await two.until(LinkUp))[0]
        assert (up.peer, up.outbound, up.hello.listen) == (one.peer_id, False, (one.address,))
        assert up.observed_address == "127.0.0.1"
        assert one.of(LinkUp)[0].outbound
        for nonce in range(200):
            assert one.manager.send(two.peer_id, GetGenesis(nonce))
            assert two.manager.send(one.peer_id, GetGenesis(1000 + nonce))
        received = await two.until(Received, 200)
        assert [event.message for event in received] == [GetGenesis(nonce) for nonce in range(200)]
        back = await one.until(Received, 200)
        assert [event.message for event in back] == [GetGenesis(1000 + nonce) for nonce in range(200)]
        assert await two.dial(one) == one.peer_id  # the link that is there
        assert one.manager.peers() == [two.peer_id]
        assert len(one.of(LinkUp)) == len(two.of(LinkUp)) == 1


@pytest.mark.parametrize("times", [1, 2, 3])
async def test_a_connection_that_was_closed_any_number_of_times_can_still_be_dropped(times: int) -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        connection = two.manager._links[one.peer_id].control
        for _ in range(times):
            connection.writer.close()  # the stream's own machinery closes it too, on its way out
        connection.abort()
        connection.abort()
        await one.until(LinkDown)


async def test_what_the_other_side_said_last_is_heard_although_our_write_fails_before_we_read_it() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        tried = asyncio.Event()

        async def broken(data: bytes) -> None:
            tried.set()
            raise LinkLostError("the connection is closed")

        two.manager._links[one.peer_id].control.write = broken
        two.manager.send(one.peer_id, GetGenesis(1))
        await tried.wait()
        one.manager.send(two.peer_id, GetGenesis(2))
        [last] = await two.until(Received)
        assert last.message == GetGenesis(2)
        [down] = await two.until(LinkDown)
        assert down.reason == "the connection is closed"
        assert two.events.index(last) < two.events.index(down)


async def test_what_the_consumer_sends_on_link_up_comes_after_the_hello() -> None:
    async with peers(2) as (one, two):
        two.manager._on_event = lambda event: two.manager.send(one.peer_id, GetGenesis(5))
        await one.dial(two)
        assert (await one.until(Received))[0].message == GetGenesis(5)


@pytest.mark.parametrize(
    ("code", "text"),
    [
        ("protocol", "protocol 2 there, 1 here"),
        ("run", "run aaaa there, bbbb here"),
        ("schema", "the parameters differ"),
        ("config", "inner.steps is 100 here and 50 there"),
    ],
)
async def test_a_refusal_reaches_the_dialler_with_its_reason_before_anything_else(
    code: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    schema = b"our schema" * 4000

    def judge(hello: Hello, peer: bytes) -> Refuse | None:
        return Refuse(code, text, schema) if peer == stranger.peer_id else None

    async with peers(2, judge=judge) as (server, friend):
        stranger = LinkPeer()
        with pytest.raises(RefusedByPeer) as caught:
            await stranger.dial(server)
        assert (caught.value.code, caught.value.text, caught.value.schema) == (code, text, schema)
        assert "\n" not in str(caught.value)
        lines = [r.message for r in caplog.records if text in r.message]
        assert lines == [f"refused peer {show(stranger.peer_id)} ({code}): {text}"]
        assert not server.events
        assert not stranger.events
        await friend.dial(server)
        await stranger.manager.stop()


async def test_the_dialler_judges_too() -> None:
    async with peers(1) as (server,):
        picky = LinkPeer(judge=lambda hello, peer: Refuse("run", "not my run"))
        with pytest.raises(RefusedByPeer, match="not my run"):
            await picky.dial(server)
        assert not picky.events
        await picky.manager.stop()


@pytest.mark.parametrize("expected", [True, False])
async def test_two_dials_that_cross_leave_one_link_with_one_event_each(expected: bool) -> None:
    for _ in range(10):
        async with peers(2) as (one, two):
            dials = [
                a.manager.dial([b.address], b.peer_id if expected else None)
                for a, b in ((one, two), (two, one))
            ]
            results = await asyncio.gather(*dials, return_exceptions=True)
            if expected:
                assert results == [two.peer_id, one.peer_id]
            await one.until(LinkUp)
            await two.until(LinkUp)
            assert one.manager.send(two.peer_id, GetGenesis(1))
            assert two.manager.send(one.peer_id, GetGenesis(2))
            await one.until(Received)
            await two.until(Received)
            assert len(one.of(LinkUp)) == len(two.of(LinkUp)) == 1
            assert one.of(LinkUp)[0].outbound != two.of(LinkUp)[0].outbound
            assert not one.of(LinkDown) + two.of(LinkDown)


async def test_many_peers_that_all_dial_all_have_one_link_per_pair() -> None:
    async with peers(6) as all_peers:
        dials = [a.dial(b) for a in all_peers for b in all_peers if a is not b]
        await asyncio.gather(*dials)
        for peer in all_peers:
            await peer.until(LinkUp, 5)
            assert len(peer.of(LinkUp)) == 5
            assert not peer.of(LinkDown)


async def test_a_restarted_peer_replaces_its_old_link() -> None:
    async with peers(1) as (server,):
        identity = Identity.generate()
        before, after = LinkPeer(identity), LinkPeer(identity)
        await before.dial(server)
        await after.dial(server)
        await server.until(LinkUp, 2)
        kinds = [type(event) for event in server.events]
        assert kinds == [LinkUp, LinkDown, LinkUp]
        await before.until(LinkDown)
        assert server.manager.send(identity.peer_id, GetGenesis(1))
        await after.until(Received)
        await before.manager.stop()
        await after.manager.stop()


async def test_a_second_dial_by_the_same_process_is_refused_while_the_link_is_new() -> None:
    async with peers(1) as (server,):
        client = LinkPeer()
        await client.dial(server)
        async with raw(server, client.identity) as second:
            await second.say(hello_of("full", nonce=client.nonce))
            answer = await second.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "duplicate"
        assert [type(event) for event in server.events] == [LinkUp]
        await client.manager.stop()


async def test_another_key_than_the_expected_one_is_a_violation_and_no_link() -> None:
    async with peers(2) as (one, two):
        wanted = Identity.generate().peer_id
        with pytest.raises(ProtocolViolation, match=f"{show(two.peer_id)} answers .* {show(wanted)}"):
            await one.manager.dial([two.address], wanted)
        assert not one.events
        assert not two.events


async def test_dialling_ourselves_is_noticed_and_makes_no_link() -> None:
    async with peers(1) as (one,):
        with pytest.raises(RefusedByPeer, match="ourselves"):
            await one.manager.dial([one.address], None)
        assert not one.events


async def test_of_several_addresses_the_first_good_one_wins_and_dead_ones_do_not_matter() -> None:
    async with peers(2) as (one, two):
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            dead = f"127.0.0.1:{unused.getsockname()[1]}"
            addresses = [dead, "not an address", two.address, f"localhost:{two.port}"]
            assert await one.manager.dial(addresses, two.peer_id) == two.peer_id
            await two.until(LinkUp)
            assert len(two.of(LinkUp)) == 1
            with pytest.raises(DialError, match=dead):
                await two.manager.dial([dead], Identity.generate().peer_id)
        with pytest.raises(DialError, match="no address"):
            await two.manager.dial([], Identity.generate().peer_id)


async def test_an_address_that_accepts_and_then_says_nothing_ends_at_the_deadline() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        client = LinkPeer(timeouts={"handshake_s": 0.2})
        with pytest.raises(DialError, match=r"no answer in time|aborting"):
            await client.manager.dial([f"127.0.0.1:{mute.getsockname()[1]}"], None)
        await client.manager.stop()


async def test_a_handshake_that_begins_while_the_loop_is_busy_is_not_lost() -> None:
    async with peers(1, timeouts={"handshake_s": 5.0}) as (server,):
        context = client_context(bytes(range(32)), Identity.generate())
        done = threading.Event()

        def shake_hands() -> None:
            with socket.create_connection(("127.0.0.1", server.port), timeout=10) as plain:
                context.wrap_socket(plain).close()
                done.set()

        thread = threading.Thread(target=shake_hands)
        thread.start()
        time.sleep(0.2)  # noqa: ASYNC251 - the busy loop: the client's first bytes are there before we accept
        await asyncio.to_thread(thread.join)
        assert done.is_set()


async def test_a_bootstrap_link_gives_its_answers_and_nothing_else() -> None:
    def reply(message: object) -> Gone | None:
        return Gone(bytes(32), 7, "busy") if isinstance(message, GetGenesis) else None

    async with peers(1, bootstrap_reply=reply) as (server,):
        newcomer = LinkPeer()
        await newcomer.manager.dial([server.address], server.peer_id, mode="bootstrap")
        assert newcomer.of(LinkUp)[0].hello.mode == "bootstrap"
        newcomer.manager.send(server.peer_id, GetGenesis(0))
        assert (await newcomer.until(Received))[0].message == Gone(bytes(32), 7, "busy")
        newcomer.manager.send(server.peer_id, Gone(bytes(32), 0, "busy"))
        await newcomer.until(LinkDown)
        assert not server.events
        assert server.manager.peers() == []
        await newcomer.manager.stop()


async def test_a_clock_that_is_90_s_ahead_is_reported_once_with_its_offset(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with peers(1, timeouts={"ping_s": 0.05}) as (one,):
        ahead = LinkPeer(wall_ms=lambda: time.time_ns() // 1_000_000 + 90_000)
        await ahead.dial(one)
        await eventually(lambda: one.manager.clock_offset_s(ahead.peer_id) is not None)
        offset_s = one.manager.clock_offset_s(ahead.peer_id)
        assert offset_s is not None
        assert abs(offset_s - 90) < 5
        rtt_s = one.manager.rtt_s(ahead.peer_id)
        assert rtt_s is not None
        assert rtt_s > 0
        received = one.manager.stats()[ahead.peer_id].control_received
        more = received + 200  # several more pongs
        await eventually(lambda: one.manager.stats()[ahead.peer_id].control_received >= more)
        warned = [r for r in caplog.records if show(ahead.peer_id) in r.message and r.levelname == "WARNING"]
        assert len(warned) == 1
        assert "+9" in warned[0].message or "+89." in warned[0].message
        await ahead.manager.stop()


async def test_a_peer_that_falls_silent_loses_its_link_and_one_that_answers_pings_keeps_it() -> None:
    async with peers(2, timeouts={"ping_s": 0.05, "idle_s": 0.5}) as (one, two):
        await one.dial(two)
        silent = Identity.generate()
        async with raw(one, silent) as client:
            await client.say(hello_of("full"))
            assert isinstance(await client.hear(), Hello)
            down = (await one.until(LinkDown))[0]
            assert down.peer == silent.peer_id
            assert down.reason.startswith("silent for")
            assert down.blame == "network"
        assert one.manager.peers() == [two.peer_id]
        assert not two.of(LinkDown)


async def test_a_peer_that_does_not_read_loses_its_link_before_much_is_queued() -> None:
    async with peers(1) as (server,):
        lazy = Identity.generate()
        async with raw(server, lazy) as client:
            await client.say(hello_of("full"))
            await client.hear()
            large = Leaves(bytes(32), 0, 0, bytes(900 << 10))
            sent = 0
            while server.manager.send(lazy.peer_id, large):
                sent += 1
                if sent % 4 == 0:
                    await asyncio.sleep(0)
                assert sent < 100
            down = (await server.until(LinkDown))[0]
            assert "does not read" in down.reason


async def test_good_byes_that_were_just_sent_arrive_before_the_link_goes_down() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        for nonce in range(50):
            one.manager.send(two.peer_id, Leaves(bytes(32), nonce, 0, bytes(10_000)))
        await one.manager.stop()
        await two.until(LinkDown)
        assert len(two.of(Received)) == 50
        assert isinstance(two.events[-1], LinkDown)
        assert not one.of(LinkDown)


async def test_a_closed_link_reports_once_and_nothing_comes_from_it_afterwards() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        two.manager.close(one.peer_id, "it lied")
        assert two.of(LinkDown) == [LinkDown(one.peer_id, "it lied", "remote")]
        assert not two.manager.send(one.peer_id, GetGenesis(1))
        two.manager.close(one.peer_id, "again")
        await one.until(LinkDown)
        assert isinstance(two.events[-1], LinkDown)
        assert len(two.of(LinkDown)) == 1
        assert await one.dial(two) == two.peer_id  # nothing stands in the way of a new one


async def test_a_stopped_manager_accepts_and_dials_no_more() -> None:
    async with peers(2) as (one, two):
        await one.manager.stop()
        with pytest.raises(DialError):
            await two.dial(one)
        with pytest.raises(DialError, match="leaving"):
            await one.dial(two)


async def test_a_stop_in_the_middle_of_handshakes_leaves_nothing_behind() -> None:
    async with peers(1) as (server,):
        mute = [await asyncio.open_connection("127.0.0.1", server.port) for _ in range(5)]
        await eventually(lambda: server.manager._pending.total() == 5)
        await server.manager.stop()
        for reader, writer in mute:
            assert await reader.read() == b""
            writer.close()


async def test_a_cancelled_handshake_closes_its_socket() -> None:
    left, right = socket.socketpair()
    for end in (left, right):
        end.setblocking(False)
    context = server_context(bytes(32), Identity.generate())
    task = asyncio.ensure_future(secure(left, context, True, 10.0))
    await asyncio.sleep(0.01)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    async with asyncio.timeout(5):
        assert await asyncio.get_running_loop().sock_recv(right, 10) == b""
    right.close()
