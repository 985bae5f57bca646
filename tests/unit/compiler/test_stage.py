"""The compile stage on one process: a budget of activations, and resharding beside it."""

import pytest
import torch

from titan_lite.compiler.stage import compile_model
from titan_lite.config import Compile
from titan_lite.models.llama3 import ModelConfig, Transformer

CONFIG = ModelConfig(dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=16)


def trained(budget):
    """(bytes saved for backward besides parameters, loss, gradients)"""
    torch._dynamo.reset()
    model = Transformer(CONFIG)
    model.init_weights(0)
    compile_model(model, Compile(enable=True, backend="aot_eager"), reshard_after_forward=False, memory_budget=budget)
    own = {parameter.data_ptr() for parameter in model.parameters()} | {buffer.data_ptr() for buffer in model.buffers()}
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = model(tokens)
    saved = {t.data_ptr(): t.untyped_storage().nbytes() for t in logits.grad_fn.saved_tensors if t.data_ptr() not in own}
    loss = logits.square().mean()
    loss.backward()
    return sum(saved.values()), loss.detach(), [parameter.grad for parameter in model.parameters()]


def test_a_smaller_budget_saves_less_and_computes_the_same():
    whole, loss, gradients = trained(1.0)
    sizes = [whole]
    for budget in (0.5, 0.0):
        size, same_loss, same_gradients = trained(budget)
        torch.testing.assert_close(same_loss, loss)
        for one, other in zip(same_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other)
        sizes.append(size)
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] < 0.75 * sizes[0]


@pytest.mark.parametrize("budget", [0.5, 1.0])
def test_the_budget_does_not_outlast_the_compilation(budget):
    trained(budget)
    assert torch._functorch.config.activation_memory_budget == 1.0
