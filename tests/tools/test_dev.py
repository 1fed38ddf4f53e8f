"""tools/dev.py: one installation per pyproject and Python, and exit statuses passed through."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "tools" / "dev.py"
IS_NOT_SAME = "sys.exit(tuple("


def load() -> ModuleType:
    spec = importlib.util.spec_from_file_location("dev_tool", SOURCE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


dev = load()


class Recorder:
    """Stands for pip: notes each command and answers with the status that was asked for."""

    def __init__(self, statuses: dict[str, int] | None = None) -> None:
        self.commands: list[list[str]] = []
        self.statuses = statuses or {}

    def __call__(self, command: list[str], root: Path) -> int:
        if any(IS_NOT_SAME in part for part in command):
            return self.statuses.get("other python", 0)
        self.commands.append(command)
        return self.statuses.get(command[-1], 0)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project folder; making its environment is replaced by making the file that marks one."""
    (tmp_path / "pyproject.toml").write_text("[project]\nname = 'x'\n")

    class Builder:
        def __init__(self, **options: object) -> None: ...

        def create(self, env: Path) -> None:
            python = dev.python_of(env)
            python.parent.mkdir(parents=True)
            python.write_text("")

    monkeypatch.setattr(dev.venv, "EnvBuilder", Builder)
    return tmp_path


def test_setup_installs_torch_first_then_the_project_and_only_once(project: Path) -> None:
    pip = Recorder()
    assert dev.set_up(project, pip) == 0
    assert [command[-1] for command in pip.commands] == [dev.TORCH, ".[dev]"]
    assert dev.set_up(project, pip) == 0
    assert len(pip.commands) == 2


def test_a_changed_pyproject_is_installed_again_in_the_same_environment(project: Path) -> None:
    dev.set_up(project, Recorder())
    kept = dev.environment(project) / "kept"
    kept.write_text("")
    (project / "pyproject.toml").write_text("[project]\nname = 'y'\n")
    pip = Recorder()
    assert dev.set_up(project, pip) == 0
    assert len(pip.commands) == 2
    assert kept.exists()


def test_an_environment_of_another_python_is_made_anew(project: Path) -> None:
    dev.set_up(project, Recorder())
    kept = dev.environment(project) / "kept"
    kept.write_text("")
    (dev.environment(project) / "installed").write_text("of another python")
    assert dev.set_up(project, Recorder({"other python": 1})) == 0
    assert not kept.exists()


def test_where_the_pinned_torch_is_not_offered_the_range_decides(project: Path) -> None:
    pip = Recorder({dev.TORCH: 1})
    assert dev.set_up(project, pip) == 0
    assert pip.commands[-1][-1] == ".[dev]"


def test_a_failed_installation_is_reported_and_tried_again_next_time(project: Path) -> None:
    assert dev.set_up(project, Recorder({".[dev]": 3})) == 3
    pip = Recorder()
    assert dev.set_up(project, pip) == 0
    assert len(pip.commands) == 2


@pytest.mark.parametrize("version", [(3, 10, 14), (3, 14, 0), (2, 7, 18)])
def test_an_unfit_python_is_refused_with_its_version(version: tuple[int, ...]) -> None:
    assert ".".join(map(str, version)) in dev.version_problem(version)


@pytest.mark.parametrize("version", [(3, 11, 0), (3, 12, 9), (3, 13, 1)])
def test_a_fit_python_is_taken(version: tuple[int, ...]) -> None:
    assert dev.version_problem(version) == ""


def test_test_passes_its_arguments_on_and_lint_checks_style_and_types() -> None:
    (command,) = dev.commands_of("test", Path("py"), ["-k", "ring", "tests/proto"])
    assert command == ["py", "-m", "pytest", "-k", "ring", "tests/proto"]
    words = [" ".join(command[2:4]) for command in dev.commands_of("lint", Path("py"), [])]
    assert words == ["ruff check", "ruff format", "mypy --strict"]
    assert dev.commands_of("setup", Path("py"), []) == []


def test_the_first_failing_command_decides_the_exit_status(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    ran: list[str] = []

    def call(command: list[str], root: Path) -> int:
        ran.append(command[2])
        return 7

    monkeypatch.setattr(dev, "set_up", lambda root: 0)
    monkeypatch.setattr(dev, "call", call)
    assert dev.main(["lint"]) == 7
    assert ran == ["ruff"]


def test_a_command_killed_by_a_signal_ends_as_in_a_shell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "set_up", lambda root: 0)
    monkeypatch.setattr(dev, "call", lambda command, root: -9)
    assert dev.main(["test"]) == 137


def test_nothing_runs_after_a_failed_setup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dev, "set_up", lambda root: 5)
    monkeypatch.setattr(dev, "call", lambda command, root: pytest.fail("must not run"))
    assert dev.main(["test"]) == 5


def test_pip_output_is_shown_only_on_failure(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    program = "import sys; print('words'); sys.exit(int(sys.argv[1]))"
    assert dev.run_quietly([sys.executable, "-c", program, "0"], tmp_path) == 0
    assert "words" not in "".join(capfd.readouterr())
    assert dev.run_quietly([sys.executable, "-c", program, "4"], tmp_path) == 4
    assert "words" in "".join(capfd.readouterr())


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["dance"], 2, "unknown task dance"),
        ([], 2, "tools/dev.py setup"),
        (["--help"], 0, "tools/dev.py lint"),
    ],
)
def test_a_wrong_task_is_refused_from_any_folder(
    tmp_path: Path, arguments: list[str], status: int, words: str
) -> None:
    done = subprocess.run(
        [sys.executable, str(SOURCE), *arguments], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == status
    assert words in done.stdout


def test_the_check_script_lints_then_tests_and_stops_at_the_first_failure(tmp_path: Path) -> None:
    script = SOURCE.parents[1] / ".ci" / "run"
    assert os.access(script, os.X_OK)
    clone = tmp_path / "clone"
    for part in (clone / ".ci", clone / "tools", tmp_path / "bin"):
        part.mkdir(parents=True)
    (clone / ".ci" / "run").write_text(script.read_text())
    fake = tmp_path / "bin" / "python3"
    fake.write_text('#!/bin/sh\necho "$@" from "$(basename "$PWD")"\n[ "$2" != "$FAIL" ] || exit 9\n')
    fake.chmod(0o755)

    def run(fail: str) -> tuple[int, list[str]]:
        path = f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}"
        environment = {**os.environ, "PATH": path, "FAIL": fail, "CI": "true"}
        done = subprocess.run(
            ["bash", str(clone / ".ci" / "run")],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            stdin=subprocess.DEVNULL,
        )
        return done.returncode, done.stdout.splitlines()

    both = ["tools/dev.py lint from clone", "tools/dev.py test from clone"]
    assert run("nothing") == (0, both)
    assert run("lint") == (9, both[:1])
    assert run("test") == (9, both)
