"""A second host on this machine: a network namespace, or where that is not allowed, loopback."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from paged_backend.launch.ports import bind


@dataclass(frozen=True)
class Hosts:
    """Two hosts: this one, which is node 0, and another one.

    Attributes:
        address: the address of this host, where the other one reaches it.
        port: a free port at that address.
        prefix: the words before a command that shall run on the other host.
        link: the network device of this host to the other one; empty if they share loopback.
    """

    address: str
    port: int
    prefix: tuple[str, ...]
    link: str

    def cut(self, is_cut: bool) -> None:
        """Cut the network between the hosts, or repair it."""
        _ip("link", "set", self.link, "down" if is_cut else "up")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make a network namespace that a virtual cable connects with this one."""
    pid = os.getpid()
    name, here, there = f"paged-{pid}", f"pb{pid}a", f"pb{pid}b"
    subnet = f"10.77.{pid >> 6 & 255}.{(pid & 63) * 4}"
    ours, theirs = (f"{subnet.rpartition('.')[0]}.{(pid & 63) * 4 + i}" for i in (1, 2))
    with ExitStack() as made:
        try:
            _ip("netns", "add", name)
            made.callback(_ip, "netns", "delete", name)
            _ip("link", "add", here, "type", "veth", "peer", "name", there)
            _ip("link", "set", there, "netns", name)
            _ip("address", "add", f"{ours}/30", "dev", here)
            _ip("link", "set", here, "up")
            inside = ("ip", "netns", "exec", name)
            for command in (
                ("address", "add", f"{theirs}/30", "dev", there),
                ("link", "set", there, "up"),
                ("link", "set", "lo", "up"),
            ):
                subprocess.run([*inside, "ip", *command], check=True, capture_output=True)
        except (OSError, subprocess.CalledProcessError):
            ours, inside, here = "127.0.0.2", (), ""
        with bind(ours, 0, "port") as free:
            port = free.getsockname()[1]
        yield Hosts(ours, port, inside, here)


@contextmanager
def worker(
    hosts: Hosts, key: Path, environment: Mapping[str, str] | None = None
) -> Iterator[subprocess.Popen[bytes]]:
    """Run `paged-backend worker` as node 1 of two on the other host."""
    flags = [
        *("--nnodes", "2", "--node-rank", "1", "--cluster-key-file", str(key)),
        *("--master-addr", hosts.address, "--master-port", str(hosts.port)),
    ]
    command = [*hosts.prefix, sys.executable, "-m", "paged_backend.cli", "worker", *flags]
    process = subprocess.Popen(command, env={**os.environ, **(environment or {})})
    try:
        yield process
    finally:
        process.kill()
        process.wait()
