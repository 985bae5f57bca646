"""Two nodes, which two launchers on this machine play, that were started for different runs."""

import shutil

import pytest
from commands import Job, python
from ranks import reserved_port
from tiny import DEBUG, DEBUG_TOKENIZER, NO_VALIDATION, NO_WORKERS, SMALL, steps

pytestmark = pytest.mark.ranks(2)

OPTIONS = [*SMALL, *steps(2), *NO_VALIDATION, *NO_WORKERS, "--checkpoint.no-enable"]


def on_two_nodes(folder, *options_of_second):
    """(exit code, output) of each node; the second one has further options."""
    port = reserved_port()
    jobs = []
    for node, options in enumerate(([], options_of_second)):
        command = ["-m", "titan_lite.launch", DEBUG, "--job.dump_folder", folder / "run"]
        jobs.append(
            Job(
                folder / f"node{node}",
                *python(*command, *OPTIONS, *options),
                NNODES=2,
                NODE_RANK=node,
                NGPU=1,
                RDZV_ENDPOINT=f"127.0.0.1:{port}",
            )
        )
    return [(job.ended(), job.output) for job in jobs]


@pytest.mark.slow
def test_nodes_with_different_recipes_end_with_a_line_for_each_key(tmp_path):
    """Also where the layouts differ, so that their collectives would wait for each other."""
    ended = on_two_nodes(tmp_path, "--optimizer.lr=2e-2", "--parallelism.tensor_parallel_degree=2")
    for code, output in ended:
        assert code == 2
        assert output.count("optimizer.lr differs: 0.002 on") == 1
        assert output.count("tensor_parallel_degree differs: 1 on") == 1
        assert "(rank 0), 0.02 on" in output
        assert "Traceback" not in output
    assert not (tmp_path / "run/config.toml").exists()


@pytest.mark.slow
def test_a_node_may_have_its_own_copy_of_the_tokenizer(tmp_path):
    copied = tmp_path / "copied.model"
    shutil.copy(DEBUG_TOKENIZER, copied)
    ended = on_two_nodes(tmp_path, f"--model.tokenizer_path={copied}")
    assert [code for code, _ in ended] == [0, 0]
