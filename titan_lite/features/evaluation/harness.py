"""The model behind lm_eval's interface, and the scores of tasks.

    evaluation = Evaluation(model, tokenizer, tasks, batch_size=8, max_length=2048)
    result = evaluation.run()       # a collective of all ranks
    result.values["evaluation/hellaswag/acc"], result.shown

Each rank makes all prompts of a task and computes its score, and the ranks share what the model is
asked. So each rank has all scores, and lm_eval needs to know of no other rank.
"""

import functools
import itertools
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from lm_eval.api.model import TemplateLM
from lm_eval.evaluator import evaluate
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan_lite import progress
from titan_lite.data.tokenizer import JsonTokenizer, tokens_around_text
from titan_lite.distributed.generation import GREEDY, GenerationStopped, generate
from titan_lite.distributed.mesh import data_rank
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.process_group import all_equal, all_gather_objects
from titan_lite.feature import Measured
from titan_lite.features.evaluation.log_likelihoods import Request, log_likelihoods
from titan_lite.features.evaluation.tasks import DEFAULT_NEW_TOKENS, SEED, Tasks, quiet
from titan_lite.logging import logger
from titan_lite.models.decoder import Sampling
from titan_lite.resilience import TrainingError, signals

if TYPE_CHECKING:
    from lm_eval.api.instance import Instance

    from titan_lite.data.tokenizer import Tokenizer

BOOTSTRAPS = 1000  # samples for a standard error that has no formula, as of a perplexity
PREFIX = "evaluation"
ERROR = "_stderr"  # after the name of a score
NUMBERS = (int, float, np.number)  # of lm_eval
# Tokens before a stop word that are decoded with it: a decoder may drop a space at the beginning.
TOKENS_BEFORE = 4


class Stopped(Exception):
    """The run stops within an evaluation."""


