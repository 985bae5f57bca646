"""Text with cached keys and values is that of the plain model, read again for each token, on every
layout.
"""

import pytest
import torch
from ranks import run_ranks
from tiny import HEADS, of_family

from titan_lite.config import Config, ConfigError, Parallelism, Training
from titan_lite.distributed.generation import GenerationStopped, generate
from titan_lite.distributed.layout import Layout
from titan_lite.distributed.mesh import build_mesh, data_rank
from titan_lite.distributed.parallelize import parallelize
from titan_lite.distributed.pipeline_schedule import PipelineSchedule
from titan_lite.models.decoder import Sampling
from titan_lite.models.shapes import module_fqns
from titan_lite.models.transformer import Transformer

PROMPTS = [[3, 1, 4, 1, 5], [9], [2, 6, 5], [8, 9, 7, 9, 3, 2], [58]]
NEW = 6
STOP = 17
DRAWN = Sampling(temperature=1.5, top_p=1.0, seed=5)
AXES = ("pp", "dp_replicate", "dp_shard", "cp", "tp")


def model_on(config, degrees, ep=1):
    """The ParallelModel of this rank, in float32, with two stages a rank if it is a pipeline."""
    degrees = {**dict.fromkeys(AXES, 1), **degrees}
    mesh = build_mesh(degrees, "cpu")
    names = tuple(module_fqns(config.n_layers))
    pipeline = PipelineSchedule((names,), (0,), 1)
    if degrees["pp"] == 2:
        cut = 1 + config.n_layers // 2
        pipeline = PipelineSchedule((names[:cut], names[cut:]), (0, 1), 2)
    recipe = Config(
        training=Training(
            seq_len=config.max_seq_len,
            mixed_precision_param="float32",
            mixed_precision_reduce="float32",
        ),
        parallelism=Parallelism(pipeline_parallel_schedule="1F1B"),
    )
    layout = Layout(
        model=config,
        degrees=degrees,
        pipeline=pipeline,
        local_batch_size=2,
        accumulation=1,
        gathers_once=False,
        loss_chunk=0,
        expert_parallel=ep,
    )
    model = parallelize(recipe, layout, mesh)
    model.materialize(torch.device("cpu"))
    model.init_weights(seed=0)
    model.parameters_have_changed()
    return model


def without_cache(config, prompt, sampling=None, seed=0):
    """The text of the plain model, which reads all of it again for each token."""
    model = Transformer(config)
    model.init_weights(seed=0)
    model.eval()
    text = []
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        while len(text) < NEW and STOP not in text:
            logits = model(torch.tensor([[*prompt, *text]]))[0, -1]
            text.append(sampling.draw(logits, generator) if sampling else int(logits.argmax()))
    return text


def texts_on(config, degrees, ep, of_ranks):
    """The texts, greedy and drawn, of the prompts with these numbers on each data-parallel rank."""
    model = model_on(config, degrees, ep)
    numbers = of_ranks[data_rank(model.mesh)[0]]
    prompts = [PROMPTS[number] for number in numbers]
    options = dict(max_new_tokens=NEW, stop={STOP}, batch_size=2, seeds=numbers)
    greedy = generate(model, prompts, **options)
    drawn = generate(model, prompts, sampling=DRAWN, **options)
    # the model trains as before: context and sequence parallelism are back
    tokens = torch.zeros(2, config.max_seq_len, dtype=torch.int64)
    batch = model.to_device(tokens, tokens, bos_id=0, eos_id=0)
    assert all(stage.model.training for stage in model.stages)
    losses = model.forward_backward([batch], torch.tensor(1.0))
    assert all(loss.isfinite().all() for loss in losses)
    return numbers, greedy, drawn


