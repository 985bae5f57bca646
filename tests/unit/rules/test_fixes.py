"""Each value that a message about a wrong recipe offers is tried: its key is not refused again."""

import re

import pytest
from test_machine_rules import SHORT, WRONG
from tiny import DEBUG

from titan_lite.config import KEYS, ConfigError, load_config
from titan_lite.config.load import option
from titan_lite.distributed.layout import Layout
from titan_lite.rules import check, check_keys

VALUE = r'"[^"]*"|\[[^]]*\]|true|false|-?\d+(?:\.\d+)?(?:e-?\d+)?'
WITHIN_LIST = r"(?![^[]*\])"

MOE = "model.name=qwen3_moe"
INTERLEAVED = "parallelism.pipeline_parallel_schedule=Interleaved1F1B"
COMPILED = "compile.enable=true compile.backend=aot_eager"
GROUPS = "fault_tolerance.replica_groups=2"
POWERSGD = "parallelism.replicate_compression=powersgd"
SHORTEST = "comm.train_timeout_seconds=2"

# Ranks and keys of wrong recipes; each of their messages offers a value.
RECIPES = {
    "tp, which divides neither model nor ranks": (2, "tp=3"),
    "tp, which divides the ranks alone": (3, "tp=3"),
    "tp beside pp": (6, "tp=3 pp=2"),
    "tp, which divides the model alone": (6, "model.n_kv_heads=8 tp=8"),
    "heads without another tp": (4, "model.n_kv_heads=3 tp=2"),
    "cp of the longest sequence": (3, "cp=3 seq_len=131072 global=-1"),
    "cp, which divides the sequence alone": (6, "cp=4 global=12"),
    "pp": (6, "pp=4 global=-1"),
    "ep, which divides the ranks alone": (3, f"{MOE} ep=3"),
    "ep, which divides neither experts nor ranks": (2, f"{MOE} ep=3"),
    "ep of which some divide the ranks": (6, f"{MOE} ep=3"),
    "ep and shards": (3, f"{MOE} ep=3 shard=3"),
    "ep of a dense family": (2, "ep=2"),
    "capacity that is never exceeded": (2, f"{MOE} ep=2 experts.capacity_factor=2"),
    "capacity without ep": (2, f"{MOE} experts.capacity_factor=1.5"),
    "experts of a token": (2, f"{MOE} model.experts_per_token=9"),
    "hidden units of experts": (2, f"{MOE} model.hidden_dim=90"),
    "rate of a bias": (2, f"{MOE} experts.bias_update_rate=0.1"),
    "Shampoo": (2, f"{MOE} optimizer.name=Shampoo"),
    "heads and dim": (2, "model.n_heads=6"),
    "dim": (2, "model.dim=100"),
    "key/value heads": (2, "model.n_kv_heads=3"),
    "odd heads": (2, "model.head_dim=33"),
    "long chunk of the loss": (2, "training.loss_chunk_tokens=512"),
    "short chunk of the loss": (2, "training.loss_chunk_tokens=31"),
    "chunks of tp": (2, f"tp=2 {COMPILED} compile.tensor_parallel_chunks=3"),
    "long sequence": (1, "seq_len=200000"),
    "momentum": (2, "optimizer.momentum=0.9"),
    "eps": (2, "optimizer.name=Lion optimizer.eps=1e-6"),
    "moments that do not decrease": (2, "optimizer.state_dtype=bfloat16 optimizer.beta2=0.999"),
    "moments of Muon": (2, "optimizer.state_dtype=bfloat16 optimizer.name=Muon"),
    "decay of no length": (2, "lr_scheduler.decay_begin=50 lr_scheduler.decay_length=0"),
    "end of the decay": (
        2,
        "lr_scheduler.min_lr_factor=0 lr_scheduler.decay_begin=50 lr_scheduler.decay_length=20",
    ),
    "compression without groups": (2, POWERSGD),
    "compression of no step": (2, f"{POWERSGD} replicate=2"),
    "compression by a large rank": (
        2,
        f"{POWERSGD} replicate=2 steps=200 parallelism.replicate_rank=1000",
    ),
    "float8 of some beside a filter": (
        2,
        "float8.enable=true model.hidden_dim=680 float8.filter_fqns=attention.wk",
    ),
    "fewest groups": (2, f"{GROUPS} fault_tolerance.min_replica_groups=3"),
    "timeout of groups": (2, f"{GROUPS} comm.train_timeout_seconds=60"),
    "groups of groups": (2, f"{GROUPS} replicate=2"),
    "checkpointing": (2, "activation_checkpoint.selective_ac_option=x"),
    "unordered buckets": (2, f"{COMPILED} bucketing=auto compile.reordering=false"),
    "one stage a rank": (4, f"pp=4 stages=1 batch=2 {INTERLEAVED}"),
    "two stages a rank": (2, "pp=2 stages=2 schedule=GPipe batch=5 global=5"),
    "halves without rounds": (2, "pp=2 batch=5 global=5 schedule=ZBVZeroBubble ac=full"),
}
RECIPES |= {f"layouts: {name}": (wrong.ranks, wrong.keys) for name, wrong in WRONG.items()}
del RECIPES["layouts: async TP without a GPU"]  # refused by this machine alone
WITHOUT_VALUES = {  # a message in words
    "cp, which divides neither": (2, "cp=3"),
    "rotary factors": (2, "model.rope_scaling_low_freq_factor=2"),
    "timeout of groups, which is least": (2, f"{GROUPS} {SHORTEST}"),
    **{
        f"layouts: {name}": RECIPES.pop(f"layouts: {name}")
        for name in (
            "layers by stages",
            "more stages than layers",
            "a first stage with less than nothing",
            "a rank with the copy of a tied table alone",
            "a split at no module",
            "too many splits",
            "splits in another order",
            "a block to keep that is not there",
            "half a name to keep",
            "an unknown machine",
        )
    },
}


