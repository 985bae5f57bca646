"""Two nodes, which two launchers on this machine play, that were started for different runs."""

import pytest
from commands import Job, python
from ranks import reserved_port
from tiny import DEBUG, NO_VALIDATION, NO_WORKERS, SMALL, steps

pytestmark = pytest.mark.ranks(2)

OPTIONS = [*SMALL, *steps(2), *NO_VALIDATION, *NO_WORKERS, "--checkpoint.no-enable"]


@pytest.mark.slow
def test_nodes_with_different_recipes_end_with_a_line_for_each_key(tmp_path):
    """Also where the layouts differ, so that their collectives would wait for each other."""
    of_second = ["--optimizer.lr=2e-2", "--parallelism.tensor_parallel_degree=2"]
    port = reserved_port()
    jobs = []
    for node, options in enumerate(([], of_second)):
        command = ["-m", "titan_lite.launch", DEBUG, "--job.dump_folder", tmp_path / "run"]
        jobs.append(
            Job(
                tmp_path / f"node{node}",
                *python(*command, *OPTIONS, *options),
                NNODES=2,
                NODE_RANK=node,
                NGPU=1,
                RDZV_ENDPOINT=f"127.0.0.1:{port}",
            )
        )
    for job in jobs:
        assert job.ended() == 2
        assert job.output.count("optimizer.lr differs: 0.002 on") == 1
        assert job.output.count("tensor_parallel_degree differs: 1 on") == 1
        assert "(rank 0), 0.02 on" in job.output
        assert "Traceback" not in job.output
    assert not (tmp_path / "run/config.toml").exists()
