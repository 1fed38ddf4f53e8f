"""tools/wan.py: scenarios, the links' arithmetic in virtual time, and one small network that is really up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

TOOLS = Path(__file__).resolve().parents[2] / "tools"
sys.path.insert(0, str(TOOLS))  # the tools are scripts that import their neighbours

import wan  # noqa: E402
from wan_link import Network, Pair, Stage  # noqa: E402
from wan_scenario import ScenarioError, load, names, parse  # noqa: E402

TWO = """
[[peers]]
name = "a"
{a}
[[peers]]
name = "b"
{b}
"""


def two(top: str = "", a: str = "", b: str = "", scale: float | None = None) -> Network:
    """A network of two peers that starts at second 0."""
    return Network(parse(top + TWO.format(a=a, b=b), scale=scale), 0.0)


def arrivals(network: Network, until_s: float = 1e6) -> list[tuple[float, int, bytes]]:
    """Let the virtual clock run: (moment, receiver, packet) of everything that arrives."""
    found = []
    while (now_s := network.next_s()) <= until_s:
        found += [(now_s, peer, packet) for peer, packet in network.due(now_s)]
    return found


def moments(network: Network, pair: Pair, sent: list[float], size: int) -> list[float]:
    for now_s in sent:
        network.send(now_s, pair, b"x", size)
    return [moment_s for moment_s, _, _ in arrivals(network)]


# --- scenarios ---


@pytest.mark.parametrize("name", names())
def test_every_scenario_that_comes_with_the_project_can_be_read(name: str) -> None:
    scenario = load(name)
    assert scenario.about
    assert all(scenario.path_bits_per_s(a, b) > 0 for a, b in scenario.pairs)
    Network(scenario, 0.0)


def test_the_global_scenario_has_the_shape_that_it_claims() -> None:
    scenario = load("global")
    assert len(scenario.peers) == 14
    assert len({peer.region.partition("-")[0] for peer in scenario.peers}) == 3
    rates = {scenario.path_bits_per_s(a, b) * scenario.scale / 1e6 for a, b in scenario.pairs}
    assert min(rates) == pytest.approx(500)
    assert max(rates) == pytest.approx(4000)


def test_regions_then_links_decide_what_a_pair_has() -> None:
    top = """
    [link]
    loss = 0.5
    [between]
    "x y" = { delay_ms = 40, rate_mbit = 100 }
    [[links]]
    from = "b"
    to = "*"
    delay_ms = 7
    """
    scenario = parse(top + TWO.format(a='region = "x"', b='region = "y"'))
    there, back = scenario.pairs[0, 1], scenario.pairs[1, 0]
    assert (there.delay_ms, there.rate_mbit, there.loss) == (40, 100, 0.5)
    assert (back.delay_ms, back.rate_mbit, back.loss) == (7, 100, 0.5)
    assert scenario.round_trip_s(0, 1) == pytest.approx(0.047)


def test_scale_divides_rates_and_nothing_else() -> None:
    text = "scale = 10\n[link]\ndelay_ms = 40\nrate_mbit = 100" + TWO.format(a="up_mbit = 50", b="")
    assert parse(text).path_bits_per_s(0, 1) == pytest.approx(5e6)
    assert parse(text, scale=2).path_bits_per_s(0, 1) == pytest.approx(25e6)
    assert parse(text).round_trip_s(0, 1) == parse(text, scale=2).round_trip_s(0, 1)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("= 1", "not TOML"),
        ("", r"2 to 250 \[\[peers\]\] are needed, not 0"),
        ("speed = 1" + TWO, "unknown key 'speed'"),
        ("scale = 0" + TWO, "scale must be more than 0"),
        ("[link]\nloss = 2" + TWO, "link: loss must be between 0 and 1"),
        ("[link]\ndelay_ms = -1" + TWO, "delay_ms must be a number, 0 or more, not -1"),
        ('[link]\nrate_mbit = "fast"' + TWO, "rate_mbit must be a number"),
        ('[[links]]\nfrom = "a"\nto = "c"' + TWO, "no peer is called 'c'"),
        ('[[links]]\nfrom = "a"\nto = "a"' + TWO, "from a peer to itself"),
        ('[[links]]\nfrom = "a"' + TWO, "'to' is missing"),
        ('[[changes]]\nfrom = "a"\nto = "b"\nloss = 1' + TWO, "'at_s' is missing"),
        ('[[changes]]\nat_s = 1\nfrom = "a"\nto = "b"' + TWO, "changes nothing"),
        ('[[changes]]\nat_s = 1\npeer = "a"\nloss = 1' + TWO, "unknown key 'loss'"),
        ('[between]\n"x y" = { delay_ms = 1 }' + TWO, "no peer is in region 'x'"),
        ('[[peers]]\nname = "A b"\n[[peers]]', "name 'A b' must be"),
        ('[[peers]]\nname = "a"\n[[peers]]\nname = "a"', "a second peer"),
        ("peers = 1", r"peers must be written as \[\[peers\]\]"),
    ],
)
def test_what_is_wrong_with_a_scenario_is_said_in_one_line(text: str, complaint: str) -> None:
    with pytest.raises(ScenarioError, match=complaint) as caught:
        parse(text.replace("{a}", "").replace("{b}", ""), "mine")
    assert str(caught.value).startswith("mine: ")
    assert "\n" not in str(caught.value)


def test_a_pair_of_regions_that_is_missing_is_named() -> None:
    text = '[between]\n"x x" = { delay_ms = 1 }' + TWO.format(a='region = "x"', b='region = "y"')
    with pytest.raises(ScenarioError, match='"x y" is missing'):
        parse(text)


def test_a_scenario_that_is_not_there_is_told_with_those_that_are() -> None:
    with pytest.raises(ScenarioError, match=r"scenarios by name: .*global"):
        load("nowhere")


# --- the links, in virtual time ---


def test_a_packet_takes_the_delay() -> None:
    network = two("[link]\ndelay_ms = 40")
    network.send(1.0, network.pairs[0, 1], b"hello", 1500)
    assert network.due(1.0399) == []
    assert network.due(1.0401) == [(1, b"hello")]
    assert network.due(9.0) == []


@pytest.mark.parametrize(
    ("top", "a", "b"),
    [("[link]\ndelay_ms = 10\nrate_mbit = 8", "", ""), ("", "up_mbit = 8", ""), ("", "", "down_mbit = 8")],
)
def test_a_rate_spaces_packets_by_their_size(top: str, a: str, b: str) -> None:
    network = two(top, a, b)
    delay_s = network.pairs[0, 1].delay_s
    found = moments(network, network.pairs[0, 1], [0.0, 0.0, 0.0, 5.0], 1000)
    assert found == pytest.approx([t + delay_s for t in (0.001, 0.002, 0.003, 5.001)])


def test_equal_rates_in_a_row_cost_the_time_of_one() -> None:
    """A bundle stands for many packets, which a real network passes on while others still come in."""
    network = two("[link]\nrate_mbit = 8", "up_mbit = 8", "down_mbit = 8")
    assert moments(network, network.pairs[0, 1], [0.0, 0.0], 1000) == pytest.approx([0.001, 0.002])


def test_the_slowest_part_of_a_way_decides() -> None:
    network = two("[link]\nrate_mbit = 80", "up_mbit = 8", "down_mbit = 800")
    found = moments(network, network.pairs[0, 1], [0.0] * 100, 1000)
    assert found[-1] == pytest.approx(0.1, rel=0.01)


def test_an_uplink_is_shared_by_all_pairs_of_its_peer_and_a_downlink_too() -> None:
    text = "".join(f'[[peers]]\nname = "{name}"\nup_mbit = 8\ndown_mbit = 8\n' for name in "abc")
    network = Network(parse(text), 0.0)
    for _ in range(10):
        network.send(0.0, network.pairs[0, 1], b"x", 1000)
        network.send(0.0, network.pairs[0, 2], b"x", 1000)
    assert arrivals(network)[-1][0] == pytest.approx(0.020)
    for _ in range(10):
        network.send(1.0, network.pairs[0, 2], b"x", 1000)
        network.send(1.0, network.pairs[1, 2], b"x", 1000)
    assert arrivals(network)[-1][0] == pytest.approx(1.020)


def test_a_slow_sender_does_not_hold_up_others_at_the_receiver() -> None:
    peers = [("a", 0.8), ("b", 0.8), ("c", 8)]
    text = "".join(f'[[peers]]\nname = "{name}"\nup_mbit = {up}\ndown_mbit = 8\n' for name, up in peers)
    network = Network(parse(text), 0.0)
    for source in (0, 1):
        for _ in range(10):
            network.send(0.0, network.pairs[source, 2], b"x", 1000)
    assert arrivals(network)[-1][0] == pytest.approx(0.1, rel=0.02)  # as long as one of them alone takes


@pytest.mark.parametrize(
    ("top", "a", "b", "where"),
    [
        ("[link]\nrate_mbit = 8\nqueue_kib = 10", "", "", "dropped_link"),
        ("", "up_mbit = 8\nqueue_kib = 10", "", "dropped_up"),
        ("", "", "down_mbit = 8\nqueue_kib = 10", "dropped_down"),
    ],
)
def test_a_full_queue_drops_its_tail(top: str, a: str, b: str, where: str) -> None:
    network = two(top, a, b)
    pair = network.pairs[0, 1]
    assert len(moments(network, pair, [0.0] * 25, 1024)) == 10
    assert getattr(pair.counters, where) == 15
    assert (pair.counters.packets, pair.counters.delivered_packets) == (25, 10)
    assert len(moments(network, pair, [60.0], 1024)) == 1  # there is room again


def test_an_idle_link_takes_a_packet_that_is_larger_than_its_queue() -> None:
    stage = Stage(8e6, 1000)
    assert stage.offer(0.0, 5000) == pytest.approx(0.005)
    assert stage.offer(0.001, 100) is None


def test_the_default_queue_is_a_tenth_of_a_second() -> None:
    network = two("[link]\nrate_mbit = 1000")
    assert network.pairs[0, 1].stage.queue_bytes == pytest.approx(12.5e6)
    assert two("[link]\nrate_mbit = 1").pairs[0, 1].stage.queue_bytes == 256 * 1024


def fate(seed: int) -> list[float]:
    network = two(f"seed = {seed}\n[link]\nloss = 0.1")
    return moments(network, network.pairs[0, 1], [float(n) for n in range(5000)], 1000)


def test_loss_is_as_frequent_as_stated_and_repeats_with_its_seed() -> None:
    assert 4400 < len(fate(1)) < 4600
    assert fate(1) == fate(1)
    assert fate(1) != fate(2)


def test_a_bundle_is_lost_if_one_of_its_segments_is() -> None:
    network = two("[link]\nloss = 0.01")
    pair = network.pairs[0, 1]
    for n in range(5000):
        network.send(float(n), pair, b"x", 60000, segments=40)
    assert pair.counters.lost / 5000 == pytest.approx(1 - 0.99**40, abs=0.03)


def test_full_loss_cuts_and_no_loss_loses_nothing() -> None:
    network = two("[link]\nloss = 1")
    assert moments(network, network.pairs[0, 1], [0.0] * 50, 10) == []
    network = two()
    assert len(moments(network, network.pairs[0, 1], [0.0] * 50, 10)) == 50


def test_jitter_delays_within_its_bound_and_keeps_the_order() -> None:
    network = two("[link]\ndelay_ms = 10\njitter_ms = 5")
    pair = network.pairs[0, 1]
    for n in range(500):
        network.send(n / 1000, pair, str(n).encode(), 100)
    found = arrivals(network)
    assert [int(packet) for _, _, packet in found] == list(range(500))
    delays = [moment_s - int(packet) / 1000 for moment_s, _, packet in found]
    assert 0.010 <= min(delays) < 0.011
    assert 0.014 < max(delays) <= 0.0151


def test_a_link_degrades_at_its_time_and_recovers() -> None:
    top = '[[changes]]\nat_s = {}\nfrom = "a"\nto = "b"\n'
    changes = top.format(10) + "rate_mbit = 8\ndelay_ms = 100\n" + top.format(20) + "rate_mbit = 0\n"
    network = two(changes + top.format(30) + "loss = 1\n")
    pair, back = network.pairs[0, 1], network.pairs[1, 0]
    assert moments(network, pair, [], 1000) == []  # the clock ran through all changes
    assert pair.loss == 1

    network = two(changes)
    network.due(9.9)
    network.send(9.9, pair := network.pairs[0, 1], b"fast", 1000)
    assert network.due(9.9) == [(1, b"fast")]
    assert network.next_s() == 10.0
    network.due(10.0)
    network.send(10.5, pair, b"slow", 1000)
    assert arrivals(network, 15.0) == [(pytest.approx(10.601), 1, b"slow")]
    network.due(20.0)
    assert pair.stage.offer(20.5, 10**9) == 20.5  # no limit again
    assert back.delay_s == 0.0  # the way back never changed


def test_bytes_that_wait_move_at_the_new_rate() -> None:
    stage = Stage(8e6, 10**6)
    assert stage.offer(0.0, 10_000) == pytest.approx(0.010)
    stage.change(0.005, 0.8e6, 10**6)  # 5,000 bytes wait: now 50 ms
    assert stage.offer(0.005, 1000) == pytest.approx(0.065)


def test_a_peers_own_line_can_change() -> None:
    network = two('[[changes]]\nat_s = 1\npeer = "a"\nup_mbit = 0.8\n', "up_mbit = 8")
    network.due(1.0)
    assert moments(network, network.pairs[0, 1], [2.0], 1000) == pytest.approx([2.01])


def test_statistics_tell_of_pairs_that_were_used_and_of_lateness() -> None:
    network = two("[link]\ndelay_ms = 10")
    network.send(0.0, network.pairs[0, 1], b"x", 1000)
    network.due(0.013)
    found = network.statistics()
    assert list(found["pairs"]) == ["a b"]  # type: ignore[call-overload]
    assert found["late_most_ms"] == pytest.approx(3.0)


# --- the command line ---


def test_a_machine_that_cannot_play_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wan.os, "geteuid", lambda: 1000)
    monkeypatch.setattr(wan.sys, "platform", "linux")
    monkeypatch.setattr(wan.sys, "argv", ["wan.py", "lan", "--check"])
    assert wan.main() == 2
    assert capsys.readouterr().err.splitlines() == ["wan: the WAN emulator needs root (network namespaces)"]


def test_a_wrong_scenario_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(wan.sys, "argv", ["wan.py", "nowhere", "--check"])
    assert wan.main() == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


# --- a network that is up ---


SMALL = "[link]\ndelay_ms = 5\nrate_mbit = 200" + TWO.format(a="", b="up_mbit = 100")


@pytest.fixture
def able() -> None:
    """Skips, with the reason, where no network can be played."""
    if reason := wan.unavailable():
        pytest.skip(reason)


@pytest.fixture
def live(able: None) -> Iterator[wan.Wan]:
    with wan.Wan(parse(SMALL)) as network:
        yield network


RECEIVE = """
import hashlib, socket, sys
with socket.create_server(("", 7000)) as server:
    print("ready", flush=True)
    connection, _ = server.accept()
    digest, size = hashlib.sha256(), 0
    while data := connection.recv(1 << 16):
        digest.update(data)
        size += len(data)
    connection.sendall(f"{size} {digest.hexdigest()}".encode())
