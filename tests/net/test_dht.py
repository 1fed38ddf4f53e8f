"""Real DHT daemons on loopback: finding, dead seeds, forged records, dead daemons, clean ends."""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from p2p_diloco.errors import DiscoveryError
from p2p_diloco.identity import Identity
from p2p_diloco.net.dht import DHTDiscovery, _run_key

RUN = bytes(range(32))
ROOT = Path(__file__).resolve().parents[2]
Maker = Callable[..., Awaitable[DHTDiscovery]]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Maker]:
    """Starts DHT peers in folders of their own; stops them all at the end."""
    made: list[DHTDiscovery] = []

    async def start(seeds: list[str], port: int = 0) -> DHTDiscovery:
        folder = tmp_path / str(len(made))
        folder.mkdir()
        peer = DHTDiscovery(Identity.generate(), "127.0.0.1", port, seeds, folder)
        made.append(peer)
        await peer.start()
        return peer

    yield start
    await asyncio.gather(*(peer.stop() for peer in made))


async def eventually(check: Callable[[], Awaitable[Any]], limit_s: float = 30.0) -> Any:
    """Ask again until the answer is true; there is no event of hivemind's to wait for."""
    end = time.monotonic() + limit_s
    while True:
        try:
            found = await check()
        except DiscoveryError:
            found = None
        if found or time.monotonic() > end:
            return found
        await asyncio.sleep(0.2)


async def dead_seed(make: Maker) -> tuple[str, DHTDiscovery]:
    """The address of a daemon that is down, and its owner, who can bring it up again."""
    peer = await make([])
    seed = peer.visible_maddrs()[0]
    assert peer._task is not None
    peer._task.cancel()
    await peer._bring_down()
    return seed, peer


@pytest.mark.processes
async def test_peers_find_each_other_and_a_dead_seed_is_named_and_skipped(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    first = await make([])
    await first.announce(RUN, "name", ("127.0.0.1:1000",), "direct")
    seed, _ = await dead_seed(make)
    with caplog.at_level(logging.INFO, logger="p2p_diloco"):
        second = await make([seed, *first.visible_maddrs()])
    assert seed in caplog.text
    assert "does not answer" in caplog.text
    await second.announce(RUN, "name", ("127.0.0.1:1001",), "direct")
    third = await make(second.visible_maddrs())
    [entry] = await eventually(third.runs)
    assert (entry.run_id, entry.name) == (RUN, "name")

    async def both() -> bool:
        return {r.addresses[0] for r in await third.find(RUN)} == {"127.0.0.1:1000", "127.0.0.1:1001"}

    assert await eventually(both)
    assert "1 of 1 initial peers answer" in third.status()


@pytest.mark.processes
async def test_with_all_seeds_dead_a_start_succeeds_and_a_seed_that_comes_up_later_is_used(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    seed, first = await dead_seed(make)
    with caplog.at_level(logging.INFO, logger="p2p_diloco"):
        second = await make([seed])
    assert "none of the 1 initial peers answers" in caplog.text
    assert await second.runs() == []
    await first._bring_up()
    await first.announce(RUN, "name", ("127.0.0.1:1000",), "direct")
    assert await eventually(second.runs)


@pytest.mark.processes
async def test_forged_and_immortal_records_of_a_raw_node_are_never_returned(make: Maker) -> None:
    first = await make([])
    raw = await make(first.visible_maddrs())
    raw._node.protocol.record_validator = None  # a stranger whose node checks nothing
    key = _run_key(RUN, 0)
    stores = [
        (b"junk", time.time() + 100, b"subkey"),
        (bytes(5000), time.time() + 100, Identity.generate().public_key),
        (b"x", float("inf"), Identity.generate().public_key),
    ]
    for value, expiry, subkey in stores:
        await raw._node.store(key, value, expiry, subkey=subkey, exclude_self=False)
    assert await first.find(RUN) == []
    assert await raw.find(RUN) == []


@pytest.mark.processes
async def test_a_daemon_that_dies_is_restarted_and_found_again(
    make: Maker, caplog: pytest.LogCaptureFixture
) -> None:
    first = await make([])
    second = await make(first.visible_maddrs())
    await second.announce(RUN, "name", ("127.0.0.1:1001",), "direct")
    before = second._p2p._child.pid
    with caplog.at_level(logging.INFO, logger="p2p_diloco"):
        os.kill(before, signal.SIGKILL)

        async def back() -> bool:
            up = second._p2p is not None and second._p2p._child.pid != before
            return up and bool(await first.find(RUN))

        assert await eventually(back)
    assert "daemon died" in caplog.text


@pytest.mark.processes
async def test_a_stop_after_the_daemon_died_ends_and_leaves_nothing(make: Maker) -> None:
    peer = await make([])
    pid, watchdog = peer._p2p._child.pid, peer._watchdog._process.pid  # type: ignore[union-attr]
    os.kill(pid, signal.SIGKILL)
    async with asyncio.timeout(10):
        await peer.stop()
    for gone in (pid, watchdog):
        with pytest.raises(ProcessLookupError):
            os.kill(gone, 0)


@pytest.mark.processes
async def test_the_daemon_dies_with_a_process_that_is_killed(tmp_path: Path) -> None:
    script = (
        "import asyncio, sys; from pathlib import Path\n"
        "from p2p_diloco.identity import Identity\n"
        "from p2p_diloco.net.dht import DHTDiscovery\n"
        "async def main():\n"
        "    peer = DHTDiscovery(Identity.generate(), '127.0.0.1', 0, [], Path(sys.argv[1]))\n"
        "    await peer.start()\n"
        "    print(peer._p2p._child.pid, flush=True)\n"
        "    await asyncio.sleep(60)\n"
        "asyncio.run(main())\n"
    )
    with subprocess.Popen(  # noqa: ASYNC220
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    ) as child:
        assert child.stdout is not None
        daemon = int(await asyncio.to_thread(child.stdout.readline))
        child.kill()

    async def gone() -> bool:
        try:
            os.kill(daemon, 0)
        except ProcessLookupError:
            return True
        return False

    assert await eventually(gone, 15)
