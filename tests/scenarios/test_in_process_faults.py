"""Swarms in one event loop to which something happens: bad deltas, deaths, strangers, other models."""

from __future__ import annotations

import asyncio
import logging
import re
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from support.swarm import Node, Swarm, make_run, normal_deltas, swarm

from p2p_diloco.config import OuterConfig, PeerConfig, RunConfig, TimeoutConfig
from p2p_diloco.errors import DialError, RefusedByPeer, RunMismatchError, SchemaMismatchError
from p2p_diloco.identity import Identity, show
from p2p_diloco.net import links as net
from p2p_diloco.net.refusals import explain_refusal
from p2p_diloco.numerics.int8 import Codec
from p2p_diloco.numerics.layout import Schema, TensorSpec
from p2p_diloco.proto import events as ev
from p2p_diloco.proto.statements import Statements
from p2p_diloco.wire import messages as msg

VALUES = 5_000
PACE_S = 0.02  # of a round: an idle swarm then is no message flood
PLAIN_SGD = OuterConfig(lr=1.0, momentum=0.0)
PATIENT = TimeoutConfig(straggler_s=60.0, view_s=60.0, vote_s=60.0)  # whoever is waited for costs the test


def fp32_run(min_peers: int, outer: OuterConfig | None = None) -> RunConfig:
    return make_run(min_peers, codec="fp32", outer=outer, chunk_values=512)


def warnings(made: Swarm) -> list[str]:
    """What peers told their users apart from plain news."""
    return [n for node in made.nodes for n in node.notices if not n.startswith("info: ")]


# --- bad deltas and the outer step -------------------------------------------------------------------


@pytest.mark.parametrize("bad_value", [np.nan, np.inf])
@pytest.mark.parametrize("peers", [2, 3])
async def test_a_peer_with_a_delta_that_is_not_finite_sits_out_that_epoch_only(
    tmp_path: Path, peers: int, bad_value: float
) -> None:
    sick, epoch = peers - 1, 4
    schema = Schema((TensorSpec("embedding", (50, 40), "float32"), TensorSpec("head", (3000,), "float32")))
    healthy = normal_deltas(VALUES)

    def deltas(index: int, of: int) -> np.ndarray:
        delta = healthy(index, of)
        if (index, of) == (sick, epoch):
            delta[2000 + 1234] = bad_value
        return delta

    async with swarm(tmp_path, peers, VALUES, deltas, fp32_run(peers), schema=schema, pace_s=PACE_S) as made:
        assert await made.hold(epoch) == epoch  # the sick peer has fetched the others' result
        made.resume()
        await made.at_epoch(epoch + 4)
        said = [notice for notice in made.nodes[sick].notices if "sitting out" in notice]
        assert len(said) == 1
        assert f"epoch {epoch}" in said[0]
        assert "head" in said[0]
        others = [i for i in range(peers) if i != sick]
        assert made.contributors(epoch) == others
        link = made.nodes[0].driver.machine.chain.link(epoch)
        assert sorted(link.weights) == [100 + i for i in others]
        assert made.contributors(epoch + 1) == list(range(peers))
        made.assert_bitwise_equal(0, epoch + 3)
        made.assert_follows_reference(epoch + 3, made.nodes)


async def test_with_outer_rate_one_and_no_momentum_the_anchor_becomes_the_local_weights(
    tmp_path: Path,
) -> None:
    local: dict[int, np.ndarray] = {}
    made: list[Swarm] = []

    def deltas(index: int, epoch: int) -> np.ndarray:
        rng = np.random.default_rng(epoch)
        anchor = made[0].nodes[0].state.anchor
        step = np.float32(0.05) * rng.standard_normal(VALUES).astype(np.float32)
        local[epoch] = anchor + anchor * step
        return anchor - local[epoch]

    run = fp32_run(1, PLAIN_SGD)
    one = Swarm(tmp_path, run, VALUES, deltas)
    made.append(one)
    try:
        node = await one.add()
        await one.at_epoch(6)
    finally:
        await one.stop()
    for epoch in range(1, 6):
        np.testing.assert_array_max_ulp(node.anchors[epoch], local[epoch], maxulp=1)


