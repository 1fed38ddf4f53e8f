"""Data lanes: order, both directions, back-pressure, stalls, losses."""

from __future__ import annotations

import asyncio
import itertools
import random

import pytest
import uvloop
from support.linkpeers import PAYLOAD, LinkPeer, Raw, eventually, hello_of, peers, raw

from p2p_diloco.errors import LinkLostError
from p2p_diloco.identity import Identity
from p2p_diloco.net.links import DataFrame, LinkDown, LinkUp, Received
from p2p_diloco.wire.framing import DATA_HEADER_BYTES, DataHeader
from p2p_diloco.wire.messages import GetGenesis, Hello, Refuse

pytestmark = pytest.mark.filterwarnings("ignore:Overriding the .event_loop_policy. fixture")


@pytest.fixture(params=[asyncio.DefaultEventLoopPolicy, uvloop.EventLoopPolicy], ids=["asyncio", "uvloop"])
def event_loop_policy(request: pytest.FixtureRequest) -> asyncio.AbstractEventLoopPolicy:
    policy: asyncio.AbstractEventLoopPolicy = request.param()
    return policy


def header_of(chunk: int, payload: bytes) -> DataHeader:
    return DataHeader(kind=1, chunk=chunk, hop=0, weight=5, tag=bytes(32), length=len(payload))


async def send(one: LinkPeer, two: LinkPeer, chunk: int, payload: bytes) -> None:
    await one.manager.send_data(two.peer_id, header_of(chunk, payload), payload)


async def test_frames_of_all_sizes_arrive_whole_both_ways_over_as_many_lanes_as_configured() -> None:
    rng = random.Random(1)
    sizes = [0, 1, 100, (128 << 10) - 1, 128 << 10, (128 << 10) + 1, PAYLOAD]
    payloads = [rng.randbytes(size) for size in sizes]
    async with peers(2, lanes=3) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        sends = [
            send(a, b, chunk, payload)
            for a, b in ((one, two), (two, one))
            for chunk, payload in enumerate(payloads)
        ]
        await asyncio.gather(*sends)
        for receiver, sender in ((two, one), (one, two)):
            frames = await receiver.until(DataFrame, len(sizes))
            assert {frame.peer for frame in frames} == {sender.peer_id}
            for frame in frames:
                payload = payloads[frame.header.chunk]
                assert frame.header == header_of(frame.header.chunk, payload)
                assert frame.payload == payload
            lanes = sender.manager._links[receiver.peer_id]._lanes
            assert len(lanes) == 3


async def test_one_lane_keeps_the_order_of_its_frames() -> None:
    async with peers(2, lanes=1) as (one, two):
        await one.dial(two)
        await asyncio.gather(*(send(one, two, chunk, bytes(5000)) for chunk in range(100)))
        frames = await two.until(DataFrame, 100)
        assert [frame.header.chunk for frame in frames] == list(range(100))


async def test_lane_and_control_bytes_are_counted_apart_and_in_the_totals() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        for chunk in range(3):
            await send(one, two, chunk, bytes(100_000))
        await two.until(DataFrame, 3)
        sender, receiver = one.manager.stats()[two.peer_id], two.manager.stats()[one.peer_id]
        assert 300_000 < sender.data_sent == receiver.data_received < 301_000
        assert sender.data_received == receiver.data_sent == 0
        assert 0 < sender.control_sent < 5000
        assert one.manager.totals()[0] >= sender.data_sent + sender.control_sent


async def test_while_the_receiver_does_not_read_the_sender_waits_with_bounded_memory() -> None:
    async with peers(2, lanes=2) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        two.manager.pause_data()
        frames, payload = 100, bytes(PAYLOAD)
        done: list[int] = []

        async def one_frame(chunk: int) -> None:
            await send(one, two, chunk, payload)
            done.append(chunk)

        tasks = [asyncio.ensure_future(one_frame(chunk)) for chunk in range(frames)]
        # Stuck: nothing more leaves although control messages still go round and round.
        for nonce in itertools.count():
            before = one.manager.totals()[0]
            two.manager.send(one.peer_id, GetGenesis(nonce))
            await one.until(Received, nonce + 1)
            await asyncio.sleep(0.05)
            if one.manager.totals()[0] == before and before > PAYLOAD:
                break
            assert nonce < 300
        assert len(done) < 60  # what the kernel's buffers of two connections hold, and not all
        assert not two.of(DataFrame)
        for lane in one.manager._links[two.peer_id]._lanes:
            assert lane.connection.writer.transport.get_write_buffer_size() <= 1 << 20
        two.manager.resume_data()
        await asyncio.gather(*tasks)
        received = await two.until(DataFrame, frames)
        assert sorted(frame.header.chunk for frame in received) == list(range(frames))


