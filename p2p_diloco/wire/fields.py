"""Field specs for message dataclasses: each says what may be in the field and refuses everything else.

A message class is a frozen dataclass whose fields carry a `Spec` in their metadata. `dump` turns an
instance into plain msgpack values; `load` turns decoded values back, strictly: no missing or unknown key,
no other type (bool is no int), no value out of bounds.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, TypeVar

from p2p_diloco.errors import ProtocolViolation

T = TypeVar("T")
_ABSENT = dataclasses.MISSING


@dataclasses.dataclass(frozen=True)
class Spec:
    """`load(value, where)` checks and converts a decoded value; `dump(value)` is its inverse."""

    load: Callable[[Any, str], Any]
    dump: Callable[[Any], Any] = lambda value: value


def _field(spec: Spec, default: Any = _ABSENT) -> Any:
    return dataclasses.field(default=default, metadata={"spec": spec})


def int_spec(low: int = 0, high: int = (1 << 63) - 1) -> Spec:
    """An integer with ``low <= value <= high``."""

    def load(value: Any, where: str) -> int:
        if type(value) is not int or not low <= value <= high:
            raise ProtocolViolation(f"{where} must be an integer in {low}..{high}")
        return value

    return Spec(load)


def bytes_spec(low: int, high: int | None = None) -> Spec:
    """A byte string of ``low`` to ``high`` bytes (exactly ``low`` if ``high`` is None)."""
    top = low if high is None else high

    def load(value: Any, where: str) -> bytes:
        if type(value) is not bytes or not low <= len(value) <= top:
            raise ProtocolViolation(f"{where} must be {low}..{top} bytes")
        return value

    return Spec(load)


def text_spec(high: int) -> Spec:
    """A string of at most ``high`` characters, all printable (it may reach a log)."""

    def load(value: Any, where: str) -> str:
        if type(value) is not str or len(value) > high or not value.isprintable():
            raise ProtocolViolation(f"{where} must be printable text of at most {high} characters")
        return value

    return Spec(load)


def float_spec() -> Spec:
    """A finite float, or NaN where the sender has none to report; infinities are refused."""

    def load(value: Any, where: str) -> float:
        if type(value) is not float or math.isinf(value):
            raise ProtocolViolation(f"{where} must be a float and not infinite")
        return value

    return Spec(load, float)


def choice_spec(*allowed: str) -> Spec:
    """One of the given words."""

    def load(value: Any, where: str) -> str:
        if type(value) is not str or value not in allowed:
            raise ProtocolViolation(f"{where} must be one of {', '.join(allowed)}")
        return value

    return Spec(load)


def tuple_spec(item: Spec, high: int) -> Spec:
    """A sequence of at most ``high`` items."""

    def load(value: Any, where: str) -> tuple[Any, ...]:
        if type(value) is not list or len(value) > high:
            raise ProtocolViolation(f"{where} must be a list of at most {high} items")
        return tuple(item.load(entry, f"{where}[{index}]") for index, entry in enumerate(value))

    return Spec(load, lambda value: [item.dump(entry) for entry in value])


def object_spec(cls: type) -> Spec:
    """A nested message object."""
    return Spec(lambda value, where: load_object(cls, value, where), dump_object)


def integer(low: int = 0, high: int = (1 << 63) - 1, default: Any = _ABSENT) -> Any:
    return _field(int_spec(low, high), default)


def blob(low: int, high: int | None = None, default: Any = _ABSENT) -> Any:
    return _field(bytes_spec(low, high), default)


def text(high: int, default: Any = _ABSENT) -> Any:
    return _field(text_spec(high), default)


def real(default: Any = _ABSENT) -> Any:
    return _field(float_spec(), default)


def choice(*allowed: str, default: Any = _ABSENT) -> Any:
    return _field(choice_spec(*allowed), default)


def many(item: Spec, high: int, default: Any = _ABSENT) -> Any:
    return _field(tuple_spec(item, high), default)


def nested(cls: type) -> Any:
    return _field(object_spec(cls))


def dump_object(value: Any) -> dict[str, Any]:
    """The plain map of a message object; keys in field order, so equal objects give equal bytes."""
    return {
        field.name: field.metadata["spec"].dump(getattr(value, field.name))
        for field in dataclasses.fields(value)
    }


def load_object(cls: type[T], value: Any, where: str) -> T:
    """Build ``cls`` from a decoded map; raise ProtocolViolation on any difference from its specs."""
    if type(value) is not dict:
        raise ProtocolViolation(f"{where} must be a map")
    fields = dataclasses.fields(cls)  # type: ignore[arg-type]
    if len(value) != len(fields):
        raise ProtocolViolation(f"{where} must have the keys {', '.join(f.name for f in fields)}")
    loaded = {}
    for field in fields:
        if field.name not in value:
            raise ProtocolViolation(f"{where}.{field.name} is missing")
        loaded[field.name] = field.metadata["spec"].load(value[field.name], f"{where}.{field.name}")
    return cls(**loaded)
