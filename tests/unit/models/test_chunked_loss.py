"""The loss in chunks of tokens: the values of all logits, and an eighth of their live bytes."""

import pytest
import torch
from plain_weights import PlainWeights
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_lite.compile.compile import compile_model
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile
from titan_lite.cost.timeline import peak_bytes
from titan_lite.models.loss import IGNORE_INDEX, Loss, VocabularyShard


class LastStage(torch.nn.Module):
    """(hidden states, weight, labels) -> loss, of all logits at once for chunk = 0."""

    def __init__(self, chunk):
        super().__init__()
        self.loss = Loss(VocabularyShard(61), chunk=chunk)

    def forward(self, hidden, weight, labels):
        return self.loss(hidden, weight, labels)


def projected(dtype=torch.float32):
    """Hidden states and a projection; labels of two sequences, of which some do not count."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).to(dtype) for shape in ((2, 50, 16), (61, 16))
    )
    labels = torch.randint(61, (2, 50), generator=generator)
    labels[0, :7], labels[1, 30:33] = IGNORE_INDEX, IGNORE_INDEX
    return hidden.requires_grad_(), weight.requires_grad_(), labels


def loss_and_gradients(stage, hidden, weight, labels):
    loss = stage(hidden, weight, labels)
    with torch.no_grad():
        assert torch.equal(stage(hidden, weight, labels), loss)
    return loss.detach(), *torch.autograd.grad((loss / 90).sum(), (hidden, weight))


# of 100 tokens: the last chunk is smaller, or there is only one
@pytest.mark.parametrize("chunk", [7, 50, 64, 99, 100])
def test_loss_and_gradients_are_those_of_all_logits(chunk):
    inputs = projected()
    found = loss_and_gradients(LastStage(chunk), *inputs)
    expected = loss_and_gradients(LastStage(0), *inputs)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.shape == theirs.shape
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()
    assert not found[1][0, :7].any()  # labels that do not count
    assert found[1][0, 7:].any(-1).all()


def test_in_bfloat16_the_gradient_of_the_projection_is_summed_in_float32():
    inputs = projected(torch.bfloat16)
    exact = loss_and_gradients(
        LastStage(0), *(each.detach().float().requires_grad_() for each in inputs[:2]), inputs[2]
    )
    apart = {}
    for chunk in (0, 7):
        found = loss_and_gradients(LastStage(chunk), *inputs)
        assert [each.dtype for each in found] == [torch.float32, torch.bfloat16, torch.bfloat16]
        apart[chunk] = [
            float((ours.float() - theirs).norm() / theirs.norm())
            for ours, theirs in zip(found, exact, strict=True)
        ]
    # a sum of 15 chunks in bfloat16 is 1.46 times as far
    assert apart[7] == pytest.approx(apart[0], rel=0.2)
    assert max(apart[7]) < 5e-3


def test_nothing_counted_is_zero_and_not_nan():
    hidden, weight, labels = projected()
    for value in loss_and_gradients(
        LastStage(7), hidden, weight, torch.full_like(labels, IGNORE_INDEX)
    ):
        assert not value.any()


def test_a_gradient_that_differs_between_sequences_is_refused_for_the_projection():
    hidden, weight, labels = projected()
    scale = torch.tensor([1.0, 2.0])
    losses = [LastStage(chunk)(hidden, weight, labels) for chunk in (7, 0)]
    (found, refused), (expected, _) = (
        torch.autograd.grad((loss * scale).sum(), (hidden, weight)) for loss in losses
    )
    torch.testing.assert_close(found, expected)
    assert refused.isnan().all()


VOCABULARY, TOKENS, WIDTH = 128_256, 8192, 64


class Recorded(GraphPasses):
    """The peak of live bytes of logits, their copies and gradients, in each graph."""

    peaks: dict[str, int]

    def run(self, module, name):
        def of_logits(node):
            value = node.meta.get("val")
            return (
                isinstance(value, torch.Tensor)
                and VOCABULARY in value.shape
                and WIDTH not in value.shape
            )

        self.peaks[name] = peak_bytes(
            module.graph, without=[node for node in module.graph.nodes if not of_logits(node)]
        )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_graph_has_an_eighth_of_the_bytes_of_logits(dtype):
    """Of 8B's vocabulary and 8k tokens, in chunks of the size that loss_chunk_tokens = 0 chooses
    for them.
    """
    peaks = {}
    for chunk in (0, 1024):
        stage = LastStage(chunk)
        recorded = Recorded(PassSettings(Compile(enable=True, backend="aot_eager")))
        recorded.peaks = peaks[chunk] = {}
        compiled = compile_model(TraceableModel(stage, PlainWeights(stage)), recorded)
        with FakeTensorMode(allow_non_fake_inputs=True):
            hidden = torch.zeros(1, TOKENS, WIDTH, dtype=dtype, requires_grad=True)
            weight = torch.zeros(VOCABULARY, WIDTH, dtype=dtype, requires_grad=True)
            compiled(hidden, weight, torch.zeros(1, TOKENS, dtype=torch.long)).sum().backward()
    logits = VOCABULARY * TOKENS * 4
    assert 2 * logits <= max(peaks[0].values()) <= 3.5 * logits
    assert 0 < max(peaks[1024].values()) <= max(peaks[0].values()) / 8
    assert peaks[1024]["backward"] == 0


class Live(TorchDispatchMode):
    """The peak of live bytes of tensors with a dimension of `vocabulary`."""

    def __init__(self, vocabulary):
        super().__init__()
        self.vocabulary, self.alive, self.peak = vocabulary, {}, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if (
                isinstance(tensor, torch.Tensor)
                and self.vocabulary in tensor.shape
                and 16 not in tensor.shape
            ):
                storage = tensor.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.alive = {key: each for key, each in self.alive.items() if not each[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.alive.values()))
        return result


def test_tensors_of_logits_are_an_eighth():
    """Really, for 32k entries and 1k tokens."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (
        torch.randn(shape, generator=generator).requires_grad_()
        for shape in ((1, 1024, 16), (32_768, 16))
    )
    peaks = {}
    for chunk in (0, 128):
        with Live(32_768) as live:
            LastStage(chunk)(
                hidden, weight, torch.zeros(1, 1024, dtype=torch.long)
            ).sum().backward()
        peaks[chunk] = live.peak
    assert 2 * 4 * 1024 * 32_768 <= peaks[0] <= 4 * 4 * 1024 * 32_768
    assert 0 < peaks[128] <= peaks[0] / 8
