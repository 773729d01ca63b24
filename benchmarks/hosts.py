"""Two hosts on one machine: network namespaces, joined by a cable of limited speed.

    namespace 0                               namespace 1
    ranks 0 .. W/2-1     wire  <──veth──>  wire     ranks W/2 .. W-1
                    token bucket filter on both ends

What ranks of different hosts send passes the limited cable. Ranks of one host reach each other by
the loopback device of their namespace, which is not limited. The namespaces are removed in the end,
whether the run succeeds, fails or is interrupted. Needs root, and `ip` and `tc` from iproute2.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HOSTS = 2
_NETWORK_NAMESPACE = 0x40000000  # CLONE_NEWNET


class NoHosts(Exception):
    """This system cannot play two hosts; the message says why."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What the ranks are connected by: a network device of the same name on each host."""

    device: str
    namespaces: tuple[str, ...] = ()  # of the hosts; none is needed for a single one

    @property
    def hosts(self) -> int:
        return max(1, len(self.namespaces))

    def enter(self, rank: int, world: int) -> None:
        """Put this process, which has no threads yet, on the host of its rank."""
        if self.namespaces:
            _enter_namespace(self.namespaces[rank * self.hosts // world])
        os.environ["GLOO_SOCKET_IFNAME"] = self.device

    def bytes_sent(self) -> int:
        """What the kernel has sent through the device on this rank's host."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.device:
                return int(numbers.split()[8])
        raise RuntimeError(f"there is no {self.device} in /proc/net/dev")


LOOPBACK = Wire("lo")
_CABLE = "wire"


@contextlib.contextmanager
def two_hosts(gbit: float) -> Iterator[Wire]:
    """Two hosts with a cable of that speed between them."""
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoHosts(f"there is no `{tool}` here; it comes with iproute2")
    _remove_leftovers()
    with contextlib.ExitStack() as clean_up:
        names = tuple(f"onecopy-{os.getpid()}-{host}" for host in range(HOSTS))
        for name in names:
            clean_up.callback(_remove, name)  # first, or an interrupt in between leaves it behind
            _run("ip", "netns", "add", name)
        _join(names, gbit)
        yield Wire(_CABLE, names)


def _remove_leftovers() -> None:
    """Of programs that were killed so hard that they could not clean up."""
    for left in Path("/run/netns").glob("onecopy-*-*"):
        if not Path("/proc", left.name.split("-")[1]).exists():
            _remove(left.name)


def _join(names: tuple[str, ...], gbit: float) -> None:
    a, b = names
    _run(*f"ip link add {_CABLE} netns {a} type veth peer name {_CABLE} netns {b}".split())
    for host, name in enumerate(names):
        # No IPv6 address: gloo might take that one, and it cannot be used at once.
        _run(*f"ip -n {name} link set {_CABLE} addrgenmode none".split())
        _run(*f"ip -n {name} address add 10.77.0.{host + 1}/24 dev {_CABLE}".split())
        _run(*f"ip -n {name} link set {_CABLE} up".split())
        _run(*f"ip -n {name} link set lo up".split())
        limit = f"rate {gbit * 1000:.0f}mbit burst 256kb latency 50ms"
        _run(*f"tc -n {name} qdisc add dev {_CABLE} root tbf {limit}".split())


def _enter_namespace(name: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    with Path("/run/netns", name).open() as handle:
        if libc.setns(handle.fileno(), _NETWORK_NAMESPACE) != 0:
            raise OSError(ctypes.get_errno(), f"the network namespace {name} cannot be entered")


def _remove(name: str) -> None:
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "delete", name], check=False)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoHosts(f"`{' '.join(command)}` says: {' '.join(done.stderr.split())}")
