import math

import pytest
import torch

from p2p_diloco.config import ScheduleConfig
from p2p_diloco.train.loss import training_loss
from p2p_diloco.train.schedule import learning_rate

SCHEDULE = ScheduleConfig(warmup_steps=10, total_steps=100, decay_steps=20, min_lr_ratio=0.1)


def test_warm_up_is_linear_and_ends_at_the_peak() -> None:
    rates = [learning_rate(step, 2.0, SCHEDULE) for step in range(11)]
    assert rates[:10] == pytest.approx([0.2 * (step + 1) for step in range(10)])
    assert rates[9] == rates[10] == 2.0


def test_the_rate_is_flat_between_warm_up_and_decay() -> None:
    assert {learning_rate(step, 2.0, SCHEDULE) for step in range(10, 80)} == {2.0}


def test_decay_follows_one_minus_square_root_down_to_the_floor() -> None:
    assert learning_rate(80, 2.0, SCHEDULE) == pytest.approx(2.0)
    assert learning_rate(85, 2.0, SCHEDULE) == pytest.approx(0.2 + 1.8 * (1 - math.sqrt(0.25)))
    assert [learning_rate(step, 2.0, SCHEDULE) for step in (100, 10_000)] == pytest.approx([0.2, 0.2])


def test_a_schedule_without_warm_up_and_decay_is_constant_until_its_end() -> None:
    schedule = ScheduleConfig(warmup_steps=0, total_steps=5, decay_steps=0)
    assert [learning_rate(step, 1.0, schedule) for step in range(6)] == [1, 1, 1, 1, 1, 0]


def test_loss_equals_cross_entropy_plus_the_squared_largest_logit() -> None:
    logits = torch.randn(2, 3, 7, generator=torch.Generator().manual_seed(1), requires_grad=True)
    targets = torch.tensor([[0, 1, 2], [3, 4, 6]])
    loss, cross_entropy = training_loss(logits, targets, 0.01)
    chosen = torch.log_softmax(logits, -1).gather(-1, targets[..., None])
    assert cross_entropy.item() == pytest.approx(-chosen.mean().item(), rel=1e-6)
    expected = cross_entropy + 0.01 * (logits.amax(-1) ** 2).mean()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert loss.requires_grad
    assert not cross_entropy.requires_grad


def test_z_loss_zero_leaves_plain_cross_entropy() -> None:
    logits = torch.full((1, 4, 5), 3.0)
    loss, _ = training_loss(logits, torch.zeros((1, 4), dtype=torch.int64), 0.0)
    assert loss.item() == pytest.approx(math.log(5))


def test_bfloat16_logits_are_reduced_in_float32() -> None:
    logits = torch.randn(2, 64, 256, generator=torch.Generator().manual_seed(2)).bfloat16()
    targets = torch.zeros((2, 64), dtype=torch.int64)
    loss, _ = training_loss(logits, targets, 1e-4)
    exact, _ = training_loss(logits.double().float(), targets, 1e-4)
    assert loss.dtype == torch.float32
    assert loss.item() == exact.item()
