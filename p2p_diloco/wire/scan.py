"""Look at msgpack bytes before decoding them: depth, item count and extension types are bounded first.

msgpack's own limits bound each container, not the whole message; a frame of 64 KiB could still ask for
65,000 objects or a thousand levels. The scan allocates nothing and touches each item header once.
"""

from __future__ import annotations

from p2p_diloco.errors import ProtocolViolation

MAX_DEPTH = 16  # DESIGN 6
MAX_ITEMS = 4096  # DESIGN 6

# Size of the length field, in bytes, of the variable-length kinds.
_SIZED = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xD9: 1, 0xDA: 2, 0xDB: 4}
# Payload bytes of the fixed-size scalars.
_FIXED = {
    0xC0: 0, 0xC2: 0, 0xC3: 0, 0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4,
    0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4, 0xD3: 8,
}  # fmt: skip
_CONTAINERS = {0xDC: (2, 1), 0xDD: (4, 1), 0xDE: (2, 2), 0xDF: (4, 2)}


def scan(data: bytes, max_depth: int = MAX_DEPTH, max_items: int = MAX_ITEMS) -> None:
    """Raise ProtocolViolation unless ``data`` is exactly one msgpack value within the limits."""
    position = 0
    items = 0
    open_counts = [1]  # values still due at each level
    end = len(data)
    while open_counts:
        if open_counts[-1] == 0:
            open_counts.pop()
            continue
        open_counts[-1] -= 1
        items += 1
        if items > max_items:
            raise ProtocolViolation(f"message has more than {max_items} items")
        if position >= end:
            raise ProtocolViolation("message ends in the middle of a value")
        children, position = _step(data, position, end)
        if children:
            if len(open_counts) > max_depth:
                raise ProtocolViolation(f"message is nested deeper than {max_depth} levels")
            open_counts.append(children)
    if position != end:
        raise ProtocolViolation(f"{end - position} bytes after the end of the message")


def _step(data: bytes, position: int, end: int) -> tuple[int, int]:
    """Pass one item header (and its payload); return the count of its children and the next position."""
    tag = data[position]
    position += 1
    if tag <= 0x7F or tag >= 0xE0:
        return 0, position
    if tag <= 0x8F:
        return (tag & 0x0F) * 2, position
    if tag <= 0x9F:
        return tag & 0x0F, position
    if tag <= 0xBF:
        return 0, _advance(position, tag & 0x1F, end)
    if tag in _FIXED:
        return 0, _advance(position, _FIXED[tag], end)
    if tag in _SIZED:
        width = _SIZED[tag]
        start = _advance(position, width, end)
        return 0, _advance(start, int.from_bytes(data[position:start], "big"), end)
    if tag in _CONTAINERS:
        width, per_entry = _CONTAINERS[tag]
        start = _advance(position, width, end)
        return int.from_bytes(data[position:start], "big") * per_entry, start
    raise ProtocolViolation(f"message uses msgpack type 0x{tag:02x}, which is not allowed")


def _advance(position: int, count: int, end: int) -> int:
    if count > end - position:
        raise ProtocolViolation("message ends in the middle of a value")
    return position + count
