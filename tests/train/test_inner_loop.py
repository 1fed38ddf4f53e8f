from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from p2p_diloco.config import DataConfig, InnerConfig, ModelConfig, RunConfig, ScheduleConfig, SourceConfig
from p2p_diloco.errors import ConfigError
from p2p_diloco.numerics.layout import Schema
from p2p_diloco.train.data import DataMix
from p2p_diloco.train.devices import alone
from p2p_diloco.train.faults import Faults
from p2p_diloco.train.fsdp import build_sharded, schema_of, shard_rows, shards_of, store_delta, store_weights
from p2p_diloco.train.loop import InnerLoop, StepReport, micro_batches
from p2p_diloco.train.model import initial_values

RUN = RunConfig(
    seed=5,
    model=ModelConfig(
        vocab_size=257, hidden_size=16, intermediate_size=33, layers=2, heads=2, kv_heads=1, max_seq_len=64
    ),
    inner=InnerConfig(lr=3e-3, batch_sequences=6, micro_batch_sequences=2, seq_len=24),
    schedule=ScheduleConfig(warmup_steps=2),
    data=DataConfig(sources=(SourceConfig(name="toy", kind="folder"),), eval_sequences=7),
)


@pytest.fixture
def data(tmp_path: Path) -> DataMix:
    (tmp_path / "toy.txt").write_bytes(b"the quick brown fox jumps over the lazy dog. " * 400)
    return DataMix(RUN.data, {"toy": tmp_path}, RUN.inner.seq_len)


@pytest.fixture
def loop(data: DataMix) -> Iterator[InnerLoop]:
    mesh = alone("cpu")
    yield InnerLoop(RUN, mesh, 7, data)
    dist.destroy_process_group()


def train(loop: InnerLoop, steps: int, **options: object) -> tuple[list[StepReport], object]:
    reports: list[StepReport] = []
    arguments = {"should_stop": lambda: False, "on_step": reports.append, **options}
    return reports, loop.train(steps, 0, b"key", **arguments)  # type: ignore[arg-type]


def with_fake_ranks(
    ranks: int, rank: int, run: RunConfig
) -> tuple[Schema, list[tuple[int, int]], np.ndarray]:
    """Build the shards of one of many ranks without the others: collectives do nothing here."""
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=ranks)
    try:
        mesh = init_device_mesh("cpu", (ranks,))
        model = build_sharded(run, mesh, 7)
        schema = schema_of(model)
        shards = shards_of(model, schema, mesh)
        out = np.full(schema.total_values, np.nan, dtype=np.float32)
        store_weights(shards, out)
        return schema, [(shard.start, shard.stop) for shard in shards], out
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("rows", [0, 1, 2, 7, 8, 33])
@pytest.mark.parametrize("ranks", [1, 2, 3, 8, 16])
def test_shard_rows_split_as_torch_chunk_does(rows: int, ranks: int) -> None:
    sizes = [stop - start for start, stop in (shard_rows(rows, ranks, rank) for rank in range(ranks))]
    expected = [len(part) for part in torch.arange(rows).chunk(ranks)] if rows else []
    assert sizes == expected + [0] * (ranks - len(expected))


@pytest.mark.parametrize("ranks", [2, 3, 24])
def test_the_ranks_ranges_cover_the_flat_vector_exactly_once(ranks: int) -> None:
    _, _, whole = with_fake_ranks(1, 0, RUN)
    merged = np.full_like(whole, np.nan)
    covered = np.zeros(whole.size, dtype=np.int64)
    empty = 0
    for rank in range(ranks):
        _, ranges, part = with_fake_ranks(ranks, rank, RUN)
        for start, stop in ranges:
            covered[start:stop] += 1
            empty += start == stop
            merged[start:stop] = part[start:stop]
    assert np.all(covered == 1)
    assert np.array_equal(merged, whole)
    assert (empty > 0) == (ranks == 24)  # more ranks than rows of the smallest parameters


def test_the_schema_names_full_shapes_and_tied_embeddings_once() -> None:
    schema, _, _ = with_fake_ranks(2, 1, RUN)
    shapes = {spec.name: spec.shape for spec in schema.tensors}
    assert shapes["model.embed_tokens.weight"] == (257, 16)
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == (33, 16)
    assert "lm_head.weight" in shapes
    tied = RUN.model_copy(update={"model": RUN.model.model_copy(update={"tie_embeddings": True})})
    tied_schema, _, values = with_fake_ranks(2, 1, tied)
    assert [spec.name for spec in tied_schema.tensors] == [
        spec.name for spec in schema.tensors if spec.name != "lm_head.weight"
    ]
    assert np.isfinite(values).any()


def test_initial_values_depend_on_seed_and_name_only() -> None:
    first = initial_values("a", (4, 3), 1, 0.02)
    assert torch.equal(first, initial_values("a", (4, 3), 1, 0.02))
    assert not torch.equal(first, initial_values("a", (4, 3), 2, 0.02))
    assert not torch.equal(first, initial_values("b", (4, 3), 1, 0.02))
    assert torch.equal(initial_values("norm", (5,), 1, 0.02), torch.ones(5))
    assert 0.019 < initial_values("w", (200, 200), 1, 0.02).std().item() < 0.021


def test_the_model_is_transformers_llama_with_the_configured_rotary_base(loop: InnerLoop) -> None:
    frequencies = loop.model.model.rotary_emb.inv_freq
    assert frequencies.tolist() == pytest.approx([RUN.model.rope_theta ** (-i / 4) for i in range(4)])
    assert loop.model.config.rms_norm_eps == RUN.model.norm_eps


