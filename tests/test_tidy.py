"""The house rules that a reader would otherwise have to check by eye, and proof that each check can fail."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel, Field

from p2p_diloco.config import PeerConfig, RunConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "p2p_diloco"
LINES_AT_MOST = 650

Check = Callable[[ast.Module], list[str]]

# Who may import what of our own (DESIGN 4). A key stands for the folder or module of that name; a value
# for modules and everything inside them. What is not listed (node, peer: the composition) may import all.
LAYERS: dict[str, tuple[str, ...]] = {
    "config": ("errors",),
    "errors": (),
    "identity": ("errors", "wire"),
    "failpoints": ("errors",),
    "disk": ("errors", "wire"),
    "flags": ("config", "errors"),
    "wire": ("config", "errors", "identity", "wire"),
    "proto": ("config", "errors", "identity", "wire", "proto", "numerics.layout", "numerics.digest"),
    "numerics": ("config", "errors", "numerics"),
    "bridge": ("bridge", "numerics", "config", "errors"),
    "train": ("train", "bridge", "numerics", "config", "errors"),
    "net": (
        "net",
        "wire",
        "proto",
        "numerics",
        "identity",
        "config",
        "errors",
        "bridge",
        "disk",
        "failpoints",
    ),
    "observe": ("observe", "config", "errors", "identity", "bridge.messages"),
    "sim": ("sim", "proto", "numerics", "wire", "identity", "config", "errors"),
}
# Third-party packages that a layer may use; layers that are not listed may use any of the project's.
OUTSIDE: dict[str, frozenset[str]] = {
    "numerics": frozenset({"numpy", "blake3", "msgpack", "torch"}),
    "wire": frozenset({"msgpack", "blake3", "numpy"}),
    "proto": frozenset({"blake3"}),
    "sim": frozenset({"numpy", "blake3", "msgpack"}),
    "config": frozenset({"pydantic"}),
    "errors": frozenset(),
    "failpoints": frozenset(),
    "disk": frozenset(),
}
# A machine takes the time, randomness and bytes as arguments: these would let the world in by the back door.
_IMPURE_NAMES = (
    "asyncio concurrent datetime io logging multiprocessing numpy os pathlib queue random secrets select "
    "selectors shutil signal socket ssl subprocess sys tempfile threading time torch uuid"
)
IMPURE = frozenset(_IMPURE_NAMES.split())
_SET_METHODS = frozenset({"union", "intersection", "difference", "symmetric_difference"})
_ORDER_FREE = frozenset({"sorted", "len", "sum", "min", "max", "any", "all", "set", "frozenset"})
# Written in two pieces so that this file does not hold what it looks for.
_LEFTOVERS = re.compile("|".join(("TO" + "DO", "FIX" + "ME", "XX" + "X", "NotImplemented" + "Error")))
_PRIVATE_PATHS = re.compile(r"(?<![\w./:}-])/(?:wo" + r"rk|ho" + r"me|Us" + r"ers|ro" + r"ot|t" + r"mp)/")


# --- reading ---


def sources(folder: Path = PACKAGE) -> list[Path]:
    return sorted(path for path in folder.rglob("*.py") if "__pycache__" not in path.parts)


def layer_of(path: Path) -> str:
    return path.relative_to(PACKAGE).parts[0].removesuffix(".py")


def in_layer(layer: str) -> list[Path]:
    return [path for path in sources() if layer_of(path) == layer]


def parse(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"), str(path))


def annotation_only(tree: ast.Module) -> set[ast.AST]:
    """Nodes under ``if TYPE_CHECKING:``, which do not exist when the program runs."""
    found: set[ast.AST] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.body:
                found.update(ast.walk(child))
    return found


def imports(tree: ast.Module, with_annotations: bool = True) -> Iterator[tuple[int, str]]:
    """Line and full dotted name of everything imported; ``from a import b`` gives ``a.b``."""
    skipped = set() if with_annotations else annotation_only(tree)
    for node in ast.walk(tree):
        if node in skipped:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
        elif isinstance(node, ast.ImportFrom):
            for alias in node.names:
                yield node.lineno, f"{'.' * node.level}{node.module or ''}.{alias.name}"


# --- the checks: each returns lines of complaint ---


def layering(layer: str) -> Check:
    def check(tree: ast.Module) -> list[str]:
        allowed, outside = LAYERS.get(layer), OUTSIDE.get(layer)
        found: list[str] = []
        for line, name in imports(tree):
            top, _, rest = name.partition(".")
            if not top:
                found.append(f"line {line}: relative import {name}")
            elif top == "p2p_diloco":
                fits = allowed is None or any(rest == one or rest.startswith(f"{one}.") for one in allowed)
                if not fits and rest != "__version__":
                    found.append(f"line {line}: {layer} may not import {name}")
            elif top not in sys.stdlib_module_names and outside is not None and top not in outside:
                found.append(f"line {line}: {layer} may not import {name}")
        return found

    return check


def purity(tree: ast.Module) -> list[str]:
    found = [
        f"line {line}: {name} is not pure"
        for line, name in imports(tree, with_annotations=False)
        if name.partition(".")[0] in IMPURE
    ]
    for node in ast.walk(tree):
        if isinstance(node, (ast.AsyncFunctionDef, ast.Await, ast.AsyncFor, ast.AsyncWith)):
            found.append(f"line {node.lineno}: async code in a machine")
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Name)):
            continue
        if node.func.id in ("open", "print", "input", "hash", "id", "__import__"):
            found.append(f"line {node.lineno}: {node.func.id}() is not pure")
    return found


def is_set(node: ast.expr) -> bool:
    """Whether an expression is plainly a set, whose order differs from process to process."""
    if isinstance(node, (ast.Set, ast.SetComp)):
        return True
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id in ("set", "frozenset")
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        return node.func.attr in _SET_METHODS
    if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitOr, ast.BitAnd, ast.Sub, ast.BitXor)):
        return is_set(node.left) or is_set(node.right)
    return False


def ordered_iteration(tree: ast.Module) -> list[str]:
    """Best effort: sets made on the spot, and names or attributes that are declared or made as sets."""
    attributes = {name for name in set_names(tree) if "." in name}
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):  # a dataclass declares its attributes in the body
            for part in node.body:
                if isinstance(part, ast.AnnAssign) and is_set_type(part.annotation):
                    attributes.add(f"self.{ast.unparse(part.target)}")
    found = set_order_used(tree, attributes)
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            found += set_order_used(node, set_names(node))
    return sorted(set(found))


def set_order_used(scope: ast.AST, names: set[str]) -> list[str]:
    """Where the order of a set, or of something named in ``names``, decides what happens."""
    order_free: set[ast.AST] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _ORDER_FREE:
            for argument in node.args:
                if isinstance(argument, (ast.GeneratorExp, ast.SetComp)):
                    order_free.update(argument.generators)
        if isinstance(node, ast.SetComp):
            order_free.update(node.generators)
    found: list[str] = []
    for node in ast.walk(scope):
        looped = node.iter if isinstance(node, (ast.For, ast.comprehension)) else None
        if looped is not None and node not in order_free and (is_set(looped) or ast.unparse(looped) in names):
            found.append(f"line {looped.lineno}: iterates over a set: {ast.unparse(looped)}")
        if (
            isinstance(node, ast.Call)
            and isinstance(node.func, ast.Name)
            and node.func.id in ("list", "tuple", "next", "iter", "enumerate")
            and node.args
            and (is_set(node.args[0]) or ast.unparse(node.args[0]) in names)
        ):
            found.append(f"line {node.lineno}: order of a set: {ast.unparse(node)}")
    return found


def set_names(scope: ast.AST) -> set[str]:
    """Names and attributes (``self.x``) that are annotated as sets, or made as sets, within ``scope``."""
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, ast.AnnAssign) and is_set_type(node.annotation):
            names.add(ast.unparse(node.target))
        if isinstance(node, ast.arg) and node.annotation is not None and is_set_type(node.annotation):
            names.add(node.arg)
        if isinstance(node, ast.Assign) and is_set(node.value):
            names.update(
                target.id if isinstance(target, ast.Name) else ast.unparse(target)
                for target in node.targets
                if isinstance(target, (ast.Name, ast.Attribute))
            )
    return names


def is_set_type(annotation: ast.expr) -> bool:
    base = annotation.value if isinstance(annotation, ast.Subscript) else annotation
    return isinstance(base, ast.Name) and base.id in ("set", "frozenset", "AbstractSet")


def unsafe_calls(tree: ast.Module) -> list[str]:
    """Loaders that run what they read."""
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}
    found = [
        f"line {line}: import of {name}"
        for line, name in imports(tree)
        if name.partition(".")[0] in banned or name == "torch.load"
    ]
    for node in ast.walk(tree):
        if isinstance(node, ast.Call):
            called = ast.unparse(node.func)
            if called in ("eval", "exec", "torch.load", "__import__", "os.system"):
                found.append(f"line {node.lineno}: call of {called}")
            if any(word.arg == "shell" and ast.unparse(word.value) != "False" for word in node.keywords):
                found.append(f"line {node.lineno}: a command through the shell")
            if any(
                word.arg == "allow_pickle" and ast.unparse(word.value) != "False" for word in node.keywords
            ):
                found.append(f"line {node.lineno}: allow_pickle")
    return found


def swallowed_errors(tree: ast.Module) -> list[str]:
    found: list[str] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("suppress", "contextlib.suppress"):
            broad = [kind for kind in map(ast.unparse, node.args) if kind in ("Exception", "BaseException")]
            found += [f"line {node.lineno}: {kind} is suppressed" for kind in broad]
        if not isinstance(node, ast.ExceptHandler):
            continue
        if node.type is None:
            found.append(f"line {node.lineno}: bare except")
            continue
        empty = all(
            isinstance(part, ast.Pass)
            or (isinstance(part, ast.Expr) and isinstance(part.value, ast.Constant))
            for part in node.body
        )
        skips = all(isinstance(part, (ast.Continue, ast.Break)) for part in node.body)
        if skips and ast.unparse(node.type) in ("Exception", "BaseException"):
            found.append(f"line {node.lineno}: {ast.unparse(node.type)} is skipped over")
        # These two end waits rather than tell of errors; a comment in the code says so each time.
        if empty and ast.unparse(node.type) not in ("TimeoutError", "asyncio.CancelledError"):
            found.append(f"line {node.lineno}: {ast.unparse(node.type)} is swallowed")
    return found


def unsourced_defaults(model: type[BaseModel], where: str = "") -> list[str]:
    """Config values whose description does not say where the default comes from."""
    found: list[str] = []
    for name, info in model.model_fields.items():
        inner = info.annotation
        nested = [
            kind
            for kind in (inner, *getattr(inner, "__args__", ()))
            if isinstance(kind, type) and issubclass(kind, BaseModel)
        ]
        for kind in nested:
            found += unsourced_defaults(kind, f"{where}{name}.")
        if inner in nested:
            continue
        if not re.search(r"\b(Sources?|Guess)\b", info.description or ""):
            found.append(f"{where}{name}")
    return found


def leftovers(text: str) -> list[str]:
    return [
        f"line {number}: {match[0]}"
        for number, line in enumerate(text.splitlines(), 1)
        for match in _LEFTOVERS.finditer(line)
    ]


def private_paths(text: str) -> list[str]:
    return [
        f"line {number}: {line.strip()[:80]}"
        for number, line in enumerate(text.splitlines(), 1)
        if _PRIVATE_PATHS.search(line)
    ]


def too_long(text: str) -> list[str]:
    count = len(text.splitlines())
    return [f"{count} lines, at most {LINES_AT_MOST}"] if count > LINES_AT_MOST else []


def complaints(paths: list[Path], check: Check) -> list[str]:
    return [f"{path.relative_to(ROOT)}: {line}" for path in paths for line in check(parse(path))]


def text_files() -> list[Path]:
    """Everything that a person wrote, generated folders left out."""
    skipped = {".git", ".venv", "__pycache__", ".mypy_cache", ".ruff_cache", ".pytest_cache", "runs", "build"}
    kinds = {".py", ".md", ".toml", ".sh", ".yml", ".yaml", ".txt", ".cfg", ".json", ""}
    found: list[Path] = []
    for top in sorted(ROOT.iterdir()):
        if top.name in skipped or top.name.endswith(".egg-info"):
            continue
        below = sorted(top.rglob("*")) if top.is_dir() else [top]
        found += [
            path
            for path in below
            if path.is_file() and path.suffix in kinds and not skipped.intersection(path.parts)
        ]
    return found


def complaints_in_texts(check: Callable[[str], list[str]], paths: list[Path]) -> list[str]:
    return [
        f"{path.relative_to(ROOT)}: {line}"
        for path in paths
        for line in check(path.read_text(encoding="utf-8", errors="replace"))
    ]


# --- the house keeps its rules ---


def test_no_layer_imports_what_it_must_not() -> None:
    found = [line for path in sources() for line in complaints([path], layering(layer_of(path)))]
    assert found == []


def test_every_layer_in_the_table_exists() -> None:
    assert {layer for layer in LAYERS if not in_layer(layer)} == set()


def test_the_protocol_machines_are_pure() -> None:
    assert complaints(in_layer("proto"), purity) == []


def test_the_protocol_machines_never_depend_on_the_order_of_a_set() -> None:
    assert complaints(in_layer("proto"), ordered_iteration) == []


def test_nothing_loads_what_could_run_code() -> None:
    assert complaints(sources(), unsafe_calls) == []


def test_no_error_is_swallowed() -> None:
    assert complaints([*sources(), *sources(ROOT / "tools")], swallowed_errors) == []


@pytest.mark.parametrize("model", [RunConfig, PeerConfig])
def test_every_default_has_a_source_or_is_called_a_guess(model: type[BaseModel]) -> None:
    assert unsourced_defaults(model) == []


def test_no_module_is_too_long() -> None:
    assert complaints_in_texts(too_long, sources()) == []


def test_no_leftover_markers_in_the_code() -> None:
    found = complaints_in_texts(leftovers, [path for path in text_files() if path.suffix == ".py"])
    assert found == []


def test_no_path_of_somebodys_machine_is_written_down() -> None:
    assert complaints_in_texts(private_paths, text_files()) == []


# --- each check can fail ---


@pytest.mark.parametrize(
    ("layer", "snippet"),
    [
        ("numerics", "from p2p_diloco.proto import ring"),
        ("numerics", "import scipy"),
        ("proto", "from p2p_diloco.numerics.int8 import Codec"),
        ("proto", "from p2p_diloco.net.links import LinkManager"),
        ("proto", "import numpy as np"),
        ("train", "from p2p_diloco import proto"),
        ("train", "def late():\n    import p2p_diloco.net.links"),
        ("observe", "from p2p_diloco.proto.peer import PeerMachine"),
        ("sim", "from p2p_diloco.net.driver import Driver"),
        ("wire", "from ..proto import ring"),
        ("errors", "import rich"),
    ],
)
def test_the_layer_check_sees_a_forbidden_import(layer: str, snippet: str) -> None:
    assert layering(layer)(ast.parse(snippet))


def test_the_layer_check_lets_allowed_imports_pass() -> None:
    good = "import hashlib\nfrom p2p_diloco.numerics.digest import merkle_root\nfrom blake3 import blake3"
    assert layering("proto")(ast.parse(good)) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import asyncio",
        "from time import monotonic",
        "import random",
        "from random import Random",
        "def late():\n    import socket",
        "import os.path",
        "async def run(): ...",
        "x = open('f')",
        "x = hash('different in each process')",
    ],
)
def test_the_purity_check_sees_the_world_come_in(snippet: str) -> None:
    assert purity(ast.parse(snippet))


def test_the_purity_check_lets_a_random_generator_be_passed_in() -> None:
    text = (
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from random import Random\n"
        "def f(r: 'Random'): return r.random()"
    )
    assert purity(ast.parse(text)) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "for x in {1, 2}: f(x)",
        "for x in set(y): f(x)",
        "z = [x for x in frozenset(y)]",
        "z = {x: 1 for x in set(a) & b}",
        "for x in a.union(b): f(x)",
        "z = list({x for x in y})",
        "class A:\n    def __init__(self):\n        self.s: set[int] = set()\n"
        "    def f(self):\n        for x in self.s: g(x)",
        "class A:\n    def __init__(self):\n        self.s = set()\n"
        "    def f(self):\n        return tuple(self.s)",
        "class A:\n    s: set[int]\n    def f(self):\n        return [x for x in self.s]",
        "def f(y):\n    s = {x for x in y}\n    for x in s: g(x)",
        "def f(s: frozenset[int]):\n    return [x for x in s]",
    ],
)
def test_the_order_check_sees_a_set_iterated(snippet: str) -> None:
    assert ordered_iteration(ast.parse(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "for x in sorted({1, 2}): f(x)",
        "n = sum(1 for x in set(y))",
        "for x in (1, 2): f(x)",
        "n = len({1})",
        "def f(s: set[int]): ...\ndef g(s: list[int]):\n    for x in s: h(x)",
    ],
)
def test_the_order_check_lets_ordered_iteration_pass(snippet: str) -> None:
    assert ordered_iteration(ast.parse(snippet)) == []


@pytest.mark.parametrize(
    "snippet",
    [
        "import pickle",
        "from marshal import loads",
        "import torch\nx = torch.load('f')",
        "from torch import load",
        "eval('1')",
        "exec('1')",
        "subprocess.run('x', shell=True)",
        "np.load(f, allow_pickle=True)",
    ],
)
def test_the_loader_check_sees_unsafe_calls(snippet: str) -> None:
    assert unsafe_calls(ast.parse(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "try:\n    f()\nexcept:\n    raise",
        "try:\n    f()\nexcept ValueError:\n    pass",
        "try:\n    f()\nexcept (OSError, ValueError):\n    ...",
        "try:\n    f()\nexcept Exception as e:\n    'never mind'",
        "for x in y:\n    try:\n        f()\n    except Exception:\n        continue",
        "with contextlib.suppress(Exception):\n    f()",
        "with suppress(ValueError, BaseException):\n    f()",
    ],
)
def test_the_error_check_sees_a_swallowed_error(snippet: str) -> None:
    assert swallowed_errors(ast.parse(snippet))


@pytest.mark.parametrize(
    "snippet",
    [
        "try:\n    f()\nexcept ValueError as error:\n    logger.debug('skipped: %s', error)",
        "try:\n    f()\nexcept Exception:\n    close()\n    raise",
        "with contextlib.suppress(ProcessLookupError):\n    f()",
    ],
)
def test_the_error_check_lets_handled_errors_pass(snippet: str) -> None:
    assert swallowed_errors(ast.parse(snippet)) == []


def test_the_source_check_sees_an_unsourced_default_at_any_depth() -> None:
    class Inner(BaseModel):
        good: int = Field(1, description="Guess.")
        bad: int = Field(1, description="A number out of the air.")

    class Outer(BaseModel):
        inner: Inner = Field(default_factory=Inner, description="Nested.")
        rows: tuple[Inner, ...] = Field((), description="Source: ours.")
        bare: int = 2

    assert unsourced_defaults(Outer) == ["inner.bad", "rows.bad", "bare"]


def test_the_text_checks_see_what_they_look_for() -> None:
    assert too_long("x\n" * (LINES_AT_MOST + 1))
    assert too_long("x\n" * LINES_AT_MOST) == []
    assert leftovers("# " + "TO" + "DO: later") == ["line 1: " + "TO" + "DO"]
    assert leftovers("raise NotImplemented" + "Error")
    assert private_paths("open('/ho" + "me/me/x')")
    assert private_paths("see /wo" + "rk/main")
    assert private_paths("https://example.org/ho" + "me/page and net/wo" + "rk/x") == []
