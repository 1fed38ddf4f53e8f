"""One end of a TCP measurement, run inside a namespace by tools/wan_check.py. Needs nothing but Python.

wan_probe.py serve                                answer echoes and count what streams bring
wan_probe.py echo ADDRESS COUNT                   print round trips in seconds, as JSON
wan_probe.py stream ADDRESS SECONDS WARM COUNT    print bits per second that arrived after WARM seconds
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import threading
import time

PORT = 7777
BLOCK = 1 << 20


def serve() -> None:
    """For each connection: 'e' then echoes, or 's' and the seconds that do not count, then bytes."""
    with socket.create_server(("", PORT), backlog=64) as server:
        print("ready", flush=True)
        while True:
            connection, _ = server.accept()
            threading.Thread(target=answer, args=(connection,), daemon=True).start()


def answer(connection: socket.socket) -> None:
    with connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if connection.recv(1) == b"e":
            while data := connection.recv(1):
                connection.sendall(data)
        else:
            connection.sendall(count(connection))


def count(connection: socket.socket) -> bytes:
    """Take bytes to the end; how many came after the warm time, and in how many seconds."""
    (warm_s,) = struct.unpack("d", connection.recv(8, socket.MSG_WAITALL))
    buffer, got = memoryview(bytearray(BLOCK)), 0
    begin_s = last_s = time.monotonic()
    start_s = 0.0
    while size := connection.recv_into(buffer):
        last_s = time.monotonic()
        if start_s:
            got += size
        elif last_s - begin_s >= warm_s:
            start_s = last_s
    return struct.pack("dd", got, last_s - (start_s or last_s))


def echo(address: str, times: int) -> list[float]:
    trips = []
    with socket.create_connection((address, PORT), 30) as connection:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.sendall(b"e")
        for _ in range(times):
            begin_s = time.monotonic()
            connection.sendall(b"x")
            connection.recv(1)
            trips.append(time.monotonic() - begin_s)
    return trips


def stream(address: str, seconds: float, warm_s: float) -> float:
    """Send for so long; the rate at which it arrived, as the other side saw it."""
    block = memoryview(bytes(BLOCK))
    with socket.create_connection((address, PORT), 30) as connection:
        connection.settimeout(60)
        connection.sendall(b"s" + struct.pack("d", warm_s))
        end_s = time.monotonic() + seconds
        while time.monotonic() < end_s:
            connection.send(block[: 256 * 1024])
        connection.shutdown(socket.SHUT_WR)
        got, took_s = struct.unpack("dd", connection.recv(16, socket.MSG_WAITALL))
    return float(8 * got / took_s) if took_s else 0.0


def main() -> None:
    match sys.argv[1:]:
        case ["serve"]:
            serve()
        case ["echo", address, times]:
            print(json.dumps(echo(address, int(times))))
        case ["stream", address, seconds, warm, streams]:
            rates: list[float] = []
            threads = [
                threading.Thread(target=lambda: rates.append(stream(address, float(seconds), float(warm))))
                for _ in range(int(streams))
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            print(json.dumps(sum(rates)))
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main()