LAYOUTS = {
    "fsdp": (2, {"dp_shard": 2}, 1, [[0, 1, 2, 3, 4], []]),
    "tp": (2, {"tp": 2}, 1, [[0, 1, 2, 3, 4]]),
    "pp": (2, {"pp": 2}, 1, [[0, 1, 2, 3, 4]]),
    "cp": (2, {"cp": 2}, 1, [[0, 1, 2, 3, 4]]),
    "hsdp and tp": (4, {"dp_replicate": 2, "tp": 2}, 1, [[4, 3], [0, 1, 2]]),
    "fsdp and pp": (4, {"dp_shard": 2, "pp": 2}, 1, [[0], [1, 2, 3, 4]]),
    "cp and tp": (4, {"cp": 2, "tp": 2}, 1, [[0, 1, 2, 3, 4]]),
    "ep": (2, {"dp_shard": 2}, 2, [[0, 1, 2], [3, 4]]),
    "ep and tp": (2, {"tp": 2}, 2, [[0, 1, 2, 3, 4]]),
}
IN_DEFAULT = ("tp", "pp", "cp")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(
            name,
            marks=[
                pytest.mark.ranks(LAYOUTS[name][0]),
                *([] if name in IN_DEFAULT else [pytest.mark.slow]),
            ],
        )
        for name in LAYOUTS
    ],
)
def test_texts_are_those_of_the_plain_model_without_a_cache(name):
    ranks, degrees, ep, of_ranks = LAYOUTS[name]
    config = HEADS
    if ep > 1:
        config = of_family("qwen3_moe", HEADS)
        config = type(config)(**{**vars(config), "n_experts": 4, "head_dim": 8})
    for numbers, greedy, drawn in run_ranks(ranks, texts_on, config, degrees, ep, of_ranks):
        assert greedy == [without_cache(config, PROMPTS[number]) for number in numbers]
        assert drawn == [
            without_cache(config, PROMPTS[number], DRAWN, DRAWN.seed + number) for number in numbers
        ]


def ends_on_one_process():
    model = model_on(HEADS, {})
    greedy = generate(model, PROMPTS, max_new_tokens=NEW, batch_size=3)
    # each text is that of its prompt alone, and ends by what its caller says
    alone = [generate(model, [prompt], max_new_tokens=NEW)[0] for prompt in PROMPTS]
    ended = generate(
        model, PROMPTS, max_new_tokens=NEW, is_complete=lambda i, text: len(text) == 1 + i
    )
    stopped = generate(model, PROMPTS, max_new_tokens=NEW, stop={greedy[0][1]})
    few = generate(model, PROMPTS, max_new_tokens=NEW, vocab_size=3)
    said = []
    for prompts, new in (([[]], 1), ([[1] * 11], 6)):
        with pytest.raises(ConfigError) as error:
            generate(model, prompts, max_new_tokens=new)
        said.append(str(error.value))
    with torch.no_grad():
        model.stages[0].model.output._parameters["weight"].fill_(float("nan"))
    with pytest.raises(ConfigError, match="NaN or infinite"):
        generate(model, PROMPTS, max_new_tokens=NEW)
    return greedy, alone, ended, stopped, few, said


@pytest.mark.ranks(1)
def test_a_text_ends_at_its_stop_token_its_limit_or_where_the_caller_says():
    ((greedy, alone, ended, stopped, few, said),) = run_ranks(1, ends_on_one_process)
    assert greedy == alone
    assert [len(text) for text in greedy] == [NEW] * len(PROMPTS)
    assert ended == [text[: 1 + i] for i, text in enumerate(greedy)]
    assert stopped[0] == greedy[0][: greedy[0].index(greedy[0][1]) + 1]
    assert all(token < 3 for text in few for token in text)
    assert "has 0 tokens; use 1 to 15" in said[0]
    assert "has 11 tokens; use 1 to 10" in said[1]


def stopped_on_a_rank(degrees, stopping):
    model = model_on(HEADS, degrees)
    asked = []

    def interrupted():
        asked.append(None)
        return torch.distributed.get_rank() == stopping and len(asked) == 3

    prompts = PROMPTS if data_rank(model.mesh)[0] == 0 else []
    with pytest.raises(GenerationStopped):
        generate(model, prompts, max_new_tokens=NEW, interrupted=interrupted)
    again = generate(model, prompts, max_new_tokens=NEW)
    return len(asked), len(again)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("degrees", [{"dp_shard": 2}, {"pp": 2}], ids=str)
def test_all_ranks_stop_after_the_same_token(degrees):
    """Also if a rank without prompts is to stop; and the model generates as before."""
    found = run_ranks(2, stopped_on_a_rank, degrees, 1)
    assert [asked for asked, _ in found] == [3, 3]
    assert found[0][1] == len(PROMPTS)
