"""Command-line flags of ``python -m p2p_diloco.peer``, made from the config models.

Each leaf of `PeerConfig` has a flag in kebab case (``--initial-peers``, ``--timeouts.stall-s``) and each
leaf of `RunConfig` one that starts with ``--run.`` (``--run.inner.steps``). A flag overrides the TOML file,
which overrides the default. Values stay text here and are judged by pydantic, so a bad value is refused in
the same words whether it comes from the file or from the command line.
"""

from __future__ import annotations

import argparse
import json
import types
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NoReturn, Union, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from p2p_diloco.config import PeerConfig, RunConfig, build_config, read_toml
from p2p_diloco.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error")

_PREFIX = {"run": "--run.", "peer": "--"}
_TITLES = {
    "run": "run config: what all peers share (a joiner leaves these out and takes them from the run)",
    "peer": "peer config: what only this machine cares about",
}


@dataclass(frozen=True)
class Parsed:
    """What the user asked for. ``run`` is None if neither ``[run]`` nor any ``--run.`` flag was given."""

    config_path: Path | None
    run: RunConfig | None
    peer: PeerConfig
    log_level: str
    plain: bool

    @property
    def founds(self) -> bool:
        """Whether this peer founds a run: it was told of no peer and of no run to join."""
        return not self.peer.initial_peers and not self.peer.run_id


@dataclass(frozen=True)
class Leaf:
    """One config value: its table ("run" or "peer"), its path in there, its flag, its pydantic field."""

    table: str
    path: tuple[str, ...]
    info: FieldInfo

    @property
    def flag(self) -> str:
        return _PREFIX[self.table] + ".".join(self.path).replace("_", "-")

    @property
    def dest(self) -> str:
        return ".".join((self.table, *self.path))


