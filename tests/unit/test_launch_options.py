"""The processes of this machine: the environment variables, the GPUs and the command that goes on."""

import os
import socket
from contextlib import contextmanager
from unittest.mock import Mock

import pytest
from torch.distributed import run
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousTimeoutError

from titan_lite import launch as start
from titan_lite.config import ConfigError, load_config
from titan_lite.config.errors import MachineError
from titan_lite.distributed import endpoint
from titan_lite.metrics.run_files import read_events
from titan_lite.resilience import exit_code

NODE = os.uname().nodename


@pytest.fixture(autouse=True)
def environment(monkeypatch):
    monkeypatch.setattr(os, "environ", {"PATH": os.environ["PATH"], "CUDA_VISIBLE_DEVICES": ""})
    return os.environ


@pytest.fixture
def program(monkeypatch, tmp_path, environment):
    """Put a program on the PATH: program(name, a line of sh)."""
    environment["PATH"] = f"{tmp_path}:{environment['PATH']}"

    def write(name, line):
        (tmp_path / name).write_text(f"#!/bin/sh\n{line}\n")
        (tmp_path / name).chmod(0o755)

    return write


@pytest.mark.parametrize("visible", ["", "-1", ",0"])
def test_no_gpus_are_counted_where_the_cpu_is_wanted(visible, environment, program):
    program("nvidia-smi", "echo GPU 0")
    environment["CUDA_VISIBLE_DEVICES"] = visible
    assert start.count_gpus() == 0


def test_options_of_several_nodes(environment):
    environment |= {
        "NNODES": "2",
        "RDZV_ENDPOINT": "node0:29500",
        "NODE_RANK": "1",
        "LOCAL_ADDR": "10.0.0.2",
    }
    nodes, options = start.check_variables()
    assert nodes == "2"
    assert (
        " ".join(options)
        == "--rdzv-backend c10d --rdzv-endpoint node0:29500 --rdzv-id titan_lite --local-addr"
        " 10.0.0.2 --rdzv-conf is_host=false"
    )


def test_a_node_says_for_whom_it_waits(environment, capfd):
    environment |= {"NNODES": "2", "RDZV_ENDPOINT": "localhost:29500", "NGPU": "1"}
    start.launcher_options(["debug_model"])
    assert (
        "starting 1 CPU process: debug_model; waiting for 2 nodes at localhost:29500\n"
        in capfd.readouterr().out
    )


@pytest.mark.parametrize(
    ("code", "variables", "kind", "words"),
    [
        (-9, {}, "killed", "rank 1 was killed by SIGKILL"),
        (-11, {"COPY": "2"}, "copy killed", "group 2: rank 1 was killed by SIGSEGV"),
        (-9, {"NNODES": "2"}, "killed", f"on {NODE} local rank 1 was killed by SIGKILL"),
        (1, {}, "", ""),  # such a rank says why itself
    ],
)
def test_a_kill_is_an_event_of_the_step_that_was_reached(
    code, variables, kind, words, environment, monkeypatch, tmp_path
):
    environment |= variables
    line = f"failed (exitcode: {code}) local_rank: 1 (pid: 7) of binary: python"
    monkeypatch.setattr(exit_code, "recorded", lambda: None)
    assert not start.keep_kill(line, tmp_path)
    assert list(tmp_path.iterdir()) == []  # the folder may be another run's
    monkeypatch.setattr(exit_code, "recorded", lambda: exit_code.FAILED)
    (tmp_path / "metrics.jsonl").write_text('{"step": 20}\n{"resumed_from": 10}\n{"step": 12}\n')
    assert not start.keep_kill(line, tmp_path)
    kept, _ = read_events(tmp_path / "events.jsonl")
    assert [(each["event"], each["step"], each["text"]) for each in kept] == (
        [(kind, 12, words)] if words else []
    )


