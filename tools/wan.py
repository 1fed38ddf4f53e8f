"""A wide-area network on one machine: peers in network namespaces; delay, rate, queue and loss between them.

    python tools/wan.py SCENARIO --check [--together]   measure it with real TCP against its figures
    python tools/wan.py SCENARIO -- COMMAND ...         run a command while it is up
    python tools/wan.py SCENARIO --hold                 keep it up until Ctrl-C
    python tools/wan.py --list                          the scenarios that come with the project

SCENARIO is a name from tools/wan/ or a TOML file; tools/wan_scenario.py says what may stand in one. A command
finds WAN_NAMES, WAN_NAMESPACES and WAN_ADDRESSES (separated by spaces, in the same order), WAN_SCENARIO and
WAN_SCALE in its environment, and starts things at a peer with `ip netns exec NAMESPACE ...`. Needs Linux,
root and /dev/net/tun.

How: every namespace has a tun device; one process reads IP packets from all of them, holds each for as long
as the scenario says (tools/wan_link.py) and writes it to the receiver's. No kernel module for emulation is
needed. The kernel may hand over bundles of up to 64 KiB of TCP segments (as it would to a network card): TCP
behaves as with packets of 1500 bytes, and Python sees far fewer.

From Python:

    with Wan(load("usa-eu")) as wan:
        subprocess.Popen(wan.command(0, ["python", "server.py", wan.addresses[0]]))
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import re
import secrets
import shutil
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any, Self

from wan_scenario import Scenario, ScenarioError, load, names

DEVICE = "wan0"
MTU = 1500
CAPABILITIES = {"CAP_NET_ADMIN": 12, "CAP_SYS_ADMIN": 21}  # for devices; for namespaces
GRACE_S = 2.0  # between SIGTERM and SIGKILL for what still runs in a namespace
END_S = 10.0  # patience with the forwarder's end
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
BUFFER_AT_LEAST, BUFFER_AT_MOST = (
    6 << 20,
    256 << 20,
)  # Linux's own maximum for receiving; enough for 4 Gb/s at 500 ms
TUN_SET_IFF, TUN_SET_OFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
OFFLOAD_CSUM, OFFLOAD_TSO4 = 0x01, 0x02


class WanError(Exception):
    """The emulator cannot start or has stopped; the text is one line."""


def unavailable() -> str:
    """Why this machine cannot play a network, in one line; empty if it can."""
    if not sys.platform.startswith("linux"):
        return "the WAN emulator needs Linux"
    if os.geteuid() != 0:
        return "the WAN emulator needs root (network namespaces)"
    try:
        os.close(os.open("/dev/net/tun", os.O_RDWR))
    except OSError as error:
        return f"the WAN emulator needs /dev/net/tun: {error.strerror}"
    held = int(re.findall(r"^CapEff:\s*(\w+)", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 16)
    missing = [name for name, bit in CAPABILITIES.items() if not held >> bit & 1]
    if missing:
        return f"the WAN emulator needs {' and '.join(missing)}, which this container's root does not have"
    if shutil.which("ip") is None:
        return "the WAN emulator needs the command ip (iproute2), which is missing"
    return ""


def ip(*arguments: str, check: bool = True) -> str:
    """Run the command ip; WanError with its complaint if it fails."""
    done = subprocess.run(["ip", *arguments], capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if check and done.returncode:
        raise WanError(f"ip {' '.join(arguments)}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def pids_in(namespace: str) -> list[int]:
    return [int(pid) for pid in ip("netns", "pids", namespace, check=False).split()]


def end_processes(namespace: str) -> None:
    """End all that runs in a namespace, if it is still there: first by SIGTERM, then by SIGKILL."""
    begin_s = time.monotonic()
    while pids := pids_in(namespace):
        waited_s = time.monotonic() - begin_s
        if waited_s > 3 * GRACE_S:
            print(f"wan: {namespace}: cannot be ended: {pids}", file=sys.stderr)
            return
        for pid in pids:
            try:
                os.kill(pid, signal.SIGTERM if waited_s < GRACE_S else signal.SIGKILL)
            except ProcessLookupError:
                continue  # it ended by itself
        time.sleep(0.05)


def remove(namespace: str) -> None:
    ip("netns", "del", namespace, check=False)


def open_tun(name: str) -> int:
    """Make a tun device in this process's namespace; it lives as long as the descriptor."""
    fd = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    try:
        flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
        fcntl.ioctl(fd, TUN_SET_IFF, struct.pack("16sH22x", name.encode(), flags))
        fcntl.ioctl(fd, TUN_SET_OFFLOAD, OFFLOAD_CSUM | OFFLOAD_TSO4)
    except OSError as error:
        os.close(fd)
        raise WanError(f"cannot make a tun device: {error}") from error
    return fd


