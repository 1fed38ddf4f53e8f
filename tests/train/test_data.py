import json
from pathlib import Path

import numpy as np
import pytest

from p2p_diloco.config import DataConfig, SourceConfig
from p2p_diloco.errors import DataError
from p2p_diloco.train.data import Corpus, DataMix, is_held_out


def folder_mix(root: Path, seq_len: int = 8, **data: object) -> DataMix:
    config = DataConfig(sources=(SourceConfig(name="books", kind="folder"),), **data)  # type: ignore[arg-type]
    return DataMix(config, {"books": root}, seq_len)


def text_of(row: np.ndarray) -> bytes:
    return bytes(row.astype(np.uint8))


def test_the_standard_library_gives_python_source_as_bytes() -> None:
    mix = DataMix(DataConfig(), {}, 256)
    tokens = mix.training_tokens(b"key", range(32))
    assert tokens.shape == (32, 257)
    assert tokens.dtype == np.int64
    assert tokens.min() >= 0
    assert tokens.max() <= 255
    text = b"".join(text_of(row) for row in tokens)
    assert b"self" in text
    assert b"\n    " in text


def test_equal_keys_give_equal_sequences_and_other_keys_give_others() -> None:
    mix, again = DataMix(DataConfig(), {}, 64), DataMix(DataConfig(), {}, 64)
    tokens = mix.training_tokens(b"a" * 32, [0, 1, 500])
    assert np.array_equal(tokens, again.training_tokens(b"a" * 32, [0, 1, 500]))
    assert np.array_equal(tokens[2:], mix.training_tokens(b"a" * 32, [500]))
    assert not np.array_equal(tokens, mix.training_tokens(b"b" * 32, [0, 1, 500]))
    assert not np.array_equal(tokens[0], tokens[1])


def test_held_out_sequences_are_fixed_and_apart_from_the_training_files(tmp_path: Path) -> None:
    names = [f"file{number}.txt" for number in range(40)]
    for name in names:
        letter = b"h" if is_held_out(name, 0.2) else b"t"
        (tmp_path / name).write_bytes(letter * 100)
    mix = folder_mix(tmp_path, holdout_fraction=0.2)
    assert set(np.unique(mix.training_tokens(b"k", range(200)))) == {ord("t")}
    assert set(np.unique(mix.held_out_tokens(range(50)))) == {ord("h")}


def test_the_share_of_held_out_names_is_about_the_fraction() -> None:
    held_out = sum(is_held_out(f"a/{number}.py", 0.1) for number in range(5000))
    assert 400 < held_out < 600


def test_a_single_file_holds_out_its_end(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a" * 900 + b"b" * 100)
    mix = folder_mix(tmp_path, holdout_fraction=0.1)
    assert set(np.unique(mix.training_tokens(b"k", range(100)))) == {ord("a")}
    assert set(np.unique(mix.held_out_tokens(range(20)))) == {ord("b")}


def test_a_window_reads_across_documents_and_skips_empty_ones(tmp_path: Path) -> None:
    for name, text in (("a", b"0123"), ("b", b"4"), ("c", b"56789")):
        (tmp_path / f"{name}.txt").write_bytes(text)
    parts = [(tmp_path / "a.txt", 0, 4), (tmp_path / "a.txt", 2, 2), (tmp_path / "b.txt", 0, 1)]
    corpus = Corpus([*parts, (tmp_path / "c.txt", 0, 5)])
    everything = b"0123456789"
    for position in range(10):
        for length in range(10 - position):
            assert corpus.window(position, length) == everything[position : position + length]
    with pytest.raises(DataError, match="outside"):
        corpus.window(8, 3)


def test_jsonl_gives_the_text_fields(tmp_path: Path) -> None:
    lines = [json.dumps({"text": f"line {number}: ü", "id": number}) for number in range(500)]
    (tmp_path / "data.jsonl").write_text("\n".join(lines) + "\n\n", encoding="utf-8")
    mix = folder_mix(tmp_path, seq_len=40)
    text = b"".join(text_of(row) for row in mix.training_tokens(b"k", range(50)))
    assert b"line 1" in text
    assert b'"id"' not in text


@pytest.mark.parametrize(("line", "reason"), [("{", "not JSON"), ('{"body": "x"}', 'no "text"'), ("3", "no")])
def test_a_bad_jsonl_line_is_named(tmp_path: Path, line: str, reason: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "fine"}\n' + line + "\n")
    with pytest.raises(DataError, match=f"data.jsonl, line 2: {reason}"):
        folder_mix(tmp_path)


def test_sources_are_mixed_by_weight(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.txt").write_bytes(name.encode() * 1000)
    sources = tuple(
        SourceConfig(name=name, kind="folder", weight=weight) for name, weight in (("a", 3.0), ("b", 1.0))
    )
    mix = DataMix(DataConfig(sources=sources), {"a": tmp_path / "a", "b": tmp_path / "b"}, 8)
    first = mix.training_tokens(b"k", range(2000))[:, 0]
    assert 0.70 < np.mean(first == ord("a")) < 0.80
    assert set(np.unique(first)) == {ord("a"), ord("b")}


def test_missing_and_empty_sources_are_named(tmp_path: Path) -> None:
    config = DataConfig(sources=(SourceConfig(name="books", kind="folder"),))
    with pytest.raises(DataError, match=r"peer\.data_paths\.books"):
        DataMix(config, {}, 8)
    with pytest.raises(DataError, match="is not a folder"):
        DataMix(config, {"books": tmp_path / "nowhere"}, 8)
    (tmp_path / "image.png").write_bytes(b"x" * 1000)
    with pytest.raises(DataError, match="books: no"):
        DataMix(config, {"books": tmp_path}, 8)
    (tmp_path / "short.txt").write_bytes(b"four")
    with pytest.raises(DataError, match="less than one sequence of 9"):
        DataMix(config, {"books": tmp_path}, 8)


def test_a_file_that_shrinks_under_the_trainer_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "one.txt").write_bytes(b"a" * 1000)
    mix = folder_mix(tmp_path)
    (tmp_path / "one.txt").write_bytes(b"")
    with pytest.raises(DataError, match="changed"):
        mix.training_tokens(b"k", [0])
