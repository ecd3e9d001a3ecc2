"""A link of a chosen rate between two ranks of one machine: a veth pair between a network namespace for each.

The namespaces have no names and nothing of them is in the machine's own: they are the ranks' and end with them,
however the ranks end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fsdp_compile.local_ranks import UsageError

DEVICE = "link0"
PATIENCE = 30.0  # seconds to wait for the other rank
PACKET = 8_000  # bytes; headers of common ones of 1,500 are a twentieth of what is sent
BURST = (
    5e-4  # seconds at the rate, whose bytes go at once after a pause: if messages do, a link seems faster than it is
)
LEAST_BURST = 2 * PACKET  # bytes
QUEUE = "400ms"  # what waits longer is dropped; TCP itself keeps less than this in the queue
TCP = {
    "tcp_congestion_control": "reno",  # nothing is lost, so it sends at the rate; others probe for it
    "tcp_slow_start_after_idle": "0",  # a step's collectives come after pauses
}
_CLONE_NEWNET = 0x40000000


def check_possible() -> None:
    """Raise a :class:`UsageError` if this process may not, or cannot, make such a link."""
    if os.geteuid() != 0:
        raise UsageError("link needs root: it makes network namespaces and limits the rate between them")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise UsageError(f"link needs the command {tool!r} (package iproute2)")
    if len(os.sched_getaffinity(0)) < 2:
        raise UsageError("link needs two CPU cores, one for each rank")


def join_link(rank: int, directory: Path) -> None:
    """Move this process, rank 0 or 1, into a namespace of its own and bring up its end of the link.

    To be called before any thread that communicates is started.

    Args:
        directory: empty, and the same for both ranks.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise UsageError(f"cannot make a network namespace: {os.strerror(ctypes.get_errno())}")
    if rank == 1:
        _publish(directory / "pid-of-1", str(os.getpid()))
    else:
        peer = _await(lambda: _read(directory / "pid-of-1"), "rank 1 in its namespace")
        _ip("link", "add", DEVICE, "type", "veth", "peer", "name", DEVICE, "netns", peer)
    _await(lambda: f"{DEVICE}:" in Path("/proc/self/net/dev").read_text(), "the link")
    _ip("link", "set", "lo", "up")
    _ip("link", "set", DEVICE, "mtu", str(PACKET))
    _ip("link", "set", DEVICE, "addrgenmode", "none")  # no IPv6 address: gloo takes the first address it finds
    _ip("address", "add", f"10.0.0.{rank + 1}/30", "dev", DEVICE)
    _ip("link", "set", DEVICE, "up")
    for name, value in TCP.items():
        Path("/proc/sys/net/ipv4", name).write_text(value)  # of this namespace
    os.environ["GLOO_SOCKET_IFNAME"] = DEVICE


def limit_rate(bytes_per_second: float) -> None:
    """Limit what this rank sends."""
    rate, burst = f"{round(8 * bytes_per_second)}bit", max(round(BURST * bytes_per_second), LEAST_BURST)
    _ip("link", "set", DEVICE, "gso_max_size", str(min(burst // 2, 65_536)))  # a larger packet would be dropped
    _run("tc", "qdisc", "replace", "dev", DEVICE, "root", "tbf", "rate", rate, "burst", str(burst), "latency", QUEUE)


def bytes_sent() -> int:
    """By this rank over the link so far, headers and acknowledgements included."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, numbers = line.partition(":")
        if name.strip() == DEVICE:
            return int(numbers.split()[8])
    raise RuntimeError(f"no device {DEVICE}: call join_link first")


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
    if done.returncode != 0:
        raise UsageError(f"{' '.join(command)} failed: {done.stderr.strip()}")


def _publish(path: Path, text: str) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(text)
    partial.rename(path)  # whole or not there


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def _await(look: Callable[[], Any], what: str) -> Any:
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE:.0f} s for {what}")
        time.sleep(0.01)
    return found
