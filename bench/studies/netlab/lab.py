"""A network of machines on one machine: network namespaces behind a switch with limited links.

Each machine is a network namespace with one interface, and a further namespace has the switch. Both
directions of a link are limited: at the machine's interface what it sends, and at the switch's port
what it receives. Links lose nothing: queues hold every byte that TCP may have on its way, as the
windows of connections are small and Reno grows to them. So a figure depends on the links' rate and
not on how a congestion control guesses it.

Namespaces have no names. They are held by descriptors of the process that made them, and by the
processes that have entered them, and vanish with the last of these, however it ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import ipaddress
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from typing import Any

from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

MAX_MACHINES = 1000  # ports of a Linux bridge: 1023
_PROGRAMS = {"ip": "iproute2", "tc": "iproute2", "unshare": "util-linux", "nsenter": "util-linux"}
_NETWORK = ipaddress.ip_network("198.18.0.0/15")  # for measurements of networks (RFC 2544)
_MTU = 9000  # as in data centers; headers take less than 1% of the rate
# A link may be ahead of its rate by this much, after a pause: what a timer of the kernel needs, and
# at least two packets of 40 KiB, before they are segmented. The kernel works per packet: with half
# of that, four links of 1 Gbit/s take all of two cores, and the figures are the cores'.
_AHEAD_SECONDS, _LEAST_AHEAD = 100e-6, 80 << 10
# A connection's window: enough for a receiver that waits for a core.
_WINDOW_SECONDS, _LEAST_WINDOW = 4e-3, 256 << 10
_LONGEST_QUEUE = 1 << 31  # bytes that `tc` can say
# Of a new namespace, where the kernel has it. Packets that IPv6 sends by itself stay off the links.
# All packets of a connection pass through one core, by a hash: several would reorder them.
_SETTINGS = {
    "/proc/sys/net/ipv6/conf/default/disable_ipv6": "1",
    "/proc/sys/net/core/rps_default_mask": f"{(1 << min(os.cpu_count() or 1, 32)) - 1:x}",
}
_SET = "".join(f"[ ! -w {file} ] || echo {value} > {file}; " for file, value in _SETTINGS.items())
_CLONE_NEWNET, _CLONE_NEWUSER = 0x40000000, 0x10000000


class Lab:
    """Machines with limited links into a switch that never blocks; a context manager.

    Other processes enter a machine with a copy of the lab (pickled, or inherited by a fork), while
    the process that made it is in its context. Without root it needs user namespaces.

    Attributes:
        machines: their number.
        gbit: rate of each link, each way, in 10^9 bits per second, headers included.
        delay_us: added to every packet from one machine to another, in microseconds.
        interface: name of every machine's network interface.
    """

    interface = "eth0"

    def __init__(self, machines: int = 4, gbit: float = 1.0, delay_us: float = 0) -> None:
        """Describe a lab; entering its context creates it.

        Raises:
            InvalidArgumentError: a value is out of range.
        """
        if not 1 <= machines <= MAX_MACHINES:
            raise InvalidArgumentError(
                f"machines is {machines}; expected 1 to {MAX_MACHINES} machines"
            )
        if not 1e-3 <= gbit <= 1e3:
            raise InvalidArgumentError(f"gbit is {gbit}; expected 0.001 to 1000 Gbit/s")
        if not 0 <= delay_us <= 1e6:
            raise InvalidArgumentError(f"delay_us is {delay_us}; expected 0 to 1000000")
        self.machines, self.gbit, self.delay_us = machines, gbit, delay_us
        self._owner = 0
        self._networks: list[int] = []  # descriptors of the owner: of each machine, and the switch
        self._user: int | None = None  # of the user namespace that owns them, without root

    def __enter__(self) -> Lab:
        """Create the machines, links and switch.

        Raises:
            UnsupportedError: programs, permissions or parts of the kernel are missing.
        """
        for program, package in _PROGRAMS.items():
            if shutil.which(program) is None:
                raise UnsupportedError(
                    f"a lab of network namespaces needs the program {program}; install {package}"
                )
        self._owner = os.getpid()
        try:
            for _ in range(self.machines + 1):
                self._add_network()
            self._build()
        except BaseException:
            self._release()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        """Let go of the machines; they vanish when the processes in them have ended."""
        self._release()

    def enter(self, machine: int) -> None:
        """Move this thread, and those that it starts later, into a machine's network.

        Sockets that are open stay where they are. Without root the process must have one thread.

        Raises:
            UnsupportedError: the kernel refuses, or the lab is gone.
        """
        with contextlib.ExitStack() as opened:
            user = [] if self._user is None else [(self._user, _CLONE_NEWUSER)]
            found = []
            # All are opened first: in the user namespace the owner's descriptors are out of reach.
            for held, kind in (*user, (self._networks[self._index(machine)], _CLONE_NEWNET)):
                try:
                    descriptor = os.open(self._path(held), os.O_RDONLY | os.O_CLOEXEC)
                except OSError as error:
                    raise UnsupportedError(
                        f"machine {machine} of the lab cannot be entered: {error.strerror}; the"
                        f" process {self._owner} that made it has left its context, or is another"
                        " user's"
                    ) from error
                opened.callback(os.close, descriptor)
                found.append((descriptor, kind))
            libc = ctypes.CDLL(None, use_errno=True)
            for descriptor, kind in found:
                if libc.setns(descriptor, kind):
                    reason = os.strerror(ctypes.get_errno())
                    raise UnsupportedError(
                        f"machine {machine} of the lab cannot be entered: setns: {reason}"
                    )

    def address(self, machine: int) -> str:
        """Return a machine's IPv4 address."""
        return str(_NETWORK[self._index(machine) + 1])

    def sent_bytes(self, machine: int) -> int:
        """Return the bytes that a machine has sent, headers of packets before segmentation too.

        Without root, a process that has entered a machine cannot read it.
        """
        return self._count(machine, "tx")

    def received_bytes(self, machine: int) -> int:
        """Return the bytes that a machine has received; see `sent_bytes`."""
        return self._count(machine, "rx")

    def limits(self, machine: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the kernel's report on the limits of a machine's link, sending and receiving.

        Each is an entry of ``tc -s -j qdisc``: rates in bytes per second, counters and drops.
        """
        own, switch = self._networks[self._index(machine)], self._networks[-1]
        places = ((own, self.interface), (switch, _port(machine)))
        sending, receiving = (
            next(
                entry
                for entry in json.loads(self._run(at, "tc", "-s", "-j", "qdisc", "show", "dev", d))
                if entry["kind"] == "tbf"
            )
            for at, d in places
        )
        return sending, receiving

    # ---- inside ---------------------------------------------------------------------------------

    def _index(self, machine: int) -> int:
        if not 0 <= machine < self.machines:
            raise InvalidArgumentError(f"machine is {machine}; expected 0 to {self.machines - 1}")
        return machine

    def _add_network(self) -> None:
        """Create a network namespace, and without root first a user namespace to own all."""
        create = ["unshare", "--net", "sh", "-c", f"{_SET}exec cat"]
        if os.geteuid() != 0:
            if self._user is None:
                create[1:1] = ["--user", "--map-root-user"]
            else:
                create[:0] = self._nsenter()
        pipe = subprocess.PIPE
        # Without a buffer: what a refusal leaves unwritten would be written again at the end.
        with subprocess.Popen(
            create, bufsize=0, stdin=pipe, stdout=pipe, stderr=pipe, pass_fds=self._inherited
        ) as holder:
            # It answers from inside; from then on descriptors hold the namespaces.
            assert holder.stdin is not None
            assert holder.stdout is not None
            assert holder.stderr is not None
            with contextlib.suppress(BrokenPipeError):
                holder.stdin.write(b"\n")
            if not holder.stdout.read(1):
                reason = holder.stderr.read().decode(errors="replace").strip()
                raise UnsupportedError(
                    f"this process may not create network namespaces: {reason}; a lab needs root"
                    " with CAP_SYS_ADMIN and CAP_NET_ADMIN, or user namespaces for everybody"
                )
            of_holder = f"/proc/{holder.pid}/ns/"
            if os.geteuid() != 0 and self._user is None:
                self._user = os.open(of_holder + "user", os.O_RDONLY | os.O_CLOEXEC)
            self._networks.append(os.open(of_holder + "net", os.O_RDONLY | os.O_CLOEXEC))

    def _build(self) -> None:
        """Connect the machines with the switch, and limit the links."""
        *machines, switch = self._networks
        rate = self.gbit * 1e9 / 8
        ahead = max(_LEAST_AHEAD, int(rate * _AHEAD_SECONDS))
        # Two delays: there, and back.
        window = max(_LEAST_WINDOW, int(rate * (_WINDOW_SECONDS + 2e-6 * self.delay_us)))
        largest = min(ahead // 2, 65536)  # packets, before they are segmented
        # The kernel counts a receiver's memory at up to twice the bytes of its window.
        queue = min(4 * window * max(2, self.machines), _LONGEST_QUEUE)
        limit = f"tbf rate {round(8 * rate)}bit burst {ahead} limit {queue}"
        self._batch(switch, "ip", ["link add bridge type bridge mcast_snooping 0"])
        for i, machine in enumerate(machines):
            own, port = self.interface, _port(i)
            sizes = f"mtu {_MTU} gso_max_size {largest}"
            link = [
                f"link add {own} {sizes} type veth"
                f" peer name {port} {sizes} netns {self._path(switch)}",
                f"addr add {self.address(i)}/{_NETWORK.prefixlen} dev {own}",
                "link set lo up",
                f"link set {own} up",
                f"route replace {_NETWORK} dev {own} src {self.address(i)} congctl reno"
                f" window {window}",
            ]
            self._batch(machine, "ip", link)
            root = f"qdisc add dev {own} root handle 1:"
            delayed = [
                f"{root} netem delay {self.delay_us}us limit 1000000",
                f"qdisc add dev {own} parent 1:1 handle 10: {limit}",
            ]
            self._batch(machine, "tc", delayed if self.delay_us else [f"{root} {limit}"])
            self._batch(switch, "ip", [f"link set {port} master bridge up"])
            self._batch(switch, "tc", [f"qdisc add dev {port} root handle 1: {limit}"])
        self._batch(switch, "ip", [f"link set bridge mtu {_MTU} up"])

    def _count(self, machine: int, direction: str) -> int:
        text = self._run(
            self._networks[self._index(machine)],
            *("ip", "-s", "-j", "link", "show", "dev", self.interface),
        )
        return int(json.loads(text)[0]["stats64"][direction]["bytes"])

    def _batch(self, network: int, program: str, lines: Sequence[str]) -> None:
        self._run(network, program, "-batch", "-", text="".join(f"{line}\n" for line in lines))

    def _run(self, network: int, *command: str, text: str = "") -> str:
        """Run a program in a namespace; return what it prints."""
        done = subprocess.run(
            [*self._nsenter(network), *command],
            input=text,
            capture_output=True,
            text=True,
            check=False,
            pass_fds=self._inherited,
        )
        if done.returncode:
            raise UnsupportedError(
                f"a lab of network namespaces cannot be made or read here: {' '.join(command)}:"
                f" {done.stderr.strip()}" + (f" (of {text.strip()!r})" if text else "")
            )
        return done.stdout

    def _nsenter(self, network: int | None = None) -> list[str]:
        """Return the start of a command that runs in a namespace."""
        user = [] if self._user is None else [f"--user={self._path(self._user)}"]
        net = [] if network is None else [f"--net={self._path(network)}"]
        return ["nsenter", "--preserve-credentials", *user, *net, "--"]

    @property
    def _held(self) -> list[int]:
        return [*self._networks, *([] if self._user is None else [self._user])]

    @property
    def _inherited(self) -> list[int]:
        """Return the descriptors for programs that the owner starts.

        In the user namespace they could not open the owner's.
        """
        return self._held if os.getpid() == self._owner else []

    def _path(self, descriptor: int) -> str:
        process = "self" if self._inherited else self._owner
        return f"/proc/{process}/fd/{descriptor}"

    def _release(self) -> None:
        for descriptor in self._held:
            os.close(descriptor)
        self._networks, self._user = [], None


def _port(machine: int) -> str:
    return f"port{machine}"


@functools.cache
def lab_problem(*, delay_us: float = 0) -> str | None:
    """Return why a `Lab` cannot be made here; None if it can. Makes a small one."""
    try:
        with Lab(machines=1, delay_us=delay_us):
            return None
    except UnsupportedError as error:
        return str(error)
