"""Swarms of real processes: kills at chosen points, a dead founder, late joiners, clean ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from support.processes import ROOT, PeerProcess, Processes, processes

pytestmark = [pytest.mark.processes, pytest.mark.timeout(400)]


def assert_one_history(peers: list[PeerProcess]) -> None:
    """For each epoch, all peers that saw its certificate saw the same state root and contributors."""
    for epoch in {e for peer in peers for e in peer.epochs()}:
        seen = [peer.epochs()[epoch] for peer in peers if epoch in peer.epochs()]
        assert len({record["state_root"] for record in seen}) == 1, epoch
        assert len({tuple(record["contributors"]) for record in seen}) == 1, epoch


def short_id(peer: PeerProcess) -> str:
    """The peer's id as others show it."""
    code = (
        "import sys; from pathlib import Path; from p2p_diloco.identity import Identity, show\n"
        "seed = bytes.fromhex(Path(sys.argv[1]).read_text().split()[-1])\n"
        "print(show(Identity(seed).peer_id))"
    )
    command = [sys.executable, "-c", code, str(peer.folder / "identity.key")]
    return subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout.strip()


def leave(swarm: Processes, peer: PeerProcess) -> None:
    """Ctrl-C: status 0 in time, no process, no half file, a whole last line, a checkpoint left behind."""
    peer.remember_children()
    shared_before = set(os.listdir("/dev/shm")) if os.path.isdir("/dev/shm") else set()
    began = time.monotonic()
    peer.process.send_signal(signal.SIGINT)
    assert peer.process.wait(10) == 0, peer.log[-2000:]
    print(f"{peer.name} left in {time.monotonic() - began:.1f} s")
    swarm.until_gone(peer.children, 3)
    assert not [p for p in peer.folder.rglob("*.tmp")]
    last = (peer.folder / "metrics.jsonl").read_bytes()
    assert last.endswith(b"\n")
    json.loads(last.splitlines()[-1])
    newest = sorted((peer.folder / "checkpoints").glob("epoch-*"))[-1]
    assert int(newest.name.removeprefix("epoch-")) == peer.epoch()
    if shared_before:
        assert set(os.listdir("/dev/shm")) <= shared_before


def test_the_run_survives_kills_in_reduce_gather_and_vote_the_founders_too_and_takes_in_a_newcomer(
    tmp_path: Path,
) -> None:
    with processes(tmp_path) as swarm:
        founder = swarm.start("founder", swarm.config(5), P2P_DILOCO_KILL="reduce@3+")
        flags = swarm.join_flags(founder)
        gather = swarm.start("gather", flags, P2P_DILOCO_KILL="gather@5+")
        vote = swarm.start("vote", flags, P2P_DILOCO_KILL="vote_persisted@7+")
        stayers = [swarm.start("one", flags), swarm.start("two", flags)]
        for victim, earliest in ((founder, 3), (gather, 5), (vote, 7)):
            swarm.until_died(victim, signal.SIGKILL)
            epoch = victim.epoch() + 1  # the one that it was agreeing on
            assert epoch >= earliest
            swarm.until(
                f"epoch {epoch} without {victim.name}", lambda e=epoch: all(p.epoch() >= e for p in stayers)
            )
        first = stayers[0].epochs()[founder.epoch() + 1]
        assert short_id(founder) not in first["contributors"]
        assert first["attempt"] > 0
        newcomer = swarm.start("newcomer", swarm.join_flags(stayers[1]))
        me = short_id_when_there(swarm, newcomer)
        swarm.until(
            "an epoch with the newcomer",
            lambda: any(me in record["contributors"] for record in stayers[0].epochs().values()),
        )
        assert_one_history(swarm.peers)
        for victim in (founder, gather, vote):
            swarm.until_gone(victim.children)
        leave(swarm, newcomer)
        height = stayers[0].epoch()
        swarm.until("epochs after the good-bye", lambda: all(p.epoch() > height + 1 for p in stayers))
        assert_one_history(swarm.peers)


def short_id_when_there(swarm: Processes, peer: PeerProcess) -> str:
    swarm.until("its key file", lambda: (peer.folder / "identity.key").exists())
    return short_id(peer)


def test_a_trainer_that_crashes_is_told_of_left_out_restarted_and_back(tmp_path: Path) -> None:
    with processes(tmp_path) as swarm:
        founder = swarm.start("founder", swarm.config(2), P2P_DILOCO_FAULT="crash:2")
        other = swarm.start("other", swarm.join_flags(founder))
        me = short_id(founder)
        swarm.until("word of the crash", lambda: "the trainer died" in founder.notices())
        swarm.until("epoch 2", lambda: other.epoch() >= 2)
        assert me not in other.epochs()[2]["contributors"]
        swarm.until(
            "an epoch with the restarted trainer",
            lambda: any(me in r["contributors"] for e, r in other.epochs().items() if e > 2),
        )
        assert "restarting the trainer" in founder.notices()
        assert_one_history(swarm.peers)
        refuse_other_vocabulary(tmp_path, swarm, founder)


def refuse_other_vocabulary(tmp_path: Path, swarm: Processes, founder: PeerProcess) -> None:
    """A joiner whose own config differs from the run's is told which key, and ends with status 2."""
    mine = tmp_path / "mine.toml"
    mine.write_text(
        (tmp_path / "run.toml").read_text().replace("[run.model]", "[run.model]\nvocab_size = 512")
    )
    stranger = swarm.start("stranger", ["--config", str(mine), *swarm.join_flags(founder)])
    swarm.until("the refusal", lambda: stranger.process.poll() is not None)
    assert stranger.process.returncode == 2
    assert "run.model.vocab_size is 512 here and 256 in the run" in stranger.log


def test_a_lone_peer_is_locked_in_leaves_cleanly_and_resumes_from_its_checkpoint(tmp_path: Path) -> None:
    with processes(tmp_path) as swarm:
        flags = swarm.config(1)
        first = swarm.start("lone", flags)
        swarm.until("two epochs", lambda: first.epoch() >= 2)
        second = swarm.start("lone", flags)
        swarm.until("the refusal", lambda: second.process.poll() is not None)
        assert second.process.returncode == 2
        assert "is in use by another process" in first.log
        leave(swarm, first)
        height, genesis = first.epoch(), (first.folder / "genesis.bin").read_bytes()
        third = swarm.start("lone", flags)
        swarm.until("epochs after the restart", lambda: third.epoch() >= height + 2)
        assert (third.folder / "genesis.bin").read_bytes() == genesis
        epochs = [record["epoch"] for record in third.records("epoch")]
        assert epochs == sorted(set(epochs)), "no epoch was decided twice"


def test_a_config_with_an_unknown_key_is_refused_in_one_line_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[run.inner]\nstepz = 4\n")
    command = [sys.executable, "-m", "p2p_diloco.peer", "--config", str(path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=60)
    assert done.returncode == 2
    assert done.stderr.strip().splitlines() == ["p2p-diloco: unknown key run.inner.stepz"]
