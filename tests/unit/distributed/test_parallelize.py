"""What of a recipe reaches the compiler."""

import functools
from types import SimpleNamespace

import pytest
from tiny import DEBUG

from titan_lite.config import load_config
from titan_lite.distributed.layout import AXES
from titan_lite.distributed.parallelize import graph_folder


@pytest.mark.parametrize(
    ("ranks", "options", "folder"),
    [
        ({"pp": 1}, ["--compile.dump_graphs"], "graphs/pp_1_block"),
        ({"tp": 1}, ["--compile.dump_graphs"], None),
        ({}, [], None),
    ],
)
def test_the_first_rank_of_a_stage_writes_its_graphs(ranks, options, folder, tmp_path):
    mesh = {
        axis: SimpleNamespace(get_local_rank=functools.partial(ranks.get, axis, 0)) for axis in AXES
    }
    config = load_config(DEBUG, [*options, "--compile.enable", "--job.dump_folder", str(tmp_path)])
    assert graph_folder(config, mesh) == (tmp_path / folder if folder else None)