"""
SEND = """
import hashlib, random, socket, sys
data = random.Random(1).randbytes(3_000_000)
with socket.create_connection((sys.argv[1], 7000), 10) as connection:
    connection.sendall(data)
    connection.shutdown(socket.SHUT_WR)
    answer = b""
    while part := connection.recv(1000):
        answer += part
assert answer.decode() == f"{len(data)} {hashlib.sha256(data).hexdigest()}", answer
"""


def known_namespaces() -> set[str]:
    return {line.split()[0] for line in wan.ip("netns", "list").splitlines() if line}


def test_bytes_pass_unharmed_and_nothing_is_left_behind(live: wan.Wan) -> None:
    assert set(live.namespaces) <= known_namespaces()
    server = subprocess.Popen(live.command(1, [sys.executable, "-c", RECEIVE]), stdout=subprocess.PIPE)
    assert server.stdout is not None
    with server.stdout:
        assert server.stdout.readline() == b"ready\n"
        sender = live.command(0, [sys.executable, "-c", SEND, live.addresses[1]])
        subprocess.run(sender, check=True, timeout=30)
        assert server.wait(10) == 0
    there = live.statistics()["pairs"]["a b"]
    assert there["delivered_bytes"] > 3_000_000

    live.change(**{"from": "a", "to": "b", "both": True, "loss": 1})
    ping = live.command(0, [sys.executable, "-c", SEND.replace(", 10)", ", 0.3)"), live.addresses[1]])
    assert b"timed out" in subprocess.run(ping, stderr=subprocess.PIPE, timeout=30).stderr
    with pytest.raises(wan.WanError, match="no peer is called"):
        live.change(peer="nobody", up_mbit=1)

    sleeper = subprocess.Popen(
        live.command(0, ["sh", "-c", "echo in; exec sleep 100"]), stdout=subprocess.PIPE
    )
    assert sleeper.stdout is not None
    with sleeper.stdout:
        assert sleeper.stdout.readline() == b"in\n"
        live.close()
    assert sleeper.wait(10) == -signal.SIGTERM
    assert not set(live.namespaces) & known_namespaces()
    live.close()  # a second time does nothing


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.usefixtures("able")
def test_a_signal_leaves_nothing_behind(tmp_path: Path, number: signal.Signals) -> None:
    scenario = tmp_path / "small.toml"
    scenario.write_text(SMALL)
    command = [sys.executable, str(TOOLS / "wan.py"), str(scenario), "--hold"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert process.stdout is not None
    with process.stdout:
        shown = dict(process.stdout.readline().removeprefix("export ").split("=", 1) for _ in range(5))
        namespaces = set(shown["WAN_NAMESPACES"].strip().strip('"').split())
        assert namespaces <= known_namespaces()
        os.kill(process.pid, number)
        process.wait(15)
    end_s = time.monotonic() + 15
    while namespaces & known_namespaces() and time.monotonic() < end_s:
        time.sleep(0.05)  # after SIGKILL the forwarder clears up
    assert not namespaces & known_namespaces()


def test_the_namespaces_see_each_other_and_nothing_else(live: wan.Wan) -> None:
    shown = subprocess.run(live.command(0, ["ip", "route"]), capture_output=True, text=True, check=True)
    assert [line.split()[0] for line in shown.stdout.splitlines()] == ["10.77.0.0/24"]
