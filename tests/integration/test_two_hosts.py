"""Two hosts, which two network namespaces play: each has an address of its own, and a cable to the
other that can be cut.
"""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from commands import Job, script
from test_stopped_runs import OPTIONS, same, saved_steps, started
from tiny import NO_VALIDATION, every, steps

pytestmark = [pytest.mark.release, pytest.mark.ranks(2)]

LIMIT = 30  # seconds: longer than a busy machine stops a rank that is well
SCHEDULE = 100_000  # steps: however fast the machine is, there is a next one
LONGER = [*OPTIONS, *every(4), *NO_VALIDATION, f"--comm.train_timeout_seconds={LIMIT}"]
ENDLESS = steps(SCHEDULE)


def ip(*command):
    subprocess.run(["ip", *command], check=True, capture_output=True, text=True)


class Hosts:
    names = (f"titan-{os.getpid()}-0", f"titan-{os.getpid()}-1")
    addresses = ("10.231.7.1", "10.231.7.2")

    def __init__(self):
        self.jobs = []

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
        for job in self.jobs:
            job.__exit__()
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
        self.jobs += launchers
        return launchers

    def start_groups(self, folder, *options):
        """A lighthouse on the first, and one replica group on each, of one rank."""
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
        self.jobs.append(lighthouse)
        lighthouse.until("lighthouse: ")
        groups = []
        for number, name in enumerate(self.names):
            command = ["ip", "netns", "exec", name, *script(folder, *options)]
            address = f"--fault_tolerance.lighthouse=http://{self.addresses[0]}:29510"
            variables = {"NCOPIES": 2, "COPY": number, "NGPU": 1, "GLOO_SOCKET_IFNAME": "cable"}
            groups.append(Job(f"{folder}-{number}.log", *command, address, **variables))
        self.jobs += groups
        return [lighthouse, *groups]


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


def test_with_restarts_both_meet_again_when_the_cable_is_mended(hosts, tmp_path):
    folder = tmp_path / "run"
    first, second = hosts.start(folder, *ENDLESS, restarts=2)
    first.logged(5)
    hosts.cable("down")
    hang = rf"rank \d has made no progress for {LIMIT} s in step \d+"
    first.until(hang, 300)
    second.until(hang, 300)
    reached = max(int(step) for step in re.findall(r"step +(\d+)  loss", first.output))
    hosts.cable("up")
    first.until("restart 1 of 2", 300)
    assert "hang: rank 0 has" in first.output
    assert "rank 1 gives no sign of life" in first.output
    assert "the store at 10.231.7.1:" in second.output  # which rank 0 has, and nobody can reach
    first.logged(reached + 10)
    first.process.send_signal(signal.SIGTERM)
    assert [first.ended(), second.ended()] == [75, 75]

    alone, last = tmp_path / "alone", saved_steps(folder)[-1]
    assert started(alone, *LONGER, *steps(last, schedule=SCHEDULE)).ended() == 0
    same(folder, alone)


def test_a_group_whose_cable_is_cut_is_left_out_and_joins_when_it_is_mended(hosts, tmp_path):
    pytest.importorskip("torchft")
    folder = tmp_path / "run"
    options = [*OPTIONS, *ENDLESS, *NO_VALIDATION, "--checkpoint.interval=100"]
    options += ["--training.compare_replicas_freq=1", f"--fault_tolerance.timeout_seconds={LIMIT}"]
    lighthouse, first, second = hosts.start_groups(folder, *options)
    with lighthouse, first, second:
        first.until("2 of 2 groups take part")
        hosts.cable("down")
        left = r"1 of 2 groups take part from step \d+ on, 2 before"
        first.until(left, 300)
        second.until(r"waiting for the lighthouse \S+, which does not answer", 300)
        hosts.cable("up")
        first.until(rf"(?s){left}.* 2 of 2 groups take part")
        second.until(
            r"(?s)waiting for the lighthouse.*group 1 resumes from step \d+ of a living group"
        )
        first.process.send_signal(signal.SIGTERM)
        assert [first.ended(), second.ended()] == [75, 75]
    assert "are not equal" not in first.output + second.output
    assert saved_steps(folder)