class _Parser(argparse.ArgumentParser):
    """Raises ConfigError where argparse would print its usage and exit."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message} (see --help)")


def leaves(model: type[BaseModel], table: str, path: tuple[str, ...] = ()) -> Iterator[Leaf]:
    """All values of ``model``, nested ones included, in the order of the source."""
    for name, info in model.model_fields.items():
        inner = info.annotation
        if isinstance(inner, type) and issubclass(inner, BaseModel):
            yield from leaves(inner, table, (*path, name))
        else:
            yield Leaf(table, (*path, name), info)


def build_parser() -> argparse.ArgumentParser:
    """The parser of `parse`; a wrong command line makes it raise ConfigError instead of exiting."""
    parser = _Parser(
        prog="python -m p2p_diloco.peer",
        usage="%(prog)s [--config FILE] [flags]",
        description="One peer of a run. Without --initial-peers and --run-id it founds a run; with one of "
        "them it joins. Flags override the --config file, which overrides the defaults.",
        allow_abbrev=False,
    )
    general = parser.add_argument_group("general")
    general.add_argument(
        "--config", type=Path, metavar="FILE", help="TOML file with the tables [run] and [peer]"
    )
    general.add_argument(
        "--log-level", choices=LOG_LEVELS, default="info", help="least level that is shown (default: info)"
    )
    general.add_argument(
        "--plain", action="store_true", help="single lines even on a terminal (default: a live panel there)"
    )
    for table, model in (("peer", PeerConfig), ("run", RunConfig)):
        _add_groups(parser, table, model)
    return parser


def parse(argv: Sequence[str] | None = None) -> Parsed:
    """Read the command line (``sys.argv`` if None) and the config file that it names.

    Raises ConfigError, with one line that names the flag or the key, for anything unknown or impossible;
    the process should then end with status 2. ``--help`` raises SystemExit(0), as argparse does.
    """
    chosen = vars(build_parser().parse_args(argv))
    config_path: Path | None = chosen["config"]
    tables = {"run": {}, "peer": {}} if config_path is None else read_toml(config_path)
    has_run = bool(config_path is not None and "run" in tables)
    data: dict[str, dict[str, Any]] = {"run": tables.get("run", {}), "peer": tables.get("peer", {})}
    for leaf in (*leaves(RunConfig, "run"), *leaves(PeerConfig, "peer")):
        if leaf.dest in chosen:
            has_run = has_run or leaf.table == "run"
            _put(data[leaf.table], leaf, _structure(leaf, chosen[leaf.dest]))
    return Parsed(
        config_path=config_path,
        run=build_config(RunConfig, data["run"], "run") if has_run else None,
        peer=build_config(PeerConfig, data["peer"], "peer"),
        log_level=chosen["log_level"],
        plain=chosen["plain"],
    )


def _add_groups(parser: argparse.ArgumentParser, table: str, model: type[BaseModel]) -> None:
    """One argparse group per model, so that --help reads like the config file."""
    groups: dict[tuple[str, ...], Any] = {}
    for leaf in leaves(model, table):
        section = leaf.path[:-1]
        if section not in groups:
            groups[section] = parser.add_argument_group(_group_title(table, model, section))
        options: dict[str, Any] = {
            "dest": leaf.dest,
            "default": argparse.SUPPRESS,
            "help": _help(leaf),
        }
        _, kind = _kind(leaf.info.annotation)
        if kind == "list":
            options |= {"nargs": "+", "metavar": leaf.path[-1].upper()}
        elif kind == "mapping":
            options |= {"nargs": "+", "metavar": "NAME=VALUE"}
        elif kind == "flag":
            options |= {"nargs": "?", "const": "true", "metavar": "true|false"}
        elif kind == "choice":
            options["metavar"] = "|".join(str(value) for value in get_args(leaf.info.annotation))
        else:
            options["metavar"] = kind.upper()
        groups[section].add_argument(leaf.flag, **options)


def _group_title(table: str, model: type[BaseModel], section: tuple[str, ...]) -> str:
    if not section:
        return _TITLES[table]
    current: type[BaseModel] = model
    for name in section:
        inner = current.model_fields[name].annotation
        if not (isinstance(inner, type) and issubclass(inner, BaseModel)):
            break
        current = inner
    first = (current.__doc__ or "").strip().splitlines()
    return f"{'.'.join((table, *section))}: {first[0] if first else current.__name__}"


def _help(leaf: Leaf) -> str:
    default = leaf.info.get_default(call_default_factory=True)
    if default is PydanticUndefined:
        shown = "none"
    elif isinstance(default, tuple):
        shown = " ".join(_show(value) for value in default) or "none"
    elif isinstance(default, dict):
        shown = " ".join(f"{key}={value}" for key, value in default.items()) or "none"
    else:
        shown = _show(default)
    text = f"{leaf.info.description or leaf.path[-1]} (default: {shown})"
    return text.replace("%", "%%")  # argparse formats help texts


def _show(value: Any) -> str:
    if isinstance(value, BaseModel):
        return ":".join(str(part) for part in value.model_dump(mode="json").values())
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if str(value) else "empty"


def _kind(annotation: Any) -> tuple[Any, str]:
    """The item type and one of list, mapping, flag, choice, or the name of a single value's type."""
    origin = get_origin(annotation)
    if origin in (Union, types.UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        return _kind(rest[0])
    if origin is Literal:
        return annotation, "choice"
    if origin in (tuple, list):
        return get_args(annotation)[0], "list"
    if origin is dict:
        return get_args(annotation)[1], "mapping"
    if annotation is bool:
        return bool, "flag"
    return annotation, getattr(annotation, "__name__", "value").lower()


def _structure(leaf: Leaf, given: Any) -> Any:
    """From argparse's text to what the TOML file would have held; pydantic turns text into numbers."""
    item, kind = _kind(leaf.info.annotation)
    if kind == "mapping":
        pairs = [text.partition("=") for text in given]
        for name, equals, _ in pairs:
            if not equals or not name:
                raise ConfigError(f"{leaf.flag}: expected NAME=VALUE (got {name!r})")
        names = [name for name, _, _ in pairs]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{leaf.flag}: {name} is given twice")
        return {name: value for name, _, value in pairs}
    if kind == "list" and isinstance(item, type) and issubclass(item, BaseModel):
        return [_record(leaf, item, text) for text in given]
    return given


def _record(leaf: Leaf, model: type[BaseModel], text: str) -> dict[str, Any]:
    """One record as JSON (``{"name": "books"}``) or as its values in order (``books:folder:0.5``)."""
    if text.startswith("{"):
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{leaf.flag}: {text[:80]!r} is not JSON: {error}") from None
        return typing.cast(dict[str, Any], data)
    names, values = list(model.model_fields), text.split(":")
    if len(values) > len(names):
        raise ConfigError(f"{leaf.flag}: expected {':'.join(names)} (got {text[:80]!r})")
    return dict(zip(names, values, strict=False))


def _put(table: dict[str, Any], leaf: Leaf, value: Any) -> None:
    for name in leaf.path[:-1]:
        inner = table.setdefault(name, {})
        if not isinstance(inner, dict):
            raise ConfigError(f"{'.'.join((leaf.table, *leaf.path[:-1]))} must be a table (got {inner!r})")
        table = inner
    table[leaf.path[-1]] = value
