"""Answers to lm-evaluation-harness are those of its own backend of Hugging Face, on every layout."""

import json
from dataclasses import replace

import pytest
import torch
from evaluation_tasks import TASKS, write_tasks
from in_transformers import in_files, in_memory
from ranks import run_ranks
from test_generation import model_on
from tiny import DEBUG_TOKENIZER, HEADS, of_family

from titan_lite.data.tokenizer import load_tokenizer
from titan_lite.data.tokenizer_json import to_json
from titan_lite.models.huggingface import config_to_hf
from titan_lite.models.transformer import Transformer

pytest.importorskip("lm_eval")
CONTEXT = 32
DENSE = replace(HEADS, vocab_size=2048, max_seq_len=CONTEXT)
MOE = replace(of_family("qwen3_moe", DENSE), n_experts=4, head_dim=8)
ONE = ("one process", 1, {}, 1)
LAYOUTS = [
    ("fsdp", 2, {"dp_shard": 2}, 1),
    ("tp", 2, {"tp": 2}, 1),
    ("pp", 2, {"pp": 2}, 1),
    ("cp", 2, {"cp": 2}, 1),
    ("hsdp and tp", 4, {"dp_replicate": 2, "tp": 2}, 1),
    ("ep", 2, {"dp_shard": 2}, 2),
]


def parameters():
    return [
        pytest.param(
            *layout[1:],
            id=layout[0],
            marks=[pytest.mark.ranks(layout[1]), *([] if layout is ONE else [pytest.mark.slow])],
        )
        for layout in (ONE, *LAYOUTS)
    ]


def answers(lm, tasks):
    """(request, answer) of all requests, in their order."""
    found = []
    for task in tasks["tasks"].values():
        task.build_all_requests()
        kind = task.instances[0].request_type
        given = getattr(lm, kind)(task.instances)
        found += [(made.args, answer) for made, answer in zip(task.instances, given, strict=True)]
    return found


def ours(degrees, ep, folder):
    from titan_lite.features.evaluation.harness import Evaluation, HarnessModel
    from titan_lite.features.evaluation.tasks import load_tasks

    model = model_on(MOE if ep > 1 else DENSE, degrees, ep)
    tokenizer = load_tokenizer(str(DEBUG_TOKENIZER))
    tasks = load_tasks(TASKS, folder)
    lm = HarnessModel(model, tokenizer, 3, CONTEXT)
    # five documents a rank are more than there are: the last batches have ranks without requests
    scores = Evaluation(model, tokenizer, tasks, TASKS, batch_size=5, max_length=CONTEXT).run()
    return answers(lm, tasks), scores.values, scores.shown


def theirs(config, folder, tmp_path):
    """Answers and scores of lm_eval's own backend."""
    import lm_eval.evaluator
    import transformers
    from lm_eval.models.huggingface import HFLM

    from titan_lite.features.evaluation.tasks import load_tasks

    model = Transformer(config)
    model.init_weights(seed=0)
    fields = config_to_hf(config, torch.float32)
    of_theirs = transformers.AutoConfig.for_model(fields.pop("model_type"), **fields)
    exported = transformers.AutoModelForCausalLM.from_config(of_theirs).float()
    exported.load_state_dict(in_memory(in_files(model, config)))
    tokenizer = load_tokenizer(str(DEBUG_TOKENIZER))
    (tmp_path / "tokenizer.json").write_text(json.dumps(to_json(tokenizer)))
    fast = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(tmp_path / "tokenizer.json"),
        bos_token="<|begin_of_text|>",
        eos_token="<|end_of_text|>",
    )
    lm = HFLM(exported, tokenizer=fast, max_length=CONTEXT, batch_size=1, device="cpu")
    tasks = load_tasks(TASKS, folder)
    scores = lm_eval.evaluator.evaluate(lm, tasks, bootstrap_iters=1000, log_samples=False)
    return answers(lm, tasks), scores["results"]


@pytest.mark.parametrize(("ranks", "degrees", "ep"), parameters())
def test_answers_and_scores_are_those_of_the_backend_of_hugging_face(ranks, degrees, ep, tmp_path):
    folder = write_tasks(tmp_path)
    expected, results = theirs(MOE if ep > 1 else DENSE, folder, tmp_path)
    for found, values, shown in run_ranks(ranks, ours, degrees, ep, folder):
        assert [request for request, _ in found] == [request for request, _ in expected]
        for (request, answer), (_, right) in zip(found, expected, strict=True):
            if isinstance(right, tuple):
                assert answer[1] == right[1], request
                answer, right = answer[0], right[0]
            approximate = right if isinstance(right, str) else pytest.approx(right, 1e-5, 1e-5)
            assert answer == approximate, request
        for task, of_task in results.items():
            for name, value in of_task.items():
                metric, _, filtered = name.partition(",")
                if filtered and not isinstance(value, str):
                    key = f"evaluation/{task}/{metric}"
                    # ranks but the first have no errors that are sampled
                    assert values.get(key, value) == pytest.approx(value, 1e-6), key
        assert "choice acc " in shown
        assert "until exact_match 0.0000 ± 0.0000" in shown