def test_nodes_that_have_not_met_are_told_from_those_that_have_lost_each_other(
    environment, monkeypatch, capfd
):
    environment |= {"NNODES": "2", "RDZV_ENDPOINT": "node0:29500", "RDZV_ID": "mine"}
    monkeypatch.setattr(start, "leave_other_nodes", lambda may_restart: None)
    told = []
    for error in (RendezvousTimeoutError(), RendezvousError("gone\nand more")):
        monkeypatch.setattr(run, "main", Mock(side_effect=error))
        assert start.launch([], may_restart=False) == exit_code.FAILED
        told += capfd.readouterr().err.splitlines()
    not_met, lost = told
    assert not_met.startswith("error: the nodes have not met: one has ended with an error of its")
    assert "has not NNODES=2 RDZV_ENDPOINT=node0:29500 RDZV_ID=mine as this one" in not_met
    assert lost == "error: the launchers of the nodes have lost each other: gone"


def test_variables_that_are_empty_are_not_set(environment):
    environment |= {"NNODES": "", "NODE_RANK": "", "RDZV_ENDPOINT": ""}
    assert start.check_variables()[0] == "1"


@pytest.mark.parametrize("value", ["0", "abc", "1.5", "-2", "²", "1 2", "9" * 20])
def test_a_wrong_number_of_processes_is_refused(value, environment):
    environment["NGPU"] = value
    with pytest.raises(ConfigError, match=f"^NGPU={value}: expected the number of processes"):
        start.check_variables()


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"OMP_NUM_THREADS": "abc"}, "OMP_NUM_THREADS=abc: expected a number of threads"),
        ({"NNODES": "two"}, "NNODES=two: expected the number of nodes"),
        ({"NNODES": "2"}, "NNODES=2 needs RDZV_ENDPOINT=HOST:PORT"),
        ({"NNODES": "2:1"}, "NNODES=2:1: expected the fewest nodes before .* NNODES=1:2"),
        (
            {"NNODES": "2", "RDZV_ENDPOINT": "no.such.host.invalid:29500"},
            "RDZV_ENDPOINT=no.such.host.invalid:29500: this node knows no host",
        ),
        ({"MAX_RESTARTS": "-1"}, "MAX_RESTARTS=-1: expected a number"),
    ],
)
def test_a_wrong_variable_is_refused(variables, message, environment):
    environment |= variables
    with pytest.raises(ConfigError, match=f"^{message}"):
        start.launcher_options(["debug_model"])


def test_gpus_that_torch_cannot_use_are_an_error_but_where_the_cpu_is_wanted(environment, program):
    program("nvidia-smi", 'echo "GPU 0: NVIDIA H100"')
    torch_sees_none = environment.pop("CUDA_VISIBLE_DEVICES")
    with pytest.raises(ConfigError) as refused:
        start.launcher_options(["debug_model"])
    line = str(refused.value)
    assert "cannot use the GPUs of this node; install a torch built for its driver" in line
    assert "set CUDA_VISIBLE_DEVICES= for CPU processes" in line
    environment["CUDA_VISIBLE_DEVICES"] = torch_sees_none
    assert "-m" in start.launcher_options(["debug_model"])


def test_names_that_cannot_be_looked_up_now_are_no_mistake(monkeypatch):
    def away(*_, **__):
        raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")

    monkeypatch.setattr(socket, "getaddrinfo", away)
    with pytest.raises(MachineError, match=r"address of node0 cannot be looked up: .*Temporary"):
        start.split_endpoint("node0:29500")


def test_a_server_of_documents_that_is_away_is_exit_code_1(served, clock, monkeypatch, capfd):
    """Which MAX_RESTARTS and the launcher of groups start again."""
    monkeypatch.setattr(start, "listen", lambda: None)  # would block the signals of other tests
    served.fails(ConnectionResetError("it is away"), when=lambda: True)
    served.files["http://host/a.jsonl"] = b'{"text": "a"}\n'
    data = ["--data.dataset", "local", "--data.path", "http://host/a.jsonl"]
    assert start.main(["debug_model", *data]) == exit_code.FAILED
    (line,) = capfd.readouterr().err.splitlines()[-1:]
    assert line.startswith("error: http://host/a.jsonl cannot be read (ConnectionResetError: it is")


def test_more_processes_than_gpus_are_refused(environment, monkeypatch):
    monkeypatch.setattr(start, "count_gpus", lambda: 2)
    environment["NGPU"] = "4"
    with pytest.raises(
        ConfigError,
        match="NGPU=4 is more than the 2 GPUs here; use NGPU=2, or CUDA_VISIBLE_DEVICES= for CPU",
    ):
        start.launcher_options(["debug_model"])