def test_loading_an_anchor_is_exact(loop: InnerLoop) -> None:
    generator = np.random.default_rng(3)
    anchor = generator.standard_normal(loop.schema.total_values).astype(np.float32)
    loop.load(anchor)
    out = np.zeros_like(anchor)
    loop.store(out)
    assert np.array_equal(out, anchor)
    loop.store_delta(anchor, out)
    assert not out.any()


def test_training_learns_and_leaves_anchor_minus_weights_as_the_delta(loop: InnerLoop) -> None:
    anchor, weights, delta = (np.zeros(loop.schema.total_values, dtype=np.float32) for _ in range(3))
    loop.store(anchor)
    before = loop.evaluate()
    reports, report = train(loop, 40)
    assert report.steps == 40
    assert report.tokens == 40 * 6 * 24 == reports[-1].tokens
    assert reports[-1].step == 40
    assert report.grad_norm > 0
    assert loop.evaluate() < before - 1.0
    loop.store(weights)
    loop.store_delta(anchor, delta)
    assert np.array_equal(delta, anchor - weights)


def test_evaluation_does_not_change_and_repeats_exactly(loop: InnerLoop) -> None:
    assert loop.evaluate() == loop.evaluate() == pytest.approx(np.log(257), abs=0.1)


def test_a_round_that_is_stopped_early_takes_at_least_one_step(loop: InnerLoop) -> None:
    reports, report = train(loop, 50, should_stop=lambda: True)
    assert report.steps == 1
    assert report.tokens == 6 * 24
    assert len(reports) == 1


def test_micro_batches_do_not_change_the_step(data: DataMix) -> None:
    results = []
    for micro in (1, 4, 6):
        run = RUN.model_copy(update={"inner": RUN.inner.model_copy(update={"micro_batch_sequences": micro})})
        mesh = alone("cpu")
        loop = InnerLoop(run, mesh, 7, data)
        train(loop, 2)
        out = np.zeros(loop.schema.total_values, dtype=np.float32)
        loop.store(out)
        results.append(out)
        dist.destroy_process_group()
    for other in results[1:]:
        assert np.abs(other - results[0]).max() < 1e-4


def test_a_non_finite_weight_reaches_the_delta_as_it_is(loop: InnerLoop) -> None:
    anchor = np.zeros(loop.schema.total_values, dtype=np.float32)
    spoilt = anchor.copy()
    spoilt[[3, 1000]] = np.nan, np.inf
    loop.load(spoilt)
    delta = np.zeros_like(anchor)
    loop.store_delta(anchor, delta)
    assert np.isnan(delta[3])
    assert delta[1000] == -np.inf
    assert np.isfinite(np.delete(delta, [3, 1000])).all()


def test_bfloat16_compute_keeps_float32_weights(data: DataMix) -> None:
    run = RUN.model_copy(update={"inner": RUN.inner.model_copy(update={"compute_dtype": "bfloat16"})})
    mesh = alone("cpu")
    try:
        loop = InnerLoop(run, mesh, 7, data)
        _, report = train(loop, 2)
        assert np.isfinite(report.loss)
        assert {spec.dtype for spec in loop.schema.tensors} == {"float32"}
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(("batch", "micro", "ranks"), [(8, 2, 1), (8, 3, 2), (7, 2, 3), (2, 1, 4), (1, 8, 2)])
def test_micro_batches_give_every_sequence_once_and_equal_counts(batch: int, micro: int, ranks: int) -> None:
    plans = [micro_batches(100, batch, micro, ranks, rank) for rank in range(ranks)]
    assert len({len(plan) for plan in plans}) == 1
    real = [index for plan in plans for part in plan if part.weight for index in part.indices]
    assert sorted(real) == list(range(100, 100 + batch))
    assert sum(part.weight for plan in plans for part in plan) == pytest.approx(1.0)
    assert all(0 < len(part.indices) <= micro for plan in plans for part in plan)


def test_faults_are_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("P2P_DILOCO_FAULT", raising=False)
    assert Faults.from_environment().points == ()
    monkeypatch.setenv("P2P_DILOCO_FAULT", "nan_delta:3,crash:4,crash_always:6,inf_delta:5")
    monkeypatch.setenv("P2P_DILOCO_STARTS", "2")
    faults = Faults.from_environment()
    assert np.isnan(faults.spoils(3))
    assert faults.spoils(5) == np.inf
    assert faults.spoils(4) is None
    assert not faults.crashes(4)  # a crash strikes in the first start only
    assert faults.crashes(6)
    monkeypatch.setenv("P2P_DILOCO_FAULT", "explode:1")
    with pytest.raises(ConfigError, match="explode:1"):
        Faults.from_environment()


def test_weights_of_another_dtype_are_widened_for_the_delta(data: DataMix) -> None:
    run = RUN.model_copy(update={"model": RUN.model.model_copy(update={"dtype": "bfloat16"})})
    mesh = alone("cpu")
    try:
        model = build_sharded(run, mesh, 7)
        schema = schema_of(model)
        shards = shards_of(model, schema, mesh)
        anchor = np.zeros(schema.total_values, dtype=np.float32)
        store_weights(shards, anchor)
        delta = np.full_like(anchor, 9)
        store_delta(shards, anchor, delta)
    finally:
        dist.destroy_process_group()
    assert {spec.dtype for spec in schema.tensors} == {"bfloat16"}
    assert not delta.any()