async def test_a_lane_on_which_no_byte_leaves_is_a_lost_link() -> None:
    async with peers(2, timeouts={"stall_s": 0.3}) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        two.manager.pause_data()
        sends = [send(one, two, chunk, bytes(PAYLOAD)) for chunk in range(100)]
        results = await asyncio.gather(*sends, return_exceptions=True)
        assert any("no byte left for 0.3 s" in str(result) for result in results)
        assert all(result is None or isinstance(result, LinkLostError) for result in results)
        assert "no byte left" in (await one.until(LinkDown))[0].reason
        two.manager.resume_data()
        await two.until(LinkDown)


async def test_when_the_link_goes_down_everybody_who_was_sending_is_told() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        two.manager.pause_data()
        tasks = [asyncio.ensure_future(send(one, two, chunk, bytes(PAYLOAD))) for chunk in range(100)]
        await eventually(lambda: one.manager.totals()[0] > PAYLOAD)
        two.manager.close(one.peer_id, "enough")
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert results[-1] is not None
        assert all(result is None or isinstance(result, LinkLostError) for result in results)
        await one.until(LinkDown)
        with pytest.raises(LinkLostError):
            await send(one, two, 0, b"x")


async def test_a_lane_that_breaks_just_after_a_frame_left_takes_the_link_down_so_no_loss_is_silent() -> None:
    async with peers(2, lanes=1) as (one, two):
        await one.dial(two)
        await send(one, two, 0, bytes(10))
        await two.until(DataFrame)
        two.manager._links[one.peer_id].incoming[0].abort()
        assert (await one.until(LinkDown))[0].reason == "a data lane broke"


async def test_an_idle_lane_is_closed_without_any_harm_and_opened_again_when_needed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_diloco.net.link._LANE_IDLE_S", 0.1)
    async with peers(2, timeouts={"ping_s": 0.05}) as (one, two):
        await one.dial(two)
        await send(one, two, 0, bytes(10))
        await two.until(DataFrame)
        link = two.manager._links[one.peer_id]
        await eventually(lambda: not link.incoming)
        await send(one, two, 1, bytes(10))
        await two.until(DataFrame, 2)
        assert not one.of(LinkDown) + two.of(LinkDown)


async def test_a_sender_that_gives_up_in_the_middle_of_a_frame_costs_its_lane_and_not_the_link() -> None:
    async with peers(2, lanes=1) as (one, two):
        await one.dial(two)
        await two.until(LinkUp)
        two.manager.pause_data()
        tasks = [asyncio.ensure_future(send(one, two, chunk, bytes(PAYLOAD))) for chunk in range(40)]
        await eventually(lambda: one.manager.totals()[0] > 2 * PAYLOAD)
        writing = next(task for task in tasks if not task.done())  # the others wait for their turn
        writing.cancel()
        two.manager.resume_data()
        results = await asyncio.gather(*tasks, return_exceptions=True)
        assert sum(isinstance(result, asyncio.CancelledError) for result in results) == 1
        assert sum(result is None for result in results) == 39
        await send(one, two, 99, b"whole")
        async with asyncio.timeout(20):
            while all(frame.header.chunk != 99 for frame in two.of(DataFrame)):
                await two.until(DataFrame, len(two.of(DataFrame)) + 1)
        given_up = tasks.index(writing)
        came = [frame.header.chunk for frame in two.of(DataFrame)]
        assert given_up not in came
        assert set(came) == {*range(40), 99} - {given_up}
        assert all(len(frame.payload) == frame.header.length for frame in two.of(DataFrame))
        assert not one.of(LinkDown) + two.of(LinkDown)