def test_the_launcher_gets_the_gpus_and_the_recipe(environment, monkeypatch, capfd):
    monkeypatch.setattr(start, "count_gpus", lambda: 4)
    options = start.launcher_options(["debug_model", "--training.steps", "2"])
    assert options[:6] == ["--nnodes", "1", "--nproc-per-node", "4", "--max-restarts", "0"]
    assert options[-5:] == ["-m", "titan_lite.train", "debug_model", "--training.steps", "2"]
    assert "starting 4 GPU processes: debug_model\n" in capfd.readouterr().out
    assert environment["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    assert (environment["LOG_RANK"], environment["TORCH_NCCL_HIGH_PRIORITY"]) == ("0", "1")


@pytest.mark.parametrize("name", ["PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"])
def test_an_allocator_option_of_the_user_is_left(name, environment):
    environment[name] = "max_split_size_mb:64"
    start.set_environment(gpus=1, processes=1)
    assert {value for key, value in environment.items() if key.endswith("ALLOC_CONF")} == {
        "max_split_size_mb:64"
    }


def test_the_command_that_goes_on(environment):
    environment["NGPU"] = "4"
    start.set_command(["llama3_8b", "--job.description", "a b"])
    assert (
        environment["TITAN_LITE_COMMAND"]
        == "NGPU=4 titan-lite train llama3_8b --job.description 'a b'"
    )


def test_the_command_that_goes_on_is_that_of_the_script(environment):
    environment["NGPU"] = "4"
    environment["TITAN_LITE_COMMAND"] = "CONFIG_FILE=llama3_8b ./run_train.sh"
    start.set_command(["llama3_8b"])
    assert environment["TITAN_LITE_COMMAND"] == "NGPU=4 CONFIG_FILE=llama3_8b ./run_train.sh"


@pytest.mark.parametrize(
    ("has_gpus", "variables", "layout"),
    [(False, {}, True), (True, {}, False), (True, {"NGPU": "2"}, True)],
)
def test_a_wrong_recipe_is_told_before_gpus_are_counted(
    has_gpus, variables, layout, environment, monkeypatch
):
    """With its documents and tokenizer, and its layout where the number of ranks is known."""
    environment |= variables
    monkeypatch.setattr(start, "count_gpus", lambda: pytest.fail("counted"))
    monkeypatch.setattr(start, "has_gpus", lambda: has_gpus)
    options = ["--optimizer.lr=0", "--model.tokenizer_path=nowhere"]
    with pytest.raises(ConfigError) as error:
        start.launcher_options(["debug_model", *options, "--parallelism.tensor_parallel_degree=3"])
    lines = " ".join(error.value.args)
    assert "optimizer.lr = 0" in lines
    assert "model.tokenizer_path = " in lines
    assert ("parallelism.tensor_parallel_degree = 3" in lines) is layout


def test_a_node_alone_needs_no_host_name(environment):
    environment["RDZV_ENDPOINT"] = "no-such-host.invalid:29500"
    options = " ".join(start.launcher_options(["debug_model"]))
    assert "--rdzv-endpoint 127.0.0.1:0" in options
    assert "--local-addr 127.0.0.1" in options
    loopback = "lo" if "lo" in (name for _, name in socket.if_nameindex()) else None
    assert environment.get("GLOO_SOCKET_IFNAME") == loopback


def test_a_number_of_nodes_that_may_change_is_not_refused_on_cpus(environment, monkeypatch):
    del environment["CUDA_VISIBLE_DEVICES"]
    monkeypatch.setattr(start, "count_gpus", lambda: 0)
    options = ["--parallelism.data_parallel_shard_degree=1"]
    with free_port() as port:
        environment |= {"NNODES": "1:2", "NGPU": "1", "RDZV_ENDPOINT": f"127.0.0.1:{port}"}
        assert start.launcher_options(["debug_model", *options])[:2] == ["--nnodes", "1:2"]


@pytest.mark.parametrize("endpoint", ["node0:http", "node0:0", "node0:65536", ":29500", "a:b:1"])
def test_an_endpoint_that_is_no_address(endpoint):
    with pytest.raises(ConfigError, match=f"RDZV_ENDPOINT={endpoint}: expected HOST:PORT"):
        start.split_endpoint(endpoint)


def test_an_endpoint_without_a_port_has_that_of_torchrun():
    assert start.split_endpoint("[::1]:29500") == ("::1", 29500)
    assert start.split_endpoint("127.0.0.1") == ("127.0.0.1", 29400)


def test_a_port_that_another_program_uses(environment):
    with free_port() as port:
        with (
            socket.create_server(("127.0.0.1", port)),
            pytest.raises(
                endpoint.EndpointError, match=f"127.0.0.1:{port}: tried to listen on port {port}"
            ),
        ):
            start.check_endpoint("127.0.0.1", port, "0")
        start.check_endpoint("127.0.0.1", port, "0")


@pytest.mark.parametrize("node_rank", ["1", ""])
def test_a_program_that_accepts_and_says_nothing(node_rank, monkeypatch):
    monkeypatch.setattr(endpoint, "ANSWER_LIMIT", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(endpoint.EndpointError, match=f"^RDZV_ENDPOINT=127.0.0.1:{port}: "):
            start.check_endpoint("127.0.0.1", port, node_rank)


def test_a_node_that_does_not_listen_yet(monkeypatch):
    monkeypatch.setattr(endpoint, "CONNECT_LIMIT", 0.5)
    with (
        free_port() as port,
        pytest.raises(endpoint.EndpointError, match=f"{port}: tried to connect for 0.5 s: "),
    ):
        start.check_endpoint("127.0.0.1", port, "1")


@contextmanager
def free_port():
    """Return a context with a port on which nothing listens and which no other program gets."""
    with socket.socket() as kept:
        kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        kept.bind(("", 0))
        yield kept.getsockname()[1]


def test_ncopies_sets_the_groups_of_a_run(environment):
    assert start.with_groups(["debug_model"]) == ["debug_model"]
    environment["NCOPIES"] = "3"
    options = start.with_groups(["debug_model"])
    assert options == ["debug_model", "--fault_tolerance.replica_groups", "3"]
    environment["NCOPIES"] = "2"
    for same in (["--fault_tolerance.replica_groups=2"], ["--training.steps", "9"]):
        options = start.with_groups(["debug_model", *same])
        assert load_config(options[0], options[1:]).fault_tolerance.replica_groups == 2
    with pytest.raises(ConfigError) as refused:
        start.with_groups(["debug_model", "--fault_tolerance.replica_groups", "3"])
    assert str(refused.value) == (
        "NCOPIES=2, and command line: fault_tolerance.replica_groups = 3; use one of them, or the same"
        " number in both"
    )
    environment["NCOPIES"] = "three"
    with pytest.raises(ConfigError, match="NCOPIES=three: expected the number of replica groups"):
        start.with_groups(["debug_model"])


def groups_of(environment, *options):
    pytest.importorskip("torchft")
    arguments = ["debug_model", "--fault_tolerance.replica_groups=2", *options]
    return start.groups_here(arguments)


def test_the_gpus_of_a_machine_are_divided_among_groups(environment, program, monkeypatch):
    monkeypatch.setattr(start, "count_gpus", lambda: 4)
    environment["CUDA_VISIBLE_DEVICES"] = "4,5,6,7"
    found = groups_of(environment)
    assert found.devices == [["4", "5"], ["6", "7"]]
    assert environment["NGPU"] == "2"
    assert found.environment_of(1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    assert found.environment_of(1)["COPY"] == "1"

    environment["NGPU"] = "3"
    with pytest.raises(ConfigError, match="NGPU=3 for each of 2 groups is more than the 4 GPUs"):
        groups_of(environment)


def test_groups_without_gpus_share_the_cores(environment, monkeypatch):
    monkeypatch.setattr(start, "usable_cores", lambda: 16)
    found = groups_of(environment)
    assert found.devices == [(), ()]
    assert (environment["NGPU"], environment["OMP_NUM_THREADS"]) == ("2", "4")
    assert found.environment_of(0)["CUDA_VISIBLE_DEVICES"] == ""  # as it was


def test_a_group_on_several_nodes_is_started_alone(environment):
    environment |= {"NNODES": "2", "RDZV_ENDPOINT": "node0:29500"}
    with pytest.raises(ConfigError, match="NNODES=2: a replica group on several nodes is"):
        groups_of(environment)


def test_without_groups_this_machine_starts_none():
    assert start.groups_here(["debug_model"]) is None
