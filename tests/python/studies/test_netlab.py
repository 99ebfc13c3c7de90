"""Machines in network namespaces: what crosses their links, the limits, and how a lab ends."""

from __future__ import annotations

import inspect
import multiprocessing as mp
import os
import signal
import socket
import subprocess
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from benched import baselines_of, bench, modes_of, settings_of

from studies.netlab import lab as netlab
from studies.netlab.lab import Lab, lab_problem
from ultraep_comm.errors import InvalidArgumentError, UnsupportedError

FORKSERVER = mp.get_context("forkserver")
SENT = (4 << 20, 1 << 20)  # by machine
needs_lab = pytest.mark.skipif(lab_problem() is not None, reason=str(lab_problem()))


def exchange(lab: Lab, sent: tuple[int, int]) -> None:
    """Send bytes between machines 0 and 1, from processes that enter them."""
    reading, writing = os.pipe()
    processes = []
    for machine in (0, 1):
        processes.append(os.fork())
        if processes[-1]:
            continue
        status = 1
        try:
            signal.alarm(60)
            lab.enter(machine)
            if machine == 0:
                server = socket.create_server((lab.address(0), 5000))
                os.write(writing, b"x")
                peer = server.accept()[0]
                peer.sendall(bytes(sent[0]))
                assert len(peer.makefile("rb").read(sent[1])) == sent[1]
            else:
                os.read(reading, 1)
                peer = socket.create_connection((lab.address(0), 5000))
                assert peer.getsockname()[0] == lab.address(1)
                assert len(peer.makefile("rb").read(sent[0])) == sent[0]
                peer.sendall(bytes(sent[1]))
            status = 0
        finally:
            os._exit(status)
    assert [os.waitpid(process, 0)[1] for process in processes] == [0, 0]
    for machine, other in ((0, 1), (1, 0)):
        assert sent[machine] <= lab.sent_bytes(machine) < 1.05 * sent[machine]
        assert sent[other] <= lab.received_bytes(machine) < 1.05 * sent[other]


@needs_lab
def test_bytes_between_machines_and_their_limits() -> None:
    with Lab(machines=3, gbit=0.5) as lab:
        exchange(lab, SENT)
        assert max(lab.sent_bytes(2), lab.received_bytes(2)) < 1024  # a switch, not a hub
        held_back = 0
        for machine in range(3):
            for limit in lab.limits(machine):
                assert limit["options"]["rate"] == 0.5e9 / 8
                assert limit["drops"] == 0
                held_back += limit["overlimits"]
        assert held_back > 0


def names_of_interfaces(lab: Lab, found: Connection) -> None:
    lab.enter(0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()  # loopback works
    found.send([name for _, name in socket.if_nameindex()])


@needs_lab
def test_a_machine_has_nothing_but_its_link() -> None:
    def outside() -> object:
        names = Path("/run/netns")
        return socket.if_nameindex(), sorted(names.iterdir()) if names.is_dir() else []

    before = outside()
    with Lab(machines=1) as lab:
        assert outside() == before
        found, tell = mp.Pipe(duplex=False)
        process = FORKSERVER.Process(target=names_of_interfaces, args=(lab, tell), daemon=True)
        process.start()
        assert sorted(found.recv()) == [lab.interface, "lo"]
        process.join(60)
    assert outside() == before


def test_the_limits_of_a_link_are_documented() -> None:
    text = " ".join((Path(__file__).parents[3] / "bench" / "METRICS.md").read_text().split())
    burst = (
        f"`{netlab._LEAST_AHEAD >> 10} KiB` or `{1e6 * netlab._AHEAD_SECONDS:.0f} us` of its rate"
    )
    assert f"An idle link may burst {burst}, whichever is more" in text
    window = f"`{1e3 * netlab._WINDOW_SECONDS:.0f} ms` of the rate"
    assert f"a connection's window is {window}, at least {netlab._LEAST_WINDOW >> 10} KiB" in text


def own_a_lab(tell: Connection, until: Connection) -> None:
    with Lab(machines=1) as lab:
        tell.send(lab)
        until.recv()
    tell.send(None)
    until.recv()


@needs_lab
@pytest.mark.skipif(os.geteuid() != 0, reason="joins two labs, which takes root")
@pytest.mark.parametrize("killed", [False, True])
def test_a_lab_ends_with_its_context_or_its_owner(killed: bool) -> None:
    """The kernel removes both ends of a link when the namespace of one of them is gone."""
    with Lab(machines=1) as outer:
        lab_of, tell = mp.Pipe(duplex=False)
        until, let_go = mp.Pipe(duplex=False)
        owner = FORKSERVER.Process(target=own_a_lab, args=(tell, until), daemon=True)
        owner.start()
        lab = lab_of.recv()
        for name, network in zip(("machine", "switch"), lab._networks, strict=True):
            peer = ("type", "veth", "peer", "name", "canary", "netns", lab._path(network))
            outer._run(outer._networks[0], "ip", "link", "add", name, *peer)
        assert owner.pid is not None
        if killed:
            os.kill(owner.pid, signal.SIGKILL)
            owner.join(60)
        else:
            let_go.send(None)
            assert lab_of.recv() is None
        for _ in range(1000):  # the kernel removes them soon after
            shown = outer._run(outer._networks[0], "ip", "-br", "link")
            if "machine" not in shown and "switch" not in shown:
                break
            time.sleep(0.01)
        else:
            pytest.fail(f"the lab is still there: {shown}")
        with pytest.raises(UnsupportedError, match="cannot be entered"):
            lab.enter(0)
        let_go.close()
        owner.kill()
        owner.join()


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"machines": 0}, "machines is 0"),
        ({"gbit": 0.0}, "gbit is 0.0"),
        ({"delay_us": -1}, "delay_us is -1"),
    ],
)
def test_values_out_of_range(values: dict[str, float], text: str) -> None:
    with pytest.raises(InvalidArgumentError, match=text):
        Lab(**values)