class Wan:
    """The emulated network, up between `with` and its end; the scenario's clock starts when it is up."""

    def __init__(self, scenario: Scenario) -> None:
        self.scenario = scenario
        self.tag = secrets.token_hex(3)  # so that two networks can be up at once
        self.namespaces = [f"wan-{self.tag}-{peer.name}" for peer in scenario.peers]
        self.addresses = [f"10.77.0.{n + 1}" for n in range(len(scenario.peers))]
        self._made: list[str] = []
        self._forwarder: subprocess.Popen[bytes] | None = None
        self._asking = threading.Lock()

    def __enter__(self) -> Self:
        reason = unavailable()
        if reason:
            raise WanError(reason)
        devices: list[int] = []
        try:
            for n in range(len(self.namespaces)):
                self._make_peer(n, devices)
            self._start_forwarder(devices)
        except BaseException:
            self.close()
            raise
        finally:
            for fd in devices:
                os.close(fd)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _make_peer(self, n: int, devices: list[int]) -> None:
        """One namespace with its device, address and TCP settings."""
        namespace, temporary = self.namespaces[n], f"w{self.tag}n{n}"
        self._made.append(namespace)
        ip("netns", "add", namespace)
        devices.append(open_tun(temporary))
        ip("link", "set", temporary, "netns", namespace, "name", DEVICE)
        self._settings(namespace)
        ip("-n", namespace, "link", "set", "lo", "up")
        ip("-n", namespace, "address", "add", f"{self.addresses[n]}/24", "dev", DEVICE)
        ip("-n", namespace, "link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "5000", "up")
        # Set on the route: the sysctl of a namespace refuses what the machine does not allow to everybody.
        route = ["10.77.0.0/24", "dev", DEVICE, "src", self.addresses[n]]
        ip("-n", namespace, "route", "replace", *route, "congctl", self.scenario.congestion)

    def _settings(self, namespace: str) -> None:
        """No memory between connections, buffers that hold what is under way."""
        most = self.tcp_buffer()
        settings = {
            "net/ipv6/conf/all/disable_ipv6": "1",  # saves the emulator packets that it does not carry
            "net/ipv6/conf/default/disable_ipv6": "1",
            "net/ipv4/tcp_no_metrics_save": "1",
            "net/ipv4/tcp_rmem": f"4096 131072 {most}",
            "net/ipv4/tcp_wmem": f"4096 16384 {most}",
        }
        for key, value in settings.items():
            path = f"/proc/sys/{key}"
            if not os.path.exists(path) and "ipv6" in key:
                continue
            command = ["ip", "netns", "exec", namespace, "tee", path]
            done = subprocess.run(command, input=value, capture_output=True, text=True)
            if done.returncode:
                raise WanError(f"cannot set {key} to {value!r}: {done.stderr.strip()}")

    def tcp_buffer(self) -> int:
        """Bytes that a socket may hold: the scenario's, or several times what the fattest way holds."""
        given = self.scenario.tcp_buffer_mib
        if given is not None:
            return int(given * 2**20)
        scenario, most = self.scenario, 0.0
        for a, b in scenario.pairs:
            rate = scenario.path_bits_per_s(a, b) or 1e9
            most = max(most, rate / 8 * (scenario.round_trip_s(a, b) + 0.1))
        # Half of a receive buffer counts as overhead, and slow start probes for twice the window.
        return int(min(BUFFER_AT_MOST, max(BUFFER_AT_LEAST, 4 * most)))

    def _start_forwarder(self, devices: list[int]) -> None:
        script = Path(__file__).resolve().with_name("wan_forward.py")
        self._forwarder = subprocess.Popen(
            [sys.executable, str(script)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            pass_fds=devices,
            start_new_session=True,
        )
        self._ask(
            {
                "text": self.scenario.text,
                "name": self.scenario.name,
                "scale": self.scenario.scale,
                "devices": devices,
                "namespaces": self.namespaces,
            }
        )

    def _ask(self, order: dict[str, Any]) -> dict[str, Any]:
        """Send one line to the forwarder and return its answer."""
        process = self._forwarder
        if process is None or process.stdin is None or process.stdout is None:
            raise WanError("the WAN emulator is not up")
        with self._asking:  # callers may have threads
            try:
                process.stdin.write(json.dumps(order).encode() + b"\n")
                process.stdin.flush()
                line = process.stdout.readline()
            except BrokenPipeError:
                line = b""
        if not line:
            raise WanError("the WAN emulator's forwarder has ended; see its complaint above")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WanError(answer["error"])
        return answer

    def command(self, peer: int, argv: Sequence[str]) -> list[str]:
        """A command line that runs `argv` at a peer."""
        return ["ip", "netns", "exec", self.namespaces[peer], *argv]

    def environment(self) -> dict[str, str]:
        """What a command needs to know of the network."""
        return {
            "WAN_SCENARIO": self.scenario.name,
            "WAN_SCALE": str(self.scenario.scale),
            "WAN_NAMES": " ".join(peer.name for peer in self.scenario.peers),
            "WAN_NAMESPACES": " ".join(self.namespaces),
            "WAN_ADDRESSES": " ".join(self.addresses),
        }

    def change(self, **entry: Any) -> None:
        """Change the network now, in the words of [[changes]]: change(peer="a", up_mbit=5), or with
        change(**{"from": "a", "to": "*", "loss": 1}), which cuts all that a sends."""
        self._ask({"do": "change", "change": entry})

    def statistics(self) -> dict[str, Any]:
        """Counters of each ordered pair, the emulator's own lateness, and what the devices could not hold."""
        found = self._ask({"do": "statistics"})
        overruns = 0
        for namespace in self.namespaces:
            shown = json.loads(ip("-n", namespace, "-s", "-j", "link", "show", DEVICE))
            overruns += int(shown[0]["stats64"]["tx"]["dropped"])
        return {**found, "overruns": overruns}

    def close(self) -> None:
        """End what runs in the namespaces, then the forwarder, then remove the namespaces.

        A command that was started a moment ago and has not entered its namespace yet is not found there: who
        starts commands also waits for them, or ends them, before the network is taken down.
        """
        try:
            for namespace in self._made:
                end_processes(namespace)
        finally:
            process, self._forwarder = self._forwarder, None
            if process is not None:
                self._end(process)
            while self._made:
                remove(self._made.pop())

    def _end(self, process: subprocess.Popen[bytes]) -> None:
        if process.stdin is not None and process.poll() is None:
            try:
                process.stdin.write(b'{"do": "stop"}\n')
                process.stdin.close()
                process.wait(END_S)
            except (BrokenPipeError, subprocess.TimeoutExpired) as error:
                print(f"wan: the forwarder is killed: {error}", file=sys.stderr)
                process.kill()
        process.wait()
        if process.stdout is not None:
            process.stdout.close()


# --- the command ---


def stopped(number: int, frame: FrameType | None) -> None:
    """A signal ends the program the way an exception does: everything is cleaned up, once, undisturbed."""
    for each in SIGNALS:
        signal.signal(each, signal.SIG_IGN)
    raise SystemExit(128 + number)


def run_command(wan: Wan, argv: list[str]) -> int:
    """Run a command outside the namespaces, which it knows from its environment; its exit status."""
    try:
        process = subprocess.Popen(argv, env={**os.environ, **wan.environment()})
    except OSError as error:
        print(f"wan: {argv[0]}: {error.strerror}", file=sys.stderr)
        return 127
    try:
        code = process.wait()
        return code if code >= 0 else 128 - code
    finally:
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def hold(wan: Wan) -> int:
    for key, value in wan.environment().items():
        print(f'export {key}="{value}"', flush=True)
    print("wan: up; Ctrl-C takes it down", file=sys.stderr)
    while True:
        signal.pause()


def describe(name: str) -> str:
    scenario = load(name)
    return f"{name:15} {len(scenario.peers):3} peers, rates / {scenario.scale:g}: {scenario.about}"


def options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("scenario", nargs="?", help="a name from tools/wan/, or a file")
    parser.add_argument("--list", action="store_true", help="list the scenarios that come with the project")
    parser.add_argument(
        "--check", action="store_true", help="measure round trips and throughput, print a table"
    )
    parser.add_argument("--hold", action="store_true", help="keep the network up until Ctrl-C")
    parser.add_argument(
        "--scale", type=float, help="divide the rates by this instead of the scenario's scale"
    )
    parser.add_argument(
        "--seconds", type=float, default=5.0, help="--check: time per throughput (default: 5)"
    )
    parser.add_argument(
        "--streams", type=int, default=1, help="--check: TCP connections per pair (default: 1)"
    )
    parser.add_argument("--together", action="store_true", help="--check: load all pairs at once")
    return parser


def main() -> int:
    argv = sys.argv[1:]
    cut = argv.index("--") if "--" in argv else len(argv)
    parser, command = options(), argv[cut + 1 :]
    chosen = parser.parse_args(argv[:cut])
    try:
        if chosen.list:
            print("\n".join(describe(name) for name in names()))
            return 0
        if chosen.scenario is None or chosen.check + chosen.hold + bool(command) != 1:
            parser.error("give a scenario and one of --check, --hold, -- COMMAND")
        scenario = load(chosen.scenario, chosen.scale)
        reason = unavailable()
        if reason:
            raise WanError(reason)
        for number in SIGNALS:
            signal.signal(number, stopped)
        with Wan(scenario) as wan:
            if chosen.check:
                from wan_check import check  # it imports this module's Wan

                return check(wan, chosen.seconds, chosen.streams, chosen.together)
            return run_command(wan, command) if command else hold(wan)
    except (ScenarioError, WanError) as error:
        print(f"wan: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
