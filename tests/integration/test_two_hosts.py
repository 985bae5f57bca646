"""Two hosts, which two network namespaces play: each has an address of its own, and a cable to the
other that can be cut.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import Job, script
from test_stopped_runs import OPTIONS, same, saved_steps, started
from tiny import every, steps

pytestmark = [pytest.mark.slow, pytest.mark.ranks(2)]

STEPS, LIMIT = 60, 4
LONGER = [*OPTIONS, *steps(STEPS), *every(4, validated=60), f"--comm.train_timeout_seconds={LIMIT}"]


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


class Hosts:
    names = (f"titan-{os.getpid()}-0", f"titan-{os.getpid()}-1")
    addresses = ("10.231.7.1", "10.231.7.2")

    def connect(self):
        for name in self.names:
            ip("netns", "add", name)
        first, second = self.names
        ip(
            "link",
            "add",
            "cable",
            "netns",
            first,
            "type",
            "veth",
            "peer",
            "name",
            "cable",
            "netns",
            second,
        )
        for name, address in zip(self.names, self.addresses, strict=True):
            ip("-n", name, "addr", "add", f"{address}/24", "dev", "cable")
            ip("-n", name, "link", "set", "lo", "up")
        self.cable("up")

    def cable(self, state):
        for name in self.names[:: 1 if state == "up" else -1]:
            ip("-n", name, "link", "set", "cable", state)

    def remove(self):
        for name in self.names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)

    def start(self, folder, *options, restarts=0):
        """One launcher on each, with one rank."""
        launchers = []
        for number, (name, address) in enumerate(zip(self.names, self.addresses, strict=True)):
            command = ["ip", "netns", "exec", name, *script(folder, *LONGER, *options)]
            nodes = {
                "NNODES": 2,
                "NGPU": 1,
                "NODE_RANK": number,
                "RDZV_ENDPOINT": f"{self.addresses[0]}:29500",
            }
            nodes |= {"LOCAL_ADDR": address, "MAX_RESTARTS": restarts}
            # gloo asks the host name for an address, which is this machine's for both
            launchers.append(
                Job(f"{folder}-{number}.log", *command, **nodes, GLOO_SOCKET_IFNAME="cable")
            )
        return launchers

    def start_copies(self, folder, *options):
        """A lighthouse on the first, and one copy of the model on each, of one rank."""
        serve = [sys.executable, "-m", "titan_lite.lighthouse", "--host", self.addresses[0]]
        lighthouse = Job(
            f"{folder}-lighthouse.log",
            "ip",
            "netns",
            "exec",
            self.names[0],
            *serve,
            PYTHONSAFEPATH=1,
        )
        lighthouse.until("lighthouse: ")
        copies = []
        for number, name in enumerate(self.names):
            command = ["ip", "netns", "exec", name, *script(folder, *options)]
            address = f"--fault_tolerance.lighthouse=http://{self.addresses[0]}:29510"
            variables = {"NCOPIES": 2, "COPY": number, "NGPU": 1, "GLOO_SOCKET_IFNAME": "cable"}
            copies.append(Job(f"{folder}-{number}.log", *command, address, **variables))
        return [lighthouse, *copies]


@pytest.fixture
def hosts():
    if shutil.which("ip") is None:
        pytest.skip("needs iproute2: no ip here")
    hosts = Hosts()
    try:
        hosts.connect()
    except subprocess.CalledProcessError as error:
        hosts.remove()
        pytest.skip(f"needs network namespaces: {error.stderr.strip()}")
    yield hosts
    hosts.remove()


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    assert started(folder, *LONGER).ended() == 0
    return folder


def test_a_cable_that_is_cut_ends_both_with_a_message_and_another_start_goes_on_exactly(
    alone, hosts, tmp_path
):
    folder = tmp_path / "run"
    first, second = hosts.start(folder)
    first.logged(5)
    hosts.cable("down")
    codes = [first.ended(), second.ended()]
    assert codes == [1, 1]
    for launcher in (first, second):
        assert re.search(
            rf"hang: rank \d has made no progress for {LIMIT} s in step \d+", launcher.output
        )
        assert re.search(
            r"error: (rank \d ended with exit code 1|the ranks here have failed, and the other"
            r" nodes)",
            launcher.output,
        )
    assert "rank 1 gives no sign of life" in first.output
    assert "the store at 10.231.7.1:" in second.output  # which rank 0 has, and nobody can reach
    saved = saved_steps(folder)[-1]
    assert 4 <= saved < STEPS

    hosts.cable("up")
    first, second = hosts.start(folder, "--checkpoint.must_resume")
    assert [first.ended(), second.ended()] == [0, 0]
    same(folder, alone)


def test_a_cable_that_is_cut_for_a_moment_is_not_noticed(alone, hosts, tmp_path):
    folder = tmp_path / "run"
    first, second = hosts.start(folder)
    first.logged(5)
    hosts.cable("down")
    time.sleep(1)
    hosts.cable("up")
    assert [first.ended(), second.ended()] == [0, 0]
    assert "hang" not in first.output + second.output
    same(folder, alone)


def test_with_restarts_both_meet_again_when_the_cable_is_mended(alone, hosts, tmp_path):
    folder = tmp_path / "run"
    first, second = hosts.start(folder, restarts=2)
    first.logged(5)
    hosts.cable("down")
    until = time.monotonic() + 60
    while time.monotonic() < until and not (
        "failed (exitcode: 1)" in first.output and "hang:" in second.output
    ):
        time.sleep(0.1)
    hosts.cable("up")
    assert [first.ended(), second.ended()] == [0, 0]
    assert "restart 1 of 2" in first.output
    same(folder, alone)


@pytest.mark.parametrize("killed", [1, 0])  # at the launcher of 0 the nodes meet
def test_a_launcher_that_is_killed_on_one_host_stops_both_saved(killed, hosts, tmp_path):
    folder = tmp_path / "run"
    endless = [
        *steps(100_000, schedule=-1),
        "--validation.no-enable",
        "--checkpoint.interval=100000",
    ]
    launchers = hosts.start(folder, *endless, "--comm.train_timeout_seconds=60")
    launchers[0].logged(3)
    launchers[killed].process.kill()
    assert launchers[1 - killed].ended() == 75
    launchers[killed].process.wait()
    launchers[0].until("stopped: step ")
    assert f"the death of its launcher noticed by rank {killed} at step" in launchers[0].output
    assert saved_steps(folder)


def test_a_copy_whose_cable_is_cut_is_left_out_and_joins_when_it_is_mended(hosts, tmp_path):
    pytest.importorskip("torchft")
    folder = tmp_path / "run"
    options = [*OPTIONS, *steps(100_000), "--validation.no-enable", "--checkpoint.interval=100"]
    options += ["--training.compare_copies_freq=1", f"--fault_tolerance.timeout_seconds={LIMIT}"]
    lighthouse, first, second = hosts.start_copies(folder, *options)
    with lighthouse, first, second:
        first.until("2 of 2 copies take part")
        hosts.cable("down")
        left = r"1 of 2 copies take part from step \d+ on, 2 before"
        first.until(left)
        second.until(r"waiting for the lighthouse \S+, which does not answer")
        hosts.cable("up")
        first.until(rf"(?s){left}.* 2 of 2 copies take part")
        second.until(
            r"(?s)waiting for the lighthouse.*copy 1 goes on from step \d+ of a living copy"
        )
        first.process.send_signal(signal.SIGTERM)
        assert [first.ended(), second.ended()] == [75, 75]
    assert "are not equal" not in first.output + second.output
    assert saved_steps(folder)
