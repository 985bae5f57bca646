"""A parameter's block, and the modules that it lies within."""

import torch
from torch import nn

from titan_lite.compiler.fqns import block_of, parameters_within


def test_blocks_have_names():
    assert block_of("layers.12.feed_forward.w2.weight") == "layers.12"
    assert block_of("tok_embeddings.weight") == "tok_embeddings"
    assert block_of("norm.weight") == block_of("output.weight") != block_of("layers.1.attention_norm.weight")


def test_prefixes_are_of_whole_names_and_tied_weights_have_two():
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(2, 2) for i in (3, 31)})
    model.tok_embeddings, model.output = nn.Embedding(2, 2), nn.Linear(2, 2, bias=False)
    model.output.weight = model.tok_embeddings.weight
    model.scale = nn.Parameter(torch.ones(()))
    assert parameters_within(model, ["layers.3"]) == ("layers.3.weight", "layers.3.bias")
    assert parameters_within(model, ["layers.31.bias", "layers.3.bias"]) == ("layers.3.bias", "layers.31.bias")
    assert parameters_within(model, ["output"]) == parameters_within(model, ["tok_embeddings"]) == ("tok_embeddings.weight",)
    assert parameters_within(model, ["scale"]) == ("scale",)
    assert len(parameters_within(model, ["layers", "output", "tok_embeddings", "scale"])) == 6
    assert parameters_within(model, ["", "layer", "layers.", "3", "weight", "layers.3.weigh"]) == ()
