"""scripts/train.slurm on a Slurm of two nodes, which this machine plays: a controller, two daemons
and a munge of their own.
"""

import getpass
import os
import re
import shutil
import socket
import subprocess
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import pytest
from commands import ENVIRONMENT
from test_stopped_runs import OPTIONS, same, saved_steps
from tiny import ROOT, every, steps

pytestmark = [pytest.mark.slurm, pytest.mark.ranks(2)]

STEPS = 400  # so many that a run is not done before it is signalled
LONGER = [*OPTIONS, *steps(STEPS), *every(20, validated=20, batches=2)]
CONF = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={ports[0]}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
CredType=cred/munge
AuthInfo=socket={folder}/munge.socket
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/%n
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/%n.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
MpiDefault=none
SlurmdTimeout=60
SchedulerParameters=sched_interval=1,bf_interval=1
ReturnToService=2
NodeName=n0 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[1]} CPUs=1
NodeName=n1 NodeHostname={host} NodeAddr=127.0.0.1 Port={ports[2]} CPUs=1
PartitionName=all Nodes=n0,n1 Default=YES MaxTime=INFINITE State=UP
"""


def free_ports(count):
    with ExitStack() as stack:
        sockets = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]


def until(condition, told, seconds=120):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)


class Cluster:
    """Its folder has slurm.conf and the daemons' logs."""

    def __init__(self, folder):
        self.folder, self.daemons = folder, {}
        self.environment = {
            **os.environ,
            **ENVIRONMENT,
            "NGPU": "1",
            "SLURM_CONF": f"{folder}/slurm.conf",
        }
        conf = CONF.format(
            host=socket.gethostname().partition(".")[0],
            ports=free_ports(3),
            user=getpass.getuser(),
            folder=folder,
        )
        (folder / "slurm.conf").write_text(conf)
        (folder / "state").mkdir()
        (folder / "munge.key").touch(0o600)
        (folder / "munge.key").write_bytes(os.urandom(128))

    def start(self):
        files = {
            "socket": "socket",
            "key-file": "key",
            "pid-file": "pid",
            "seed-file": "seed",
            "log-file": "log",
        }
        self.daemon(
            "munged",
            "--foreground",
            "--force",
            *(f"--{key}={self.folder}/munge.{end}" for key, end in files.items()),
        )
        until((self.folder / "munge.socket").exists, self.logs)
        self.daemon("slurmctld", "-D", "-c")
        for node in ("n0", "n1"):
            self.node(node)
        self.idle()

    def idle(self):
        until(
            lambda: (
                self.run("sinfo", "--noheader", "--format", "%T %D", check=False).strip()
                == "idle 2"
            ),
            self.logs,
        )

    def node(self, name):
        self.daemon("slurmd", "-D", "-N", name, name=name)

    def daemon(self, program, *arguments, name=""):
        with open(self.folder / f"{name or program}.log", "a") as log:
            # A session of its own: an interrupt of pytest is not theirs.
            process = subprocess.Popen(
                [shutil.which(program) or f"/usr/sbin/{program}", *arguments],
                env=self.environment,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self.daemons[name or program] = process

    def stop(self):
        self.run("scancel", "--user", getpass.getuser(), check=False)
        self.run("scancel", "--signal", "KILL", "--full", "--user", getpass.getuser(), check=False)
        until(lambda: not self.run("squeue", "--noheader", check=False), self.logs)
        for daemon in reversed(self.daemons.values()):
            daemon.terminate()
            daemon.wait(120)

    def run(self, *command, check=True):
        done = subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )
        assert not check or done.returncode == 0, (
            f"{command}: {done.stdout}{done.stderr}{self.logs()}"
        )
        return done.stdout

    def logs(self):
        return "\n".join(
            f"== {log.name}\n{log.read_text()[-4000:]}" for log in sorted(self.folder.glob("*.log"))
        )

    def sbatch(self, folder, *options, slurm=(), **variables):
        return Job(self, Path(folder), options, slurm, variables)