@pytest.mark.parametrize("codec", ["fp32", "int8"])
async def test_two_opposite_deltas_of_equal_weight_leave_the_anchor_where_it_is(
    tmp_path: Path, codec: str
) -> None:
    both = normal_deltas(VALUES)

    def deltas(index: int, epoch: int) -> np.ndarray:
        return both(0, epoch) * np.float32(1 if index == 0 else -1)

    run = make_run(2, codec=codec, outer=PLAIN_SGD, chunk_values=1024)
    async with swarm(tmp_path, 2, VALUES, deltas, run, tokens_of=lambda index: 128) as made:
        await made.at_epoch(6)
        anchors = made.nodes[0].anchors
        for epoch in range(1, 6):
            assert made.contributors(epoch) == [0, 1]
            moved = np.abs(anchors[epoch].astype(np.float64) - anchors[epoch - 1])
            if codec == "fp32":
                assert not moved.any()
                continue
            assert moved.any()
            coder = Codec("int8")
            bound = np.zeros(VALUES)
            for start in range(0, VALUES, 1024):
                part = slice(start, min(start + 1024, VALUES))
                weighted = np.float32(128) * both(0, epoch)[part]
                lost = coder.error_bound(weighted) / 256
                bound[part] = lost + coder.error_bound(lost)
            assert (moved <= bound + 1e-6).all()


# --- joining -----------------------------------------------------------------------------------------


async def test_a_joiner_with_other_initial_weights_pulls_from_several_donors_and_ends_on_the_same_bits(
    tmp_path: Path,
) -> None:
    async with swarm(tmp_path, 3, VALUES, normal_deltas(VALUES), fp32_run(3), pace_s=PACE_S) as made:
        epoch = await made.hold(3)
        joiner = await made.add(seed=77)
        assert await made.hold(3) == epoch
        caught_up = [values for kind, values in joiner.metrics if kind == "caught_up"]
        assert [values["epoch"] for values in caught_up] == [epoch]
        assert len(caught_up[0]["donors"]) >= 2
        assert {show(node.identity.peer_id) for node in made.nodes[:3]} >= set(caught_up[0]["donors"])
        certified = made.nodes[0].driver.machine.chain.head.certificate.state_root
        assert {node.state.root for node in made.nodes} == {certified}
        assert np.array_equal(joiner.state.anchor, made.nodes[0].state.anchor)
        made.resume()
        await made.at_epoch(epoch + 3)
        assert [made.contributors(e) for e in range(epoch + 1, epoch + 4)] == [[0, 1, 2, 3]] * 3
        made.assert_bitwise_equal(0, epoch + 2)
        made.assert_follows_reference(epoch + 2, made.nodes)


async def test_a_joiner_comes_in_while_epochs_run_without_a_break(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2, VALUES, normal_deltas(VALUES), fp32_run(2), pace_s=0.1) as made:
        await made.at_epoch(3)
        joiner = await made.add(seed=5)

        def contributes() -> bool:
            return any(2 in made.contributors(e) for e in range(4, made.nodes[0].epoch + 1))

        await made.until(contributes)
        await made.at_epoch(joiner.epoch + 2)
        last = min(node.state.epoch for node in made.nodes) - 1
        made.assert_bitwise_equal(0, last)
        made.assert_follows_reference(last, made.nodes)
        assert warnings(made) == []


def two_tensors(vocabulary: int) -> Schema:
    shape = (vocabulary, 8)
    return Schema((TensorSpec("embedding", shape, "float32"), TensorSpec("norm", (8,), "float32")))


async def test_a_joiner_with_another_vocabulary_or_run_config_is_told_what_differs(tmp_path: Path) -> None:
    schema = two_tensors(300)
    values = schema.total_values
    async with swarm(tmp_path, 2, values, normal_deltas(values), schema=schema, pace_s=PACE_S) as made:
        with pytest.raises(SchemaMismatchError, match=r"embedding is 256x8 float32 here and 300x8 float32"):
            await made.add(schema=two_tensors(256))
        other = made.run.model_copy(update={"outer": OuterConfig(lr=0.5)})
        with pytest.raises(RunMismatchError, match=r"run\.outer\.lr is 0\.5 here and 0\.7 in the run"):
            await made.add(run=other)
        await made.at_epoch(made.nodes[0].epoch + 3)


async def refused(made: Swarm, hello: msg.Hello) -> RefusedByPeer:
    """The answer to a HELLO."""
    links = net.LinkManager(
        Identity.generate(), made.run_id, PeerConfig(), lambda _: hello, lambda *_: None, lambda _: None, 0
    )
    try:
        with pytest.raises(RefusedByPeer) as caught:
            await links.dial((f"127.0.0.1:{made.nodes[0].port}",), made.nodes[0].identity.peer_id)
    finally:
        await links.stop()
    return caught.value


