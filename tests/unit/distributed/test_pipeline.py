"""A stage is a part of the model; a run without a pipeline has the pipeline's interface."""

import torch

from titan_lite.config.families import ModelConfig
from titan_lite.distributed.pipeline import DeviceBatch, SingleStage, keep_modules
from titan_lite.models.loss import Loss, VocabularyShard, cross_entropy
from titan_lite.models.transformer import Transformer

CONFIG = ModelConfig(
    dim=16, n_layers=4, n_heads=2, n_kv_heads=1, hidden_dim=8, vocab_size=11, max_seq_len=12
)


def test_a_stage_keeps_its_modules_under_their_names():
    whole = Transformer(CONFIG)
    whole.init_weights(0)
    x = torch.arange(5).unsqueeze(0)
    expected = whole(x)
    names = []
    for modules in (
        ["tok_embeddings"],
        ["layers.0", "layers.1"],
        ["layers.2", "layers.3"],
        ["norm", "output"],
    ):
        stage = Transformer(CONFIG)
        keep_modules(stage, modules)
        stage.init_weights(0)
        names += [fqn for fqn, _ in stage.named_parameters()]
        x = stage(x)
    assert names == [fqn for fqn, _ in whole.named_parameters()]
    assert torch.equal(x, expected)


def test_a_single_stage_gives_the_loss_and_gradients_of_the_model():
    model = Transformer(CONFIG)
    model.init_weights(0)
    input, label = torch.arange(10).reshape(2, 5), torch.arange(1, 11).reshape(2, 5)
    batch = DeviceBatch(input, label, {})
    expected = cross_entropy(model(input), label) / 10
    gradients = torch.autograd.grad(expected.sum(), list(model.parameters()))
    model.output.loss = Loss(VocabularyShard(CONFIG.vocab_size))
    stage = SingleStage(model)
    losses = stage.forward_backward(batch, torch.tensor(10))
    assert torch.equal(losses, expected)
    assert not losses.requires_grad
    assert all(torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True))
    summed = stage.evaluate(batch)
    assert torch.equal(summed / 10, expected)
    assert not summed.requires_grad
