"""What a router keeps from step to step: the shares or the bias of steps that counted, and loads."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from tiny import UNTIED, of_family

from titan_lite import sinks
from titan_lite.distributed.stage import Stage
from titan_lite.features.moe import balance as expert_balance
from titan_lite.features.moe.balance import ExpertBalance
from titan_lite.features.moe.keys import ExpertsKeys
from titan_lite.features.moe.load import LINES, BalanceHistory, Loads, values_of
from titan_lite.models.experts import choose_experts, routers_of
from titan_lite.models.transformer import Transformer

CONFIG = dataclasses.replace(of_family("qwen3_moe", UNTIED), n_layers=2)
COUNTED, SKIPPED = torch.zeros(()), torch.ones(())


@pytest.fixture(autouse=True)
def one_process(monkeypatch):
    monkeypatch.setattr(expert_balance, "sum_over_positions", lambda tensor, mesh: None)
    monkeypatch.setattr(expert_balance.dist, "all_reduce", lambda tensor: None)
    yield
    sinks.close()


def balance_of(model, tokens=64, **settings):
    """tokens: of a step."""
    stage = Stage(model, sharding=None)
    layout = SimpleNamespace(model=model.config, tokens=tokens)
    return ExpertBalance([stage], layout, ExpertsKeys(**settings), None, torch.device("cpu"))


def model():
    model = Transformer(CONFIG)
    model.init_weights(seed=0)
    return model


def forward(model, sequences=2):
    ids = torch.arange(sequences * 16).view(sequences, 16) * 11 % CONFIG.vocab_size
    model(ids)


def kept(model):
    return [
        (router.expert_share.clone(), router.expert_bias.clone())
        for router in routers_of(model).values()
    ]


def test_shares_are_those_of_the_last_step_that_counted():
    m = model()
    balance = balance_of(m, balance="step")
    assert all(torch.equal(share, torch.full((5,), 0.2)) for share, _ in kept(m))
    forward(m)
    counts = balance.own[:, :5].clone()
    assert counts.sum(1).tolist() == [64, 64]
    balance.before_update(COUNTED)
    after = kept(m)
    for (share, bias), count in zip(after, counts, strict=True):
        torch.testing.assert_close(share, (count / 64).float())
        assert not bias.any()
    forward(m, sequences=1)
    balance.before_update(SKIPPED)
    for before, now in zip(after, kept(m), strict=True):
        assert all(map(torch.equal, before, now))
    assert balance.loads().shares.shape == (2, 5)


def test_a_bias_grows_by_the_sign_of_what_lacks():
    m = model()
    balance = balance_of(m, balance="bias", bias_update_rate=0.25)
    forward(m)
    counts = balance.own[:, :5].clone()
    balance.before_update(COUNTED)
    for (share, bias), count in zip(kept(m), counts, strict=True):
        grown = torch.tensor([0.25 * (int(5 * n < 64) - int(5 * n > 64)) for n in count])
        torch.testing.assert_close(bias, grown - grown.mean())
        assert torch.equal(share, torch.full((5,), 0.2))
        assert bias.dtype == torch.float32
    before = kept(m)
    forward(m)
    balance.before_update(SKIPPED)
    assert all(torch.equal(a[1], b[1]) for a, b in zip(before, kept(m), strict=True))


def test_biases_keep_the_digits_that_choose():
    """Their mean grew where few experts had many tokens (torchtitan 1506), and stays 0 now."""
    m = model()
    first, *_ = routers_of(m).values()
    first.expert_bias = 4096 + torch.tensor([0.25, 0.0, -0.25, 0.5, 0.0])  # of an older checkpoint
    balance = balance_of(m, balance="bias", bias_update_rate=2**-12)
    for _ in range(3):
        balance.own[:, :5] = torch.tensor([60.0, 1.0, 1.0, 1.0, 1.0])
        balance.before_update(COUNTED)
    grown = torch.tensor([0.25, 0.0, -0.25, 0.5, 0.0]) + 3 * 2**-12 * torch.tensor([-1, 1, 1, 1, 1])
    torch.testing.assert_close(first.expert_bias, grown - grown.mean(), atol=1e-6, rtol=0)


def test_loads_are_of_the_steps_that_counted_since_the_last_ones():
    m = model()
    balance = balance_of(m, balance="none")
    for skip in (COUNTED, SKIPPED, COUNTED):
        forward(m)
        balance.before_update(skip)
    assert int(balance.window[:, :5].sum()) == 2 * 2 * 64
    loads = balance.loads()
    torch.testing.assert_close(loads.shares.sum(1), torch.ones(2, dtype=torch.float64))
    torch.testing.assert_close(loads.probabilities.sum(1), torch.ones(2, dtype=torch.float64))
    assert (loads.balance > 0.5).all()
    assert ((loads.entropies > 0) & (loads.entropies <= 1.61)).all()  # ln 5
    assert balance.loads() is None
    forward(m)
    balance.before_update(SKIPPED)
    assert balance.loads() is None


def test_experts_without_a_token_are_named(monkeypatch, caplog):
    monkeypatch.setattr(expert_balance.dist, "get_rank", lambda: 0)
    m = model()
    first, *_ = routers_of(m).values()
    first.expert_bias = torch.tensor([9.0, 0, 0, 8.0, 0])
    balance = balance_of(m, balance="none")
    forward(m)
    balance.before_update(COUNTED)
    loads = balance.loads()
    assert loads.idle[0] == [1, 2, 4]
    assert loads.relative[0].tolist() == [2.5, 0, 0, 2.5, 0]
    forward(m)
    balance.before_update(COUNTED)
    balance.metrics(range(1, 3), None)
    line = "steps 1 to 2: experts without a token (experts.balance): layers.0: 1, 2, 4"
    assert caplog.messages[0].startswith(line)


def test_the_scale_is_that_of_the_steps_tokens():
    m = model()
    balance_of(m, tokens=128, balance_coefficient=0.5)
    for router in routers_of(m).values():
        assert router.balance_scale.item() == pytest.approx(0.5 * 5 / 128)


# A term that falls while loads get worse

# six tokens and three experts, of which a token has one
EVEN = [[0.4, 0.3, 0.3], [0.4, 0.3, 0.3], [0.3, 0.4, 0.3], [0.3, 0.4, 0.3], [0.3, 0.3, 0.4]]
EVEN += [[0.3, 0.3, 0.4]]
# Four tokens choose expert 0 by a little; the others give it nothing.
GERRYMANDERED = [[0.36, 0.32, 0.32]] * 4 + [[0.0, 1.0, 0.0], [0.0, 0.0, 1.0]]


def test_a_term_that_falls_while_loads_get_worse_is_told_with_its_layer(monkeypatch, caplog):
    monkeypatch.setattr(expert_balance.dist, "get_rank", lambda: 0)
    m = Transformer(dataclasses.replace(CONFIG, n_experts=3, experts_per_token=1))
    balance = balance_of(m, balance="step")
    first, second = routers_of(m)
    values = {}
    for line in range(LINES):
        later = GERRYMANDERED if line >= LINES // 2 else EVEN
        for fqn, probabilities in ((first, EVEN), (second, later)):
            choose_experts(torch.tensor([probabilities]), torch.zeros(3), 1, fqn)
        balance.before_update(COUNTED)
        assert not caplog.records
        values[line] = balance.metrics(range(line, line + 1), None)
    assert values[0]["expert_balance/1"] == pytest.approx(1)
    assert values[0]["expert_load_max/1"] == pytest.approx(1)
    assert values[9]["expert_balance/1"] == pytest.approx(0.86)  # 3 (4 x .24 + .38 + .38) / 6
    assert values[9]["expert_load_max/1"] == pytest.approx(2)
    (told,) = [record.getMessage() for record in caplog.records]
    assert told == (
        "steps 0 to 9: the balance term falls while the load of experts gets worse"
        ' (experts.balance; "bias" moves loads themselves): layers.1: term 1.00 to 0.86, largest'
        " load 1.00 to 2.00 times the mean"
    )


def random_loads(generator, layers=48, experts=16, tokens=2000):
    """Loads of routers that are balanced but for chance."""
    even = torch.full((layers, experts), 1 / experts)
    counts = torch.multinomial(even, tokens, replacement=True, generator=generator)
    shares = torch.stack([row.bincount(minlength=experts) for row in counts]).double() / tokens
    noise = 0.01 * torch.randn(layers, experts, generator=generator, dtype=torch.float64)
    return Loads(shares, (noise / experts + 1 / experts), torch.zeros(layers))


def test_a_well_balanced_run_does_not_warn():
    generator = torch.Generator().manual_seed(0)
    history = BalanceHistory()
    for step in range(200):
        assert not history.add(random_loads(generator), range(step, step + 1))


@pytest.mark.parametrize(
    ("term", "load", "warns"),
    [(-0.01, 0.2, True), (-0.01, -0.2, False), (0.01, 0.2, False), (0.0, 0.2, False)],
)
def test_both_have_to_get_apart(term, load, warns):
    """Of two experts with shares f and 1 - f and probabilities p and 1 - p, the term is
    1 + (2 f - 1) (2 p - 1), and the largest load 2 f.
    """
    history = BalanceHistory()
    told = []
    for line in range(3 * LINES):
        share = 0.65 + load * line / (6 * LINES)
        product = -0.03 + term * line / LINES
        probability = (product / (2 * share - 1) + 1) / 2
        shares, probabilities = (torch.tensor([[x, 1 - x]]) for x in (share, probability))
        told.append(
            history.add(Loads(shares, probabilities, torch.zeros(1)), range(line, line + 1))
        )
    assert [bool(text) for text in told] == [
        warns and line % LINES == 9 for line in range(len(told))
    ]


def test_the_term_of_each_layer_is_a_metric():
    loads = random_loads(torch.Generator().manual_seed(0), layers=3)
    values = values_of(loads)
    terms = [values[f"expert_balance/{layer}"] for layer in range(3)]
    assert terms == loads.balance.tolist()
    assert values["expert_balance"] == pytest.approx(sum(terms) / 3)
