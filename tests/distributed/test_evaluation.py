"""Answers to lm-evaluation-harness are those of its own backend of Hugging Face, on every layout."""

import json
from dataclasses import replace
from types import SimpleNamespace

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


def harness(stops=lambda: False):
    from titan_lite.features.evaluation.harness import HarnessModel

    model = model_on(DENSE, {})
    return HarnessModel(model, load_tokenizer(str(DEBUG_TOKENIZER)), 3, CONTEXT, stops=stops)


def asked(*arguments):
    return SimpleNamespace(args=arguments)


def answers_that_are_cut():
    lm = harness()
    long = "def read(path): " * 40
    lm.loglikelihood([asked("import", " os"), asked(long, " x"), asked("x", long)])
    lm.generate_until(
        [asked(prompt, {"until": ["q"], "max_gen_toks": 8}) for prompt in (long, "a")]
    )
    return lm.cut


@pytest.mark.ranks(1)
def test_requests_that_lose_their_beginning_are_told():
    (cut,) = run_ranks(1, answers_that_are_cut)
    assert cut == [
        "2 of 3 requests are longer than the context of 32 tokens, and lose their beginning",
        "of answers longer than it (1) the last tokens are scored",
        "1 of 2 requests are longer than the context of 32 tokens, and lose their beginning",
    ]


def stopped_within_a_text():
    from titan_lite.features.evaluation.harness import Stopped
    from titan_lite.resilience import signals

    tokens = []

    def received():
        tokens.append(None)
        return "SIGTERM" if len(tokens) == 2 else ""

    signals.received = received
    told = []
    lm = harness(stops=lambda: told.append(None) or True)
    with pytest.raises(Stopped):
        lm.generate_until([asked("import", {"until": [], "max_gen_toks": 8})])
    return len(tokens), len(told)


@pytest.mark.ranks(1)
def test_a_signal_ends_a_text_after_the_next_token_and_the_run_is_asked():
    assert run_ranks(1, stopped_within_a_text) == [(2, 1)]


def ends_of_texts():
    """Where words of one to many bytes are found in a text's last tokens, and in all of them."""
    from titan_lite.features.evaluation.harness import TOKENS_BEFORE

    lm = harness()
    text = "import os\nfrom pathlib import Path\n\nprint('\u00e9\u20ac', Path)  # the end"
    tokens = lm.of_run.encode(text, bos=False)
    tokens.insert(len(tokens) // 2, lm.of_run.bos_id)  # special tokens are no text
    parts = [tokens[: n + 1] for n in range(len(tokens))]
    found = []
    for word in ("\n", "\u00e9\u20ac", " Path\n\nprint(", "the end", "z"):
        count = len(word.encode()) + TOKENS_BEFORE
        in_end = [word in lm._decode_end(part, count) for part in parts]
        in_all = [word in lm._decode(part) for part in parts]
        found.append(
            (in_end.index(True), in_all.index(True)) if any(in_all) else (word, any(in_end))
        )
    return found


@pytest.mark.ranks(1)
def test_a_stop_word_is_found_in_the_last_tokens_of_a_text():
    ((*found, missing),) = run_ranks(1, ends_of_texts)
    assert all(in_end == in_all for in_end, in_all in found)
    assert missing == ("z", False)
