"""Time answers to lm_eval beside its own backend of Hugging Face: one model, processor and process.

    titan-lite convert outputs/debug_model exported
    python scripts/compare_evaluation.py exported

Both answer, in turns and in float32, requests about sources of Python: log-likelihoods of answers
to a context, those of whole texts, and 64 tokens to generate. A row has the median seconds of
either (of a processor without a GPU), the ratios, and how far log-likelihoods or texts differ.
"""

import argparse
import statistics
import time
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM

from titan_lite.checkpoint.weights import find_tokenizer, open_weights
from titan_lite.data.stdlib import FOLDER
from titan_lite.distributed.layout import Layout
from titan_lite.environment import check_environment
from titan_lite.features.evaluation import command
from titan_lite.features.evaluation.harness import HarnessModel, puts_bos

SIZES: dict[str, Any] = {"batch_size": 8, "max_length": 512}
KINDS = ("loglikelihood", "loglikelihood_rolling", "generate_until")
WISH = {"until": ["\n\n\n"], "max_gen_toks": 64, "do_sample": False}


def requests_of(kind: str, count: int) -> list[Instance]:
    """Return requests of unequal lengths."""
    found: list[tuple] = []
    texts = [path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("[a-d]*.py"))]
    for number, text in enumerate([text for text in texts if len(text) > 4000][:count]):
        end = 300 + 137 * number % 600
        if kind == "loglikelihood":
            found += [(text[:end], text[end + 50 * choice :][:30]) for choice in range(4)]
        else:
            found.append((text[:end], WISH) if kind == "generate_until" else (text[: 4 * end],))
    return [Instance(kind, {}, each, number) for number, each in enumerate(found)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", help="a model in Hugging Face's format")
    parser.add_argument("--documents", type=int, default=16, help="texts (default %(default)s)")
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    check_environment()
    weights = open_weights(options.folder)
    tokenizer = find_tokenizer(weights, "")
    words = f"{options.folder} --tasks none --dtype float32".split()
    config = command.recipe(weights, command.build_parser().parse_args(words))
    model = command.build_model(config, Layout.from_config(config, 1, weights.config), weights)
    ours = HarnessModel(model, tokenizer, bos=puts_bos(tokenizer), **SIZES)
    theirs = HFLM(options.folder, device=model.device.type, dtype="float32", **SIZES)
    clock = time.perf_counter if model.device.type == "cuda" else time.process_time
    print("| requests | titan_lite, s | lm_eval, s | ratio of each turn | largest difference |")
    print("|---|--:|--:|---|--:|")
    for kind in KINDS:
        requests = requests_of(kind, options.documents)
        seconds: list[list[float]] = [[], []]
        for turn in range(-1, options.turns):  # the first one warms up
            answers = []
            for lm, of_lm in zip((ours, theirs), seconds, strict=True):
                began = clock()
                answers.append(getattr(lm, kind)(requests, disable_tqdm=True))
                of_lm += [clock() - began] if turn >= 0 else []
        pairs = list(zip(*answers, strict=True))
        different = f"{sum(own != other for own, other in pairs)} texts"
        if kind != "generate_until":
            numbers = [[a[0] if isinstance(a, tuple) else a for a in pair] for pair in pairs]
            different = f"{max(abs(own / other - 1) for own, other in numbers):.0e}"
        medians = " | ".join(f"{statistics.median(of_lm):.1f}" for of_lm in seconds)
        ratios = ", ".join(f"{own / other:.2f}" for own, other in zip(*seconds, strict=True))
        print(f"| {len(requests)} {kind} | {medians} | {ratios} | {different} |", flush=True)


if __name__ == "__main__":
    main()