async def test_a_hello_that_does_not_fit_is_refused_in_one_line_that_names_what_differs(
    tmp_path: Path,
) -> None:
    schema = two_tensors(300)
    values = schema.total_values
    async with swarm(tmp_path, 2, values, normal_deltas(values), schema=schema, pace_s=PACE_S) as made:
        other = two_tensors(256)
        answer = await refused(made, made.hello(schema_hash=other.hash()))
        assert answer.code == "schema"
        assert "embedding" in explain_refusal(answer, other)
        answer = await refused(made, made.hello(config_hash=bytes(32)))
        assert answer.code == "config"
        answer = await refused(made, made.hello(protocol=msg.PROTOCOL + 1))
        assert (answer.code, answer.text) == ("protocol", "protocol 2 there, 1 here")
        answer = await refused(made, made.hello(run_id=bytes(32)))
        assert answer.code == "run"
        assert re.fullmatch(r"run a+ there, [a-z2-7]+ here", answer.text)
        assert warnings(made) == []
        await made.at_epoch(made.nodes[0].epoch + 3)


async def test_a_peer_of_another_run_does_not_even_get_through_the_handshake(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2, 100, normal_deltas(100), pace_s=PACE_S) as made:
        stranger = net.LinkManager(
            Identity.generate(),
            bytes(32),
            PeerConfig(),
            lambda _: made.hello(run_id=bytes(32)),
            lambda *_: None,
            lambda _: None,
            0,
        )
        with pytest.raises(DialError, match="certificate"):
            await stranger.dial((f"127.0.0.1:{made.nodes[0].port}",), None)
        await stranger.stop()
        await made.at_epoch(made.nodes[0].epoch + 3)


# --- addresses and clocks ----------------------------------------------------------------------------