async def test_a_peer_that_cannot_be_dialled_gets_its_data_over_the_control_link(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_diloco.net.rates._SKIP_S", 0.0)
    monkeypatch.setattr("p2p_diloco.net.rates._WINDOW_S", 1e-9)
    async with peers(1) as (server,):
        hidden = LinkPeer()  # never started: it dials out only
        await hidden.dial(server)
        payload = random.Random(2).randbytes(300_000)
        await server.manager.send_data(hidden.peer_id, header_of(4, payload), payload)
        frame = (await hidden.until(DataFrame))[0]
        assert (frame.peer, frame.header.chunk, frame.payload) == (server.peer_id, 4, payload)
        assert server.manager.take_rates()[hidden.peer_id] > 0, "measured there as well"
        server.manager.send(hidden.peer_id, GetGenesis(9))
        await hidden.until(Received)
        await hidden.manager.stop()


async def test_a_lane_is_only_for_peers_with_a_control_link_of_the_same_key() -> None:
    async with peers(2) as (one, two):
        await one.dial(two)
        async with raw(two) as stranger:
            await stranger.say(hello_of("lane"))
            answer = await stranger.hear()
            assert isinstance(answer, Refuse)
            assert answer.code == "lane"
        assert not two.of(DataFrame)


async def open_raw_lane(server: LinkPeer, identity: Identity) -> tuple[Raw, Raw]:
    """A control connection and a lane, both by hand."""
    control = await Raw.connect(server.port, identity)
    await control.say(hello_of("full"))
    assert isinstance(await control.hear(), Hello)
    lane = await Raw.connect(server.port, identity)
    await lane.say(hello_of("lane"))
    assert isinstance(await lane.hear(), Hello)
    return control, lane


async def test_a_payload_above_the_limit_closes_the_link_before_any_of_it_is_read() -> None:
    async with peers(1) as (server,):
        cheat = Identity.generate()
        control, lane = await open_raw_lane(server, cheat)
        lane.writer.write(header_of(0, bytes(PAYLOAD + 1)).pack())
        down = (await server.until(LinkDown))[0]
        assert (down.peer, down.blame) == (cheat.peer_id, "remote")
        assert f"frame of {PAYLOAD + 1 + DATA_HEADER_BYTES} bytes where" in down.reason
        for connection in (control, lane):
            await connection.closed()
            connection.close()


async def test_control_messages_on_a_lane_close_the_link() -> None:
    async with peers(1) as (server,):
        cheat = Identity.generate()
        control, lane = await open_raw_lane(server, cheat)
        await lane.say(GetGenesis(1))
        assert (await server.until(LinkDown))[0].blame == "remote"
        assert not server.of(Received)
        control.close()
        lane.close()


async def test_a_frame_that_stops_half_way_ends_its_lane_after_the_stall_time() -> None:
    async with peers(1, timeouts={"stall_s": 0.2}) as (server,):
        slow = Identity.generate()
        control, lane = await open_raw_lane(server, slow)
        lane.writer.write(header_of(0, bytes(1000)).pack() + bytes(10))
        await lane.closed()
        assert not server.of(DataFrame)
        assert server.manager._links[slow.peer_id].incoming == []
        control.close()
        lane.close()


async def test_ring_frames_show_how_fast_a_link_is_and_state_for_joiners_does_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("p2p_diloco.net.rates._SKIP_S", 0.0)
    monkeypatch.setattr("p2p_diloco.net.rates._WINDOW_S", 1e-9)
    async with peers(2) as (one, two):
        await one.dial(two)
        payload = bytes(500_000)
        for chunk in range(3):
            header = DataHeader(kind=3, chunk=chunk, hop=0, weight=0, tag=bytes(32), length=len(payload))
            await one.manager.send_data(two.peer_id, header, payload)
        assert one.manager.take_rates() == {}
        for chunk in range(3):
            await send(one, two, chunk, payload)
        rates = one.manager.take_rates()
        assert list(rates) == [two.peer_id]
        assert rates[two.peer_id] > 0
        assert one.manager.take_rates() == {}
        assert two.manager.take_rates() == {}