class Job:
    def __init__(self, cluster, folder, options, slurm, variables):
        self.cluster, self.folder = cluster, folder
        folder.mkdir(parents=True)
        command = [
            "sbatch",
            "--parsable",
            "--nodes",
            "2",
            "--exclusive",
            "--mem",
            "0",
            f"--chdir={ROOT}",
            f"--output={folder}/job.log",
            *slurm,
        ]
        variables = {"LOGS": f"{folder}/logs", **variables}
        command += [
            f"--export={','.join(['ALL', *(f'{name}={value}' for name, value in variables.items())])}"
        ]
        command += [
            f"{ROOT}/scripts/train.slurm",
            "train_configs/debug_model.toml",
            *LONGER,
            *options,
        ]
        self.number = cluster.run(*command, "--job.dump_folder", f"{folder}/run").strip()

    def __getitem__(self, key):
        """Return a field of `scontrol show job`, such as JobState."""
        return re.search(
            rf"\b{key}=(\S+)", self.cluster.run("scontrol", "show", "job", self.number)
        )[1]

    @property
    def output(self):
        logs = [self.folder / "job.log", *sorted(self.folder.glob("logs/*"))]
        return "\n".join(f"== {log.name}\n{log.read_text()}" for log in logs if log.exists())

    def told(self):
        return f"{self.cluster.run('scontrol', 'show', 'job', self.number)}{self.output}{self.cluster.logs()}"

    def until(self, *states):
        until(lambda: self["JobState"] in states, self.told)

    def logged(self, step):
        until(
            lambda: re.search(rf"step +{step}  loss", self.output) or self["JobState"] == "FAILED",
            self.told,
        )

    def goes_on(self):
        """Back in the queue, where Slurm would let it wait two minutes; it rejects what starts in
        the second of the requeue.
        """
        until(lambda: self["Restarts"] == "1" and self["JobState"] == "PENDING", self.told)
        self.cluster.idle()
        self.cluster.run("scontrol", "update", f"JobId={self.number}", "StartTime=now+3")

    def ends(self):
        until(
            lambda: self["JobState"] not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"),
            self.told,
            240,
        )
        print(self.told())
        return self["JobState"], self["ExitCode"]


@pytest.fixture(scope="module")
def cluster():
    for program in ("munged", "slurmctld", "slurmd"):
        if not (shutil.which(program) or Path(f"/usr/sbin/{program}").exists()):
            pytest.skip(f"needs Slurm's daemons: no {program} here")
    # not pytest's folder, whose path may be too long for a socket
    with tempfile.TemporaryDirectory(prefix="slurm-") as folder:
        started = Cluster(Path(folder))
        try:
            started.start()
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="module")
def alone(cluster, tmp_path_factory):
    job = cluster.sbatch(tmp_path_factory.mktemp("alone") / "job")
    assert job.ends() == ("COMPLETED", "0:0")
    return job


@pytest.mark.release
def test_two_nodes_train_to_the_end_and_a_signal_requeues_the_job_which_goes_on_exactly(
    alone, cluster, tmp_path
):
    assert "on n0 n1; rendezvous at 127.0.0.1:" in alone.output
    logs = sorted((alone.folder / "logs").iterdir())
    assert [log.name[:2] for log in logs] == ["0-", "1-"]  # and the host's name
    # the first rank, which tells it, is on the node that met the other one first
    assert f"done: step {STEPS}" in "".join(log.read_text() for log in logs)

    job = cluster.sbatch(tmp_path / "job")
    job.logged(5)
    cluster.run(
        "scancel", "--signal", "USR1", job.number
    )  # as `--signal` does, and a preemption with send_user_signal
    job.goes_on()
    told = (
        r"SIGUSR1 received by rank \d(?: and 1 other)? at step (\d+): saving, then exiting \(code"
        r" 75\)"
    )
    stopped = int(re.search(told, job.output)[1])
    assert saved_steps(job.folder / "run")[-1] == stopped < STEPS
    assert job.ends() == ("COMPLETED", "0:0")
    assert "stopped by a signal: back into the queue" in job.output
    assert f"job {job.number}, start 2, on n0 n1" in job.output
    same(job.folder / "run", alone.folder / "run")


def test_what_another_start_would_not_mend_is_not_requeued(cluster, tmp_path):
    job = cluster.sbatch(tmp_path / "job", "--model.flavor", "7B")
    assert job.ends() == ("FAILED", "2:0")
    assert 'error: model.flavor = "7B"' in job.output
    assert job["Restarts"] == "0"

    job = cluster.sbatch(tmp_path / "venv", VENV="/nowhere")
    assert job.ends() == ("FAILED", "2:0")
    assert "error: VENV=/nowhere: no bin/activate there" in job.output


@pytest.mark.release
def test_a_job_that_somebody_cancels_is_saved_and_not_requeued(cluster, tmp_path):
    job = cluster.sbatch(tmp_path / "job")
    job.logged(5)
    cluster.run("scancel", job.number)
    assert job.ends()[0] == "CANCELLED"
    assert "saving, then exiting (code 75)" in job.output
    assert "back into the queue" not in job.output
    assert job["Restarts"] == "0"
    assert saved_steps(job.folder / "run")[-1] >= 5