@needs_lab
def test_a_limit_that_the_kernel_refuses_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(netlab, "_MTU", 1)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(UnsupportedError, match="mtu 1"):
        Lab(machines=1).__enter__()
    assert os.listdir("/proc/self/fd") == before


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes another user, which takes root")
def test_an_ordinary_user_has_a_lab_where_user_namespaces_are_allowed() -> None:
    nobody = {"user": 65534, "group": 65534, "extra_groups": ()}
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}

    def run(program: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", program]
        return subprocess.run(
            command, capture_output=True, text=True, check=False, cwd="/", env=environment, **nobody
        )

    try:
        problem = run("from studies.netlab.lab import lab_problem; print(lab_problem())")
    except PermissionError as error:
        pytest.skip(f"another user may not run this Python: {error}")
    if problem.stdout.strip() != "None":
        pytest.skip(f"another user has none: {problem.stdout or problem.stderr}")
    done = run(AS_A_USER)
    assert done.returncode == 0, done.stderr


AS_A_USER = f"""
import os, signal, socket
from studies.netlab.lab import Lab
{inspect.getsource(exchange)}
with Lab(machines=2) as lab:
    exchange(lab, {SENT})
"""


# ---- the command --------------------------------------------------------------------------------


@pytest.mark.parametrize("given", ["replicate --engine host", "replicate --engine=cuda", "plan"])
def test_other_engines_are_refused(given: str) -> None:
    with pytest.raises(InvalidArgumentError, match="expected a command with --engine c10d"):
        settings_of("netlab", *given.split())


def test_a_command_without_a_lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    done = bench(tmp_path, "netlab", "replicate")
    needed = "a lab of network namespaces needs the program ip; install iproute2"
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"error: {needed}\n")


@needs_lab
def test_nothing_beats_the_links_of_a_lab(tmp_path: Path) -> None:
    """A link may be ahead by 80 KiB, and a byte passes two limits: here, a third of an expert."""
    few = ["-b", "512K", "-n", "1", "-w", "0", "--check", "--json", "o.json"]
    done = bench(tmp_path, "netlab", "--gbit", "0.4", "replicate", *few)
    assert done.returncode == 0, done.stderr
    assert "# netlab: 4 machines, each with a link of 0.4 Gbit/s, one way" in done.stdout
    document = done.document()
    assert document["settings"]["link_gbps"] == pytest.approx(0.05)
    assert {place["domain"] for place in document["topology"]} == {0}  # each has a machine
    for record in modes_of(document):
        experts = record["bound_us"] * 0.05e3 / record["expert_bytes"]
        assert experts >= 1
        assert record["over_bound"] > 1 - 1 / 3 / experts
    for baseline in baselines_of(document):
        assert baseline["time_us"]["p50"] > 2 / 3 * record["bound_us"]
