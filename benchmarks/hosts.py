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
import multiprocessing
import multiprocessing.connection
import multiprocessing.resource_tracker
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from measuring import as_rank

HOSTS = 2


class NoHosts(Exception):
    """This system cannot play two hosts; the message says why."""


@dataclass(frozen=True, slots=True)
class Wire:
    """What the ranks are connected by: a network device of the same name on each host."""

    device: str
    hosts: int

    def bytes_sent(self) -> int:
        """What the kernel has sent through the device on this rank's host."""
        for line in Path("/proc/net/dev").read_text().splitlines():
            name, _, numbers = line.partition(":")
            if name.strip() == self.device:
                return int(numbers.split()[8])
        raise RuntimeError(f"there is no {self.device} in /proc/net/dev")


LOOPBACK = Wire("lo", hosts=1)
CABLE = Wire("wire", HOSTS)


def on_hosts(world: int, gbit: float, body: Callable[..., None], *args: Any) -> None:
    """Run ``body(directory, *args)`` on so many gloo processes, half of them on each host."""
    with (
        tempfile.TemporaryDirectory() as directory,
        _ends_by_exception(),
        _two_namespaces(gbit) as namespaces,
    ):
        ranks = []
        try:
            for rank in range(world):
                namespace = namespaces[rank * HOSTS // world]
                ranks.append(_start(namespace, rank, (world, directory, body, args)))
            _wait(ranks)
        finally:
            for process in ranks:
                process.terminate()
                process.join()


# ---------------------------------------------------------------------- namespaces


@contextlib.contextmanager
def _ends_by_exception() -> Iterator[None]:
    """Let `kill` end the program as Ctrl-C does, so that it cleans up behind itself."""
    before = signal.signal(signal.SIGTERM, lambda *_: sys.exit("terminated"))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


@contextlib.contextmanager
def _two_namespaces(gbit: float) -> Iterator[list[str]]:
    if os.geteuid() != 0:
        raise NoHosts("network namespaces need root")
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            raise NoHosts(f"there is no `{tool}` here; it comes with iproute2")
    with contextlib.ExitStack() as clean_up:
        names = [f"onecopy-{os.getpid()}-{host}" for host in range(HOSTS)]
        for name in names:
            clean_up.callback(_remove, name)  # first, or an interrupt in between leaves it behind
            _run("ip", "netns", "add", name)
        _join(names, gbit)
        yield names


def _join(names: list[str], gbit: float) -> None:
    a, b = names
    device = CABLE.device
    _run(*f"ip link add {device} netns {a} type veth peer name {device} netns {b}".split())
    for host, name in enumerate(names):
        # No IPv6 address: gloo might take that one, and it cannot be used at once.
        _run(*f"ip -n {name} link set {device} addrgenmode none".split())
        _run(*f"ip -n {name} address add 10.77.0.{host + 1}/24 dev {device}".split())
        _run(*f"ip -n {name} link set {device} up".split())
        _run(*f"ip -n {name} link set lo up".split())
        limit = f"rate {gbit * 1000:.0f}mbit burst 256kb latency 50ms"
        _run(*f"tc -n {name} qdisc add dev {device} root tbf {limit}".split())


def _remove(name: str) -> None:
    if Path("/run/netns", name).exists():
        subprocess.run(["ip", "netns", "delete", name], check=True)


def _run(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise NoHosts(f"`{' '.join(command)}` says: {' '.join(done.stderr.split())}")


# ---------------------------------------------------------------------- processes


def _start(namespace: str, rank: int, args: Any) -> multiprocessing.process.BaseProcess:
    """A new interpreter inside the namespace, which calls ``as_rank(rank, *args)``."""
    directory = args[1]
    python = Path(directory) / f"python-on-{namespace}"
    python.write_text(
        "#!/bin/sh\n"
        f"export GLOO_SOCKET_IFNAME={CABLE.device} OMP_NUM_THREADS=1\n"
        f'exec ip netns exec {namespace} {shlex.quote(sys.executable)} "$@"\n'
    )
    python.chmod(0o755)
    # The tracker outlives the ranks: inside a namespace it would keep that alive.
    multiprocessing.resource_tracker.ensure_running()
    spawn = multiprocessing.get_context("spawn")
    spawn.set_executable(str(python))
    try:
        process = spawn.Process(target=as_rank, args=(rank, *args), daemon=True)
        process.start()
    finally:
        spawn.set_executable(sys.executable)
    return process


def _wait(ranks: list[multiprocessing.process.BaseProcess]) -> None:
    """Until all have ended, or one has failed: the others would wait for it in vain."""
    running = {process.sentinel: rank for rank, process in enumerate(ranks)}
    while running:
        for sentinel in multiprocessing.connection.wait(list(running)):
            rank = running.pop(sentinel)
            ranks[rank].join()
            if ranks[rank].exitcode != 0:
                raise RuntimeError(f"rank {rank} ended with exit code {ranks[rank].exitcode}")
