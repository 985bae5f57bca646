"""A parameter's block, and the modules that it lies within."""

import torch
from torch import nn

from titan_lite.models.fqns import block_of, last_block, parameters_within


def test_blocks_have_names():
    assert block_of("layers.12.feed_forward.w2.weight") == "layers.12"
    assert block_of("tok_embeddings.weight") == "tok_embeddings"
    assert block_of("output.weight") == "output"
    names = [
        "layers.2.attention.wq.weight",
        "layers.10.attention.wq.weight",
        "norm.weight",
        "output.weight",
    ]
    assert block_of("norm.weight", last_block(names)) == "layers.10"
    assert block_of("norm.weight", last_block(names[2:])) == "norm"  # of a stage without blocks


def test_prefixes_are_of_whole_names_and_tied_weights_have_two():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in (3, 31)})
    model.tok_embeddings, model.output = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
    model.output.weight = model.tok_embeddings.weight
    model.scale = nn.Parameter(torch.ones(()))
    assert parameters_within(model, ["layers.3"]) == ("layers.3.weight", "layers.3.bias")
    assert parameters_within(model, ["layers.31.bias", "layers.3.bias"]) == (
        "layers.3.bias",
        "layers.31.bias",
    )
    assert (
        parameters_within(model, ["output"])
        == parameters_within(model, ["tok_embeddings"])
        == ("tok_embeddings.weight",)
    )
    assert parameters_within(model, ["scale"]) == ("scale",)
    assert len(parameters_within(model, ["layers", "output", "tok_embeddings", "scale"])) == 6
    assert parameters_within(model, ["", "layer", "layers.", "3", "weight", "layers.3.weigh"]) == ()