async def test_clocks_a_minute_and_a_half_apart_change_nothing_but_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = Swarm(tmp_path, make_run(2), 100, normal_deltas(100), pace_s=PACE_S)
    try:
        first = await made.add()
        second = await made.add(wall_ms=lambda: time.time_ns() // 1_000_000 + 90_000)
        await made.at_epoch(6)
        made.assert_bitwise_equal(0, 5)
        assert [made.contributors(e) for e in range(1, 7)] == [[0, 1]] * 6
    finally:
        await made.stop()
    made.check_tasks()
    pattern = re.compile(r"the clock of peer (\w{8}) is ([+-][\d.]+) s off ours")
    found = [pattern.match(r.message) for r in caplog.records if r.levelno == logging.WARNING]
    offsets = {match[1]: float(match[2]) for match in found if match}
    assert set(offsets) == {show(first.identity.peer_id), show(second.identity.peer_id)}
    assert offsets[show(second.identity.peer_id)] == pytest.approx(90, abs=1.5)
    assert offsets[show(first.identity.peer_id)] == pytest.approx(-90, abs=1.5)


async def test_a_peer_that_listens_on_every_interface_announces_addresses_that_can_be_dialled(
    tmp_path: Path,
) -> None:
    made = Swarm(tmp_path, make_run(3), 100, normal_deltas(100), pace_s=PACE_S)
    try:
        for _ in range(3):
            await made.add(peer={"host": "0.0.0.0"})
        await made.at_epoch(4)
        dialled = [address for node in made.nodes for address in node.dialled]
        assert dialled
        assert not [a for a in dialled if a.startswith("0.0.0.0") or a.endswith(":0")]
        assert [made.contributors(e) for e in range(1, 5)] == [[0, 1, 2]] * 4
    finally:
        await made.stop()
    made.check_tasks()


async def test_an_address_that_nobody_can_dial_is_replaced_or_refused_and_never_passed_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with swarm(tmp_path, 3, 100, normal_deltas(100), pace_s=PACE_S) as made:
        passed_on: list[str] = []

        def listen_in(effect: ev.Effect) -> bool:
            if isinstance(effect, ev.Send) and isinstance(effect.message, msg.Gossip):
                for record in effect.message.records:
                    body = msg.decode_body(record.kind, record.body)
                    assert isinstance(body, msg.MemberRecord)
                    passed_on.extend(body.addresses)
            return False

        for node in made.nodes:
            node.last_effect = listen_in
        liar = Identity.generate()
        nowhere = ("0.0.0.0:0", "[::]:0", "127.0.0.1:0")
        async with made.stranger(liar) as client:
            await client.say(made.hello(listen=(*nowhere, "0.0.0.0:4321")))
            assert isinstance(await client.hear(), msg.Hello)
            members = made.nodes[0].driver.machine.members
            member = members.get(liar.peer_id)
            assert member is not None
            assert member.addresses == ("127.0.0.1:4321",)
            record = Statements(liar, made.run_id).make(msg.MemberRecord(0, 1, 0, nowhere))
            await client.say(msg.Gossip(members.progress, (record,), ()))
            await client.closed()
        assert f"closing the link to peer {show(liar.peer_id)}: a member record announces '0.0.0.0:0'" in (
            caplog.text
        )
        await made.at_epoch(made.nodes[0].epoch + 5)
        assert passed_on
        dialled = [address for node in made.nodes for address in node.dialled]
        for address in passed_on + dialled:
            assert not address.startswith(("0.0.0.0", "[::]")), address
            assert not address.endswith(":0"), address


# --- deaths ------------------------------------------------------------------------------------------


def at_ring_frame(kind: str, nth: int, epoch: int, node: Node) -> Callable[[ev.Effect], bool]:
    """True before the n-th reduce or gather frame of an epoch leaves."""
    sent = 0

    def last(effect: ev.Effect) -> bool:
        nonlocal sent
        if isinstance(effect, ev.SendFrame) and effect.kind == kind and node.epoch + 1 == epoch:
            sent += 1
        return sent == nth

    return last


def at_vote(how: str, epoch: int, node: Node) -> Callable[[ev.Effect], bool]:
    """True before the own vote of an epoch is written, or after it left to one peer only. (It leaves in the
    first epoch from there on that is not decided without it.)"""
    sent: Counter[bytes] = Counter()

    def last(effect: ev.Effect) -> bool:
        if node.epoch + 1 < epoch:
            return False
        if how == "written":
            return isinstance(effect, ev.Persist) and effect.kind == "vote"
        if isinstance(effect, ev.Send) and isinstance(effect.message, msg.Statement):
            signed = effect.message.signed
            if signed.kind == "vote" and signed.public_key == node.identity.public_key:
                sent[signed.digest()] += 1
                return sent[signed.digest()] == 2
        return False

    return last


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize(
    "point", ["reduce 1", "reduce 3", "gather 1", "gather 4", "vote written", "vote sent"]
)
async def test_survivors_of_a_death_at_any_point_of_an_epoch_hold_the_mean_that_their_certificate_names(
    tmp_path: Path, point: str, victim: int
) -> None:
    kind, _, how = point.partition(" ")
    async with swarm(tmp_path, 3, VALUES, normal_deltas(VALUES), fp32_run(3), pace_s=PACE_S) as made:
        node = made.nodes[victim]
        node.last_effect = at_vote(how, 4, node) if kind == "vote" else at_ring_frame(kind, int(how), 4, node)
        await made.until(lambda: node.dead)
        epoch = node.epoch + 1  # the one that it died in
        survivors = [n for n in made.nodes if n is not node]
        await made.at_epoch(epoch + 3, survivors)
        rest = [n.index for n in survivors]
        counted = made.contributors(epoch, rest[0])
        assert counted == rest or (counted == [0, 1, 2] and kind != "reduce")
        assert [made.contributors(e, rest[0]) for e in (epoch + 1, epoch + 2)] == [rest] * 2
        made.assert_bitwise_equal(0, epoch + 2)
        made.assert_follows_reference(epoch + 2, survivors)


async def test_after_the_founders_death_the_run_goes_on_and_newcomers_join_through_others(
    tmp_path: Path,
) -> None:
    async with swarm(tmp_path, 3, VALUES, normal_deltas(VALUES), fp32_run(3), pace_s=PACE_S) as made:
        await made.at_epoch(3)
        made.kill(made.nodes[0])
        survivors = made.nodes[1:]
        await made.at_epoch(made.nodes[1].epoch + 2, survivors)
        epoch = await made.hold()
        newcomer = await made.add(seed=9)
        assert await made.hold(epoch) == epoch
        made.resume()
        await made.at_epoch(epoch + 3, [*survivors, newcomer])
        assert [made.contributors(e, 1) for e in range(epoch + 1, epoch + 4)] == [[1, 2, 3]] * 3
        made.assert_bitwise_equal(0, epoch + 2)
        made.assert_follows_reference(epoch + 2, [*survivors, newcomer])


async def test_of_two_peers_the_one_with_the_lowest_hash_goes_on_alone(tmp_path: Path) -> None:
    async with swarm(tmp_path, 2, VALUES, normal_deltas(VALUES), fp32_run(2), pace_s=PACE_S) as made:
        await made.at_epoch(3)
        lowest, other = sorted(made.nodes, key=lambda node: node.identity.peer_id)
        made.kill(other)
        await made.at_epoch(lowest.epoch + 4, [lowest])
        assert made.contributors(lowest.epoch, lowest.index) == [lowest.index]
        made.assert_follows_reference(lowest.state.epoch, [lowest])


async def test_of_two_peers_the_other_one_waits_says_so_and_goes_on_when_its_partner_is_back(
    tmp_path: Path,
) -> None:
    async with swarm(tmp_path, 2, VALUES, normal_deltas(VALUES), fp32_run(2), pace_s=PACE_S) as made:
        await made.at_epoch(3)
        lowest, other = sorted(made.nodes, key=lambda node: node.identity.peer_id)
        made.kill(lowest)
        await made.until(lambda: any("QuorumLost" in notice for notice in other.notices))
        stuck = other.epoch
        lost = next(notice for notice in other.notices if "QuorumLost" in notice)
        assert lost.startswith(f"error: QuorumLost in epoch {stuck + 1} (")
        assert lost.endswith(f"1 of 2 voters are here; waiting for {show(lowest.identity.peer_id)}")
        await asyncio.wait([lowest.task])  # type: ignore[list-item]
        assert other.epoch == stuck
        again = await made.add(
            identity=lowest.identity, peer={"run_dir": lowest.driver.machine.setup.peer.run_dir}, seed=3
        )
        await made.at_epoch(stuck + 4, [other, again])
        voters = other.driver.machine.chain.link(stuck + 4).contributors
        assert sorted(voters) == sorted([lowest.identity.peer_id, other.identity.peer_id])
        made.assert_bitwise_equal(0, stuck + 3)


async def test_a_peer_that_leaves_is_not_waited_for(tmp_path: Path) -> None:
    deltas = normal_deltas(VALUES)
    async with swarm(tmp_path, 3, VALUES, deltas, fp32_run(3), pace_s=PACE_S, timeouts=PATIENT) as made:
        await made.at_epoch(3)
        leaver, stayers = made.nodes[1], [made.nodes[0], made.nodes[2]]
        leaver.driver.leave("going home")
        assert leaver.task is not None
        assert await asyncio.wait_for(leaver.task, 10) == "going home"
        left_at = max(node.epoch for node in stayers)
        await made.at_epoch(left_at + 6, stayers, limit_s=20)
        assert made.contributors(left_at + 5) == [0, 2]
        attempts = [
            v["attempt"] for kind, v in stayers[0].metrics if kind == "epoch" and v["epoch"] > left_at + 1
        ]
        assert set(attempts) == {0}
        made.assert_bitwise_equal(0, left_at + 5)
        made.assert_follows_reference(left_at + 5, stayers)


async def test_a_good_bye_is_heard_by_everybody_before_the_links_end(tmp_path: Path) -> None:
    async with swarm(tmp_path, 3, VALUES, normal_deltas(VALUES), fp32_run(3), pace_s=PACE_S) as made:
        await made.at_epoch(3)
        leaver, stayers = made.nodes[1], [made.nodes[0], made.nodes[2]]
        leaver.driver.leave("going home")
        good_bye = f"info: peer {show(leaver.identity.peer_id)} has left"
        await made.until(lambda: all(good_bye in stayer.notices for stayer in stayers))
        assert not [n for n in warnings(made) if "suspected" in n]


async def test_all_peers_can_leave_at_once_in_the_middle_of_epochs(tmp_path: Path) -> None:
    async with swarm(tmp_path, 3, VALUES, normal_deltas(VALUES), fp32_run(3)) as made:
        await made.at_epoch(3)
        for node in made.nodes:
            node.driver.leave("the end")
        tasks = [node.task for node in made.nodes if node.task is not None]
        assert await asyncio.wait_for(asyncio.gather(*tasks), 10) == ["the end"] * 3
    # the swarm itself looks for tasks and errors that were left
