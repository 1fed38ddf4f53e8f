import json
from pathlib import Path

import pytest

from p2p_diloco.train.baseline import main

CONFIG = """
[run]
seed = 3
[run.model]
hidden_size = 16
intermediate_size = 32
layers = 1
heads = 2
kv_heads = 1
[run.inner]
lr = 5e-3
batch_sequences = 4
seq_len = 32
[run.schedule]
warmup_steps = 2
[run.data]
eval_sequences = 4
[peer]
device = "cpu"
"""


def test_the_baseline_learns_and_writes_its_figures(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "run.toml").write_text(CONFIG)
    out = tmp_path / "out.json"
    assert main(["--config", str(tmp_path / "run.toml"), "--steps", "60", "--json", str(out)]) == 0
    result = json.loads(out.read_text())
    assert result["steps"] == 60
    assert result["tokens"] == 60 * 4 * 32
    assert result["eval_loss_end"] < result["eval_loss_start"] - 0.5
    assert (
        f"eval loss {result['eval_loss_start']:.4f} -> {result['eval_loss_end']:.4f}"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "steps", "reason"),
    [
        ("[run]\nspeed = 3\n", "5", "unknown key run.speed"),
        (CONFIG, "0", "--steps must be at least 1"),
        (
            '[[run.data.sources]]\nname = "books"\nkind = "folder"\n[peer]\ndevice = "cpu"\n',
            "5",
            "peer.data_paths.books",
        ),
    ],
)
def test_a_mistake_is_named_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, steps: str, reason: str
) -> None:
    (tmp_path / "run.toml").write_text(text)
    assert main(["--config", str(tmp_path / "run.toml"), "--steps", steps]) == 2
    error = capsys.readouterr().err.strip()
    assert reason in error
    assert "\n" not in error