def options_of(keys):
    pairs = (pair.split("=", 1) for pair in keys.split())
    return [option(SHORT.get(key, key), value) for key, value in pairs]


def mistakes(ranks, options):
    """The messages of a recipe, as a run has them."""
    try:
        config = load_config(DEBUG, options)
        check_keys(config)
        check(config, Layout.from_config(config, ranks))
    except ConfigError as error:
        return list(error.args)
    return []


def key_of(message):
    return re.search(r"(\w+\.\w+)(?: =|:)", message.removeprefix("command line: "))[1]


def full_name(key, beside):
    """The key that a message may name without its section."""
    if key in KEYS:
        return key
    own = f"{beside.partition('.')[0]}.{key}"
    return own if own in KEYS else next(each for each in KEYS if each.endswith(f".{key}"))


def fixes(message):
    """The changes that a message offers, each {key: value}; "ranks" is a key, too."""
    own = key_of(message)
    key = own
    found = []
    for alternative in re.split(
        rf",? or {WITHIN_LIST}|, (?!and ){WITHIN_LIST}", message.rpartition("; use ")[2]
    ):
        change = {}
        for part in re.split(r",? and ", alternative):
            if ranks := re.match(r"start (\d+) ranks", part):
                change["ranks"] = int(ranks[1])
            elif given := re.match(
                rf"(?:at (?:least|most) )?(?:([\w.]+) = )?({VALUE})(?: to \d+)?$", part
            ):
                key = full_name(given[1], own) if given[1] else key
                change[key] = re.sub(r'["\[\]]|(?<=,) ', "", given[2])
        found += [change] if change else []
    return found


def refused_again(ranks, options, message, fix):
    """The messages about the same key that the recipe with the fix has, and had not before."""
    changes = [option(key, value) for key, value in fix.items() if key != "ranks"]
    changed = mistakes(fix.get("ranks", ranks), [*options, *changes])
    before = mistakes(ranks, options)
    return [each for each in changed if key_of(each) == key_of(message) and each not in before]


@pytest.mark.parametrize(("ranks", "keys"), RECIPES.values(), ids=RECIPES)
def test_each_value_that_a_message_offers_is_accepted(ranks, keys):
    options = options_of(keys)
    messages = mistakes(ranks, options)
    assert messages
    for message in messages:
        assert fixes(message), message
        for fix in fixes(message):
            assert not refused_again(ranks, options, message, fix), (message, fix)


@pytest.mark.parametrize(("ranks", "keys"), WITHOUT_VALUES.values(), ids=WITHOUT_VALUES)
def test_what_is_not_tried_is_in_words(ranks, keys):
    messages = mistakes(ranks, options_of(keys))
    assert messages
    for message in messages:
        assert not fixes(message)


@pytest.mark.parametrize(
    ("ranks", "keys", "message"),
    [
        (
            2,
            "tp=3",
            "parallelism.tensor_parallel_degree = 3 does not divide the 8 attention heads and the 4"
            " key/value heads and the 256 tokens of training.seq_len; use 1 or 2",
        ),
        (
            4,
            f"{MOE} ep=3",
            "parallelism.expert_parallel_degree = 3 does not divide the 8 experts and the 4 ranks of"
            " dp_shard x cp x tp; use 1 or 2 or 4",
        ),
        (
            3,
            f"{MOE} ep=3 shard=3 global=6",
            "parallelism.expert_parallel_degree = 3 does not divide the 8 experts; use 1",
        ),
        (
            3,
            "cp=3 seq_len=131072 global=-1",
            "parallelism.context_parallel_degree = 3 cannot cut training.seq_len = 131072 into 2 x 3"
            " chunks; use training.seq_len = 131070",
        ),
        (
            6,
            "tp=8 model.n_kv_heads=8 global=6",
            "parallelism.data_parallel_shard_degree = -1 cannot be resolved: the other degrees (tp 8)"
            " multiply to 8, which does not divide 6 ranks; use parallelism.tensor_parallel_degree = 2,"
            " or start 8 ranks",
        ),
    ],
)
def test_a_degree_is_refused_once_with_values_that_suit_the_model_and_the_ranks(
    ranks, keys, message
):
    options = options_of(keys)
    assert mistakes(ranks, options) == [message]
    for fix in fixes(message):
        if "ranks" not in fix:
            changes = [option(key, value) for key, value in fix.items()]
            assert not mistakes(ranks, [*options, *changes]), fix


def test_a_degree_is_refused_before_a_batch():
    """An accepted degree may have another batch."""
    (message,) = mistakes(3, options_of(f"{MOE} ep=3 shard=3"))
    assert key_of(message) == "parallelism.expert_parallel_degree"
