"""The error tree: everyone raised on purpose says who is to blame and what happens next."""

from __future__ import annotations

import inspect
from typing import get_args

import pytest

from p2p_diloco import errors
from p2p_diloco.errors import IllegalTransitionError, P2PDilocoError, RefusedByPeer

ALL = sorted(
    (
        kind
        for _, kind in inspect.getmembers(errors, inspect.isclass)
        if issubclass(kind, Exception) and kind.__module__ == errors.__name__
    ),
    key=lambda kind: kind.__name__,
)


def test_the_tree_was_found() -> None:
    assert len(ALL) > 10


@pytest.mark.parametrize("kind", ALL)
def test_every_error_has_a_base_a_blame_a_next_step_and_a_docstring(kind: type[P2PDilocoError]) -> None:
    assert issubclass(kind, P2PDilocoError)
    assert kind.blame in get_args(errors.Blame)
    assert kind.next_step
    assert kind.__dict__.get("__doc__")


@pytest.mark.parametrize(
    ("base", "blame"),
    [
        (errors.UserError, "user"),
        (errors.RemoteError, "remote"),
        (errors.NetworkError, "network"),
        (errors.InternalError, "ours"),
    ],
)
def test_a_branch_blames_one_party(base: type[P2PDilocoError], blame: str) -> None:
    assert {kind.blame for kind in ALL if issubclass(kind, base)} == {blame}


def test_no_error_belongs_to_two_branches() -> None:
    branches = (errors.UserError, errors.RemoteError, errors.NetworkError, errors.InternalError)
    assert [kind for kind in ALL if sum(issubclass(kind, branch) for branch in branches) > 1] == []


def test_a_refusal_keeps_its_code_text_and_schema() -> None:
    error = RefusedByPeer("schema", "the parameters differ", b"s")
    assert (error.code, error.text, error.schema) == ("schema", "the parameters differ", b"s")
    assert str(error) == "refused (schema): the parameters differ"


def test_an_illegal_move_tells_its_history() -> None:
    error = IllegalTransitionError("epoch", "ready", "verdict", ["idle -> ready on begin"])
    assert "no move from ready on verdict" in str(error)
    assert "idle -> ready on begin" in str(error)
    assert "(none)" in str(IllegalTransitionError("epoch", "ready", "verdict", []))
