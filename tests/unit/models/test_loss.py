"""The summed cross-entropy: against its definition, with labels that do not count, and in parts."""

import math

import pytest
import torch

from titan_lite.models.loss import IGNORE_INDEX, counted, cross_entropy


@pytest.fixture
def logits():
    return 3 * torch.randn(2, 5, 7, generator=torch.Generator().manual_seed(0))


LABELS = torch.tensor([[0, 6, 3, IGNORE_INDEX, 2], [IGNORE_INDEX, IGNORE_INDEX, 1, 5, 0]])


def test_the_sum_over_counted_tokens(logits):
    expected = 0.0
    for row, labels in zip(logits.tolist(), LABELS.tolist(), strict=True):
        for scores, label in zip(row, labels, strict=True):
            if label != -100:
                expected += math.log(sum(math.exp(score) for score in scores)) - scores[label]
    losses = cross_entropy(logits, LABELS)
    assert losses.shape == (2,)
    assert losses.sum().item() == pytest.approx(expected, rel=1e-5)


def test_ignored_tokens_have_no_gradient_and_the_others_softmax_minus_one_hot(logits):
    logits.requires_grad_()
    cross_entropy(logits, LABELS).sum().backward()
    counted = LABELS != IGNORE_INDEX
    expected = logits.detach().softmax(dim=-1)
    expected[counted] -= torch.eye(7)[LABELS[counted]]
    expected[~counted] = 0
    torch.testing.assert_close(logits.grad, expected)


def test_parts_add_up_to_the_whole(logits):
    """Whatever the rows and the lengths of the parts: this is why it is a sum."""
    whole = cross_entropy(logits, LABELS)
    by_row = torch.cat([cross_entropy(logits[i : i + 1], LABELS[i : i + 1]) for i in range(2)])
    by_time = cross_entropy(logits[:, :1], LABELS[:, :1]) + cross_entropy(
        logits[:, 1:], LABELS[:, 1:]
    )
    torch.testing.assert_close(by_row, whole)
    torch.testing.assert_close(by_time, whole)
    assert counted(LABELS).tolist() == [4, 3]


def test_nothing_counted_is_zero_and_not_nan(logits):
    logits.requires_grad_()
    losses = cross_entropy(logits, torch.full_like(LABELS, IGNORE_INDEX))
    losses.sum().backward()
    assert (losses == 0).all()
    assert (logits.grad == 0).all()


def test_bfloat16_logits_are_summed_in_float32(logits):
    rounded = logits.bfloat16()
    losses = cross_entropy(rounded, LABELS)
    assert losses.dtype == torch.float32
    assert torch.equal(losses, cross_entropy(rounded.float(), LABELS))
