"""Sockets under the links: listen, accept and connect as plain TCP, then wrap in TLS.

TCP and TLS are separate steps so that a connection can be turned away before any cryptography, and so
that both have their own deadline. (`StreamWriter.start_tls` is no help for accepting: bytes that arrive
before it is called, as they do while the event loop is busy, go to the plain stream and the handshake
never ends.)
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import socket
import ssl
from collections.abc import Callable

logger = logging.getLogger(__name__)

READ_BYTES = 256 << 10  # a stream's read buffer; reading stops at twice that (guess)
_BACKLOG = 128
_SHUTDOWN_S = 2.0  # for the other side to answer our close (guess)
_ACCEPT_PAUSE_S = 1.0  # after the system refused to accept, usually for want of file descriptors (guess)


async def listen(host: str, port: int) -> list[socket.socket]:
    """Listening sockets on every address of ``host``, all with one port; raises OSError."""
    loop = asyncio.get_running_loop()
    found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    opened: list[socket.socket] = []
    with contextlib.ExitStack() as stack:
        for family, _, _, _, address in dict.fromkeys(found):
            listening = stack.enter_context(socket.socket(family, socket.SOCK_STREAM))
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            listening.setblocking(False)
            listening.bind((address[0], port, *address[2:]))
            listening.listen(_BACKLOG)
            port = listening.getsockname()[1]
            opened.append(listening)
        stack.pop_all()  # all are bound: the caller closes them
    return opened


async def accept_forever(listening: socket.socket, on_socket: Callable[[socket.socket, str], None]) -> None:
    """Hand each accepted socket and the host that it came from to ``on_socket``, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        try:
            accepted, address = await loop.sock_accept(listening)
        except OSError as error:
            if error.errno in (errno.ECONNABORTED, errno.EPROTO):
                continue  # that one hung up before we came to it
            logger.warning("cannot accept connections for now: %s", error)
            await asyncio.sleep(_ACCEPT_PAUSE_S)
            continue
        on_socket(accepted, str(address[0]))


async def connect(host: str, port: int) -> socket.socket:
    """A connected TCP socket to the first address of ``host`` that answers; raises OSError."""
    loop = asyncio.get_running_loop()
    last: OSError = OSError(f"{host} has no address")
    for family, _, _, _, address in await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        connecting = socket.socket(family, socket.SOCK_STREAM)
        try:
            connecting.setblocking(False)
            await loop.sock_connect(connecting, address)
        except OSError as error:
            connecting.close()
            last = error
        except BaseException:
            connecting.close()
            raise
        else:
            return connecting
    raise last


class _Protocol(asyncio.StreamReaderProtocol):
    """Says when the socket is gone without needing a task that waits for it."""

    def __init__(self, reader: asyncio.StreamReader, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__(reader, loop=loop)
        self.gone: asyncio.Future[None] = loop.create_future()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        if not self.gone.done():
            self.gone.set_result(None)


async def secure(
    plain: socket.socket, context: ssl.SSLContext, server_side: bool, timeout_s: float
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter, asyncio.Future[None]]:
    """Shake hands on a connected socket and give streams over it; the socket is theirs, also on failure.

    The future is done once the socket is gone, which can be a while after the writer's ``close``. Raises
    OSError (`ssl.SSLError` is one) if the handshake fails or takes longer than ``timeout_s``.
    """
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader(READ_BYTES, loop)
    protocol = _Protocol(reader, loop)
    try:
        if server_side:
            transport, _ = await loop.connect_accepted_socket(
                lambda: protocol,
                plain,
                ssl=context,
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
        else:
            transport, _ = await loop.create_connection(
                lambda: protocol,
                sock=plain,
                ssl=context,
                server_hostname="",  # no name to check: identity is the key
                ssl_handshake_timeout=timeout_s,
                ssl_shutdown_timeout=_SHUTDOWN_S,
            )
    except RuntimeError as error:  # uvloop's word for a socket that closed meanwhile
        raise ConnectionResetError(str(error)) from None
    return reader, asyncio.StreamWriter(transport, protocol, reader, loop), protocol.gone