class HarnessModel(TemplateLM):
    """A sharded model as lm_eval sees it: one rank, which answers all requests."""

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: "Tokenizer",
        batch_size: int,
        max_length: int,
        *,
        bos: bool = True,
        stops: Callable[[], bool] = lambda: False,
    ):
        """bos: texts begin with BOS, as documents do in training. stops: is called between batches,
        and after a token where a rank has received a signal, on all ranks alike; True ends the
        evaluation with Stopped.
        """
        super().__init__()
        self.model = model
        self.of_run = tokenizer
        self.batch_size = batch_size
        self.max_length = max_length
        self.stops = stops
        self.special = frozenset(tokenizer.special_tokens.values())
        self.bos = bos
        self.cut: list[str] = []  # what was longer than max_length, in words

    # What lm_eval asks of a tokenizer

    @property
    def eot_token_id(self) -> int:
        return self.of_run.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.of_run.bos_id

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> list[int]:
        return self.of_run.encode(string, bos=self.bos and add_special_tokens is not False)

    def _decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        return self.of_run.decode([token for token in tokens if token not in self.special])

    def _decode_end(self, tokens: Sequence[int], count: int) -> str:
        """Return the text of the last tokens that are not special, at most `count`."""
        of_text = (token for token in reversed(tokens) if token not in self.special)
        return self.of_run.decode([*itertools.islice(of_text, count)][::-1])

    # Requests

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **_: Any
    ) -> list[tuple[float, bool]]:
        check_same_on_all_ranks([(context, scored) for _, context, scored in requests])
        self._note_cut([len(context) + len(scored) - 1 for _, context, scored in requests])
        if long := sum(len(scored) > self.max_length for _, _, scored in requests):
            self.cut.append(f"of answers longer than it ({long:,}) the last tokens are scored")
        asked = [
            Request((context + scored)[-(self.max_length + 1) :], min(len(scored), self.max_length))
            for _, context, scored in requests
        ]
        found = log_likelihoods(
            self.model, asked, batch_size=self.batch_size, after_batch=self._after_batch
        )
        return [(score.log_likelihood, score.is_greedy) for score in found]

    def loglikelihood(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(
        self, requests: "list[Instance]", disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-likelihood of each text, read in windows of max_length tokens."""
        asked: list[tuple[Any, list[int], list[int]]] = []
        text_of: list[int] = []
        for number, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(*request.args),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in windows:
                asked.append((None, *make_disjoint_window(window)))
                text_of.append(number)
        totals = [0.0] * len(requests)
        for number, (log_likelihood, _) in zip(
            text_of, self._loglikelihood_tokens(asked), strict=True
        ):
            totals[number] += log_likelihood
        return totals

    def generate_until(self, requests: "list[Instance]", disable_tqdm: bool = False) -> list[str]:
        """Return the text after each prompt, up to the first of its stop words, without it."""
        check_same_on_all_ranks([made.args for made in requests])
        texts: dict[int, str] = {}
        alike: dict[tuple[int, Sampling], list[int]] = defaultdict(list)
        wishes = [normalize_gen_kwargs(made.args[1], DEFAULT_NEW_TOKENS) for made in requests]
        for number, wish in enumerate(wishes):
            alike[int(wish["max_gen_toks"]), _sampling(wish)].append(number)
        for (new_tokens, sampling), together in alike.items():
            whole = {i: self.tok_encode(requests[i].args[0]) for i in together}
            self._note_cut([len(prompt) + new_tokens for prompt in whole.values()])
            prompts = {i: whole[i][-(self.max_length - new_tokens) :] for i in together}
            numbers_of = sorted(together, key=lambda i: -len(prompts[i]))
            texts |= self._generate(numbers_of, prompts, wishes, new_tokens, sampling)
        return [texts[number] for number in range(len(requests))]

    def _generate(
        self,
        together: Sequence[int],
        prompts: Mapping[int, list[int]],
        wishes: Sequence[Mapping[str, Any]],
        new_tokens: int,
        sampling: Sampling,
    ) -> dict[int, str]:
        """Return the texts of requests that are generated alike, by their numbers."""
        mesh = self.model.mesh
        dp_rank, dp_degree = data_rank(mesh)
        eos = self.of_run.decode([self.of_run.eos_id])
        until = {i: handle_stop_sequences(wishes[i]["until"], eos=eos) for i in together}
        longest = max(len(word.encode()) for words in until.values() for word in words)
        texts: dict[int, str] = {}
        at_once = self.batch_size * dp_degree * mesh["cp"].size()
        for start in range(0, len(together), at_once):
            own = together[start : start + at_once][dp_rank::dp_degree]

            def is_complete(index: int, new: Sequence[int], own: Sequence[int] = own) -> bool:
                text = self._decode_end(new, longest + TOKENS_BEFORE)
                return any(word in text for word in until[own[index]] if word)

            try:
                found = generate(
                    self.model,
                    [prompts[i] or [self.prefix_token_id] for i in own],
                    max_new_tokens=new_tokens,
                    stop=(self.of_run.eos_id,),
                    is_complete=is_complete,
                    interrupted=lambda: bool(signals.received()),
                    sampling=sampling,
                    seeds=own,
                    batch_size=self.batch_size,
                    vocab_size=self.of_run.vocab_size,
                )
            except GenerationStopped:
                self.stops()  # which tells the run
                raise Stopped from None
            own_texts = {
                i: postprocess_generated_text(self._decode(new), until[i], None)
                for i, new in zip(own, found, strict=True)
            }
            for of_rank in all_gather_objects(own_texts):
                texts |= of_rank
            progress.beat()
            self._after_batch()
        return texts

    def _note_cut(self, lengths: Sequence[int]) -> None:
        """Note requests of more than max_length tokens, which lose their beginning."""
        if longer := sum(length > self.max_length for length in lengths):
            self.cut.append(
                f"{longer:,} of {len(lengths):,} requests are longer than the context of"
                f" {self.max_length:,} tokens, and lose their beginning"
            )

    def _after_batch(self) -> None:
        if self.stops():
            raise Stopped


@functools.cache  # each line once: evaluations of a run have the same requests
def warn(line: str) -> None:
    logger.warning(line)


def check_same_on_all_ranks(requests: Sequence[object]) -> None:
    """Raise TrainingError on all ranks if they would share other requests. A collective."""
    if not all_equal(repr(requests)):
        raise TrainingError(
            "evaluation: ranks have other documents or prompts of a task; remove the caches of"
            " Hugging Face's datasets on all nodes, or have all nodes use one (HF_HOME)",
            everywhere=True,
        )


def puts_bos(tokenizer: "Tokenizer") -> bool:
    """Return True if Hugging Face's libraries put BOS before a text with a tokenizer, as with Llama
    3's. Training always does.
    """
    if not isinstance(tokenizer, JsonTokenizer):
        return True
    around = tokens_around_text(tokenizers.Tokenizer.from_str(tokenizer.content))
    return tokenizer.bos_id in around["bos_token"]


def _sampling(wish: Mapping[str, Any]) -> Sampling:
    """Return how a task chooses tokens: greedy unless it says do_sample or a temperature."""
    if not wish["do_sample"]:
        return GREEDY
    return Sampling(
        temperature=float(wish.get("temperature", 0.0)) or 1.0,
        top_k=int(wish.get("top_k", 0)),
        top_p=float(wish.get("top_p", 1.0)),
        seed=SEED,
    )


@dataclass(frozen=True)
class Evaluation:
    """Tasks, and the model that is to do them."""

    model: ParallelModel
    tokenizer: "Tokenizer"
    tasks: Tasks
    names: Sequence[str]  # of the tasks that the user asked for
    batch_size: int  # requests at a time on a rank
    max_length: int  # tokens of a request
    bos: bool = True  # texts begin with BOS
    limit: int = 0  # documents of each task; 0: all
    is_first: bool = True  # of all ranks, this one computes standard errors without a formula

    def run(self, stops: Callable[[], bool] = lambda: False) -> Measured:
        """Return the scores. A collective of all ranks. Raises Stopped."""
        lm = HarnessModel(
            self.model,
            self.tokenizer,
            self.batch_size,
            self.max_length,
            bos=self.bos,
            stops=stops,
        )
        for task in self.tasks["tasks"].values():
            task.set_fewshot_seed(seed=SEED)  # the same examples in each evaluation
        with quiet():
            found = evaluate(
                lm=lm,
                task_dict=self.tasks,
                limit=self.limit or None,
                bootstrap_iters=BOOTSTRAPS if self.is_first else 0,
                log_samples=False,
            )
        if self.is_first and lm.cut:
            warn(f"evaluation: {'; '.join(lm.cut)}")  # out of `quiet`
        results = {**found["results"], **found.get("groups", {})}
        return _scores(results, self.names)


def _scores(results: Mapping[str, Mapping[str, Any]], names: Sequence[str]) -> Measured:
    """Return scores from lm_eval's {task: {"METRIC,FILTER": value}}, where a filter is mostly none.

    A standard error is METRIC_stderr.
    """
    values: dict[str, float] = {}
    shown = []
    for task, of_task in results.items():
        for name, value in of_task.items():
            metric, comma, filtered = name.partition(",")
            if not comma or not isinstance(value, NUMBERS):  # a name, or N/A
                continue
            score = metric.removesuffix(ERROR)
            key = score if filtered == "none" else f"{score}/{filtered}"
            is_error = score != metric
            values[f"{PREFIX}/{task}/{key}{ERROR if is_error else ''}"] = float(value)
            if task in names and not is_error:
                error = of_task.get(f"{metric}{ERROR},{filtered}")
                with_error = f" ± {_shown(float(error))}" if isinstance(error, NUMBERS) else ""
                shown.append(f"{task} {key} {_shown(float(value))}{with_error}")
    return Measured(values, "  ".join(shown))


def _shown(value: float) -> str:
    return f"{value:.4f}" if abs(value) < 1e4 else f"{value:.3e}"  # of a perplexity
