"""host:port addresses as they travel: parsed strictly, and never one that nobody can dial."""

from __future__ import annotations

import ipaddress


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port`` to (host, port); raises ValueError with one clear line."""
    host, separator, port_text = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not separator or not host or not port_text.isascii() or not port_text.isdigit():
        raise ValueError(f"{address[:128]!r} is not host:port")
    port = int(port_text)
    if not 0 <= port <= 65535:
        raise ValueError(f"port {port} of {address[:128]!r} is not in 0..65535")
    return host, port


def join_address(host: str, port: int) -> str:
    """(host, port) to ``host:port``, with brackets round an IPv6 host."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_dialable(address: str) -> bool:
    """False for what cannot be reached: port 0, an unspecified or multicast host, or no address at all."""
    try:
        host, port = split_address(address)
    except ValueError:
        return False
    if port == 0 or len(host) > 253 or any(c.isspace() for c in host):
        return False
    try:
        parsed = ipaddress.ip_address(host)
    except ValueError:
        return True  # a name; resolved when dialled
    return not (parsed.is_unspecified or parsed.is_multicast)


def announced(listen: tuple[str, ...], observed_host: str) -> tuple[str, ...]:
    """What a peer's listen addresses become for others: an unspecified host is replaced by the address
    that its connection came from; port 0 and other undialable entries are dropped."""
    result: list[str] = []
    for address in listen:
        try:
            host, port = split_address(address)
        except ValueError:
            continue
        try:
            unspecified = ipaddress.ip_address(host).is_unspecified
        except ValueError:
            unspecified = False
        fixed = join_address(observed_host, port) if unspecified and observed_host else address
        if is_dialable(fixed) and fixed not in result:
            result.append(fixed)
    return tuple(result)
