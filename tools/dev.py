"""Sets up the project's own environment and runs a task in it. Needs only a Python of the right version.

    python3 tools/dev.py setup            make .venv and install the project
    python3 tools/dev.py lint             ruff check, ruff format --check, mypy --strict
    python3 tools/dev.py test [ARGS...]   pytest; ARGS are passed on
    python3 tools/dev.py demo [ARGS...]   a run of several peers on this machine

Each task sets up first if that is not done for this pyproject.toml and this Python. The exit status is that
of the task. (Written so that an older Python can read it far enough to say that it is too old.)
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LEAST, BELOW = (3, 11), (3, 14)
# The release that the tests were last run with; pyproject.toml's range stands where it is not offered.
TORCH = "torch==2.13.0"
TASKS = ("demo", "test", "lint", "setup")


def say(text: str) -> None:
    print(f"dev: {text}", flush=True)


def environment(root: Path) -> Path:
    return root / ".venv"


def python_of(env: Path) -> Path:
    return env / ("Scripts/python.exe" if os.name == "nt" else "bin/python")


def version_problem(version: tuple[int, ...]) -> str:
    """One line if this Python cannot be used, else an empty string."""
    if LEAST <= version[:2] < BELOW:
        return ""
    found = ".".join(str(part) for part in version)
    return f"Python 3.11, 3.12 or 3.13 is needed; this is {found}. Try: python3.12 tools/dev.py"


def stamp_of(root: Path) -> str:
    """Changes whenever an installation is out of date: the dependencies, torch's pin, Python, the folder."""
    digest = hashlib.sha256((root / "pyproject.toml").read_bytes())
    digest.update(f"{TORCH} {sys.version} {root}".encode())
    return digest.hexdigest()


def run_quietly(command: list[str], root: Path) -> int:
    """Run with output kept back, and shown only if the command fails."""
    with tempfile.TemporaryFile() as output:
        code = subprocess.run(
            command, cwd=root, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False
        ).returncode
        if code:
            output.seek(0)
            sys.stderr.write(output.read().decode(errors="replace"))
            sys.stderr.flush()
    return code


def install(root: Path, python: Path, run: Callable[[list[str], Path], int]) -> int:
    """Torch first, so that its pin decides; then the project with its tools, editable."""
    pip = [str(python), "-m", "pip", "install", "--disable-pip-version-check", "--no-input", "--quiet"]
    say(f"installing {TORCH} (large; a few minutes)")
    if run([*pip, TORCH], root):
        say(f"{TORCH} could not be installed here: taking the range in pyproject.toml instead")
    say("installing the project and its development tools")
    return run([*pip, "-e", ".[dev]"], root)


def set_up(root: Path, run: Callable[[list[str], Path], int] = run_quietly) -> int:
    """Make and fill ``.venv`` unless its stamp says that this was done. Returns 0, or pip's exit status."""
    env = environment(root)
    stamp, wanted = env / "installed", stamp_of(root)
    if stamp.is_file() and stamp.read_text() == wanted and python_of(env).exists():
        return 0
    if env.exists() and (
        not python_of(env).exists() or run([str(python_of(env)), "-c", same_python()], root)
    ):
        say("removing .venv: it belongs to another Python")
        shutil.rmtree(env)
    if not env.exists():
        say(f"making .venv with Python {sys.version.split()[0]}")
        venv.EnvBuilder(with_pip=True, symlinks=os.name != "nt").create(env)
    stamp.unlink(missing_ok=True)
    code = install(root, python_of(env), run)
    if code:
        say("the installation failed; pip's output stands above")
        return code
    stamp.write_text(wanted)
    say("installed")
    return 0


def same_python() -> str:
    """A program that fails unless it runs on the Python that we run on."""
    return f"import sys; sys.exit(tuple(sys.version_info[:3]) != {tuple(sys.version_info[:3])!r})"


def commands_of(task: str, python: Path, arguments: list[str]) -> list[list[str]]:
    """What to run, one after the other; the first failure ends it."""
    module = [str(python), "-m"]
    if task == "test":
        return [[*module, "pytest", *arguments]]
    if task == "lint":
        return [
            [*module, "ruff", "check", "."],
            [*module, "ruff", "format", "--check", "."],
            [*module, "mypy", "--strict", "-p", "p2p_diloco"],
        ]
    if task == "demo":
        return [[str(python), "tools/demo.py", *arguments]]
    return []


def call(command: list[str], root: Path) -> int:
    say(" ".join(["python", *command[1:]]))
    try:
        return subprocess.run(command, cwd=root, check=False).returncode
    except KeyboardInterrupt:
        return 130


def main(argv: list[str]) -> int:
    task, arguments = (argv[0], argv[1:]) if argv else ("", [])
    if task in ("", "-h", "--help"):
        print(__doc__)
        return 0 if task else 2
    if task not in TASKS:
        say(f"unknown task {task}; choose one of {', '.join(TASKS)}")
        return 2
    if arguments and task in ("lint", "setup"):
        say(f"{task} takes no arguments")
        return 2
    problem = version_problem(sys.version_info[:3])
    if problem:
        say(problem)
        return 2
    code = set_up(ROOT)
    for command in commands_of(task, python_of(environment(ROOT)), arguments):
        code = code or call(command, ROOT)
    return code if code >= 0 else 128 - code  # killed by a signal: what a shell would report


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
