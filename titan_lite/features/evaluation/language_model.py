"""The sharded model behind lm-evaluation-harness's interface of a language model.

    model = ShardedModel(parallel_model, tokenizer, max_length=4096, batch_size=8)
    lm_eval.evaluator.evaluate(model, tasks)    # on all ranks

Each rank knows all requests, computes its share of them and gets the results of all. Texts become
tokens as in lm_eval's model of Hugging Face on the exported weights: a text begins with BOS.
"""

import json
from collections.abc import Callable, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from titan_lite import progress
from titan_lite.config import ConfigError
from titan_lite.data.tokenizer import Tokenizer
from titan_lite.distributed.generation import GREEDY, generate
from titan_lite.distributed.mesh import data_rank
from titan_lite.distributed.parallelize import ParallelModel
from titan_lite.distributed.process_group import all_gather_objects
from titan_lite.features.evaluation.scoring import Request, score
from titan_lite.models.decoder import Sampling


class Stopped(Exception):
    """The run stops, and with it the evaluation."""


class ShardedModel(TemplateLM):
    """A model on all ranks of its mesh.

    max_length: tokens of a request. batch_size: requests of a rank at a time. goes_on: False if the
    evaluation is to end (Stopped); a collective, between two batches.
    """

    def __init__(
        self,
        model: ParallelModel,
        tokenizer: Tokenizer,
        *,
        max_length: int,
        batch_size: int,
        goes_on: Callable[[], bool] = lambda: True,
    ):
        super().__init__()
        self.model = model
        self.texts = tokenizer
        self.max_length = max_length
        self.batch_size = batch_size
        self.goes_on = goes_on
        self.bos = tokenizer.decode([tokenizer.bos_id])

    def poll(self) -> None:
        """Tell that a batch is done. A collective. Raises Stopped."""
        progress.beat()
        if not self.goes_on():
            raise Stopped

    # Tokens

    @property
    def eot_token_id(self) -> int:
        return self.texts.eos_id

    @property
    def prefix_token_id(self) -> int:
        return self.texts.bos_id

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        **_: Any,
    ) -> list[int]:
        """Return the tokens of a text, with BOS before it unless add_special_tokens is False."""
        return self.texts.encode(string.removeprefix(self.bos), bos=add_special_tokens is not False)

    # Log-likelihoods

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        **_: Any,
    ) -> list[tuple[float, bool]]:
        return self.score([(context, scored) for _, context, scored in requests])

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = True
    ) -> list[float]:
        windows: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for number, request in enumerate(requests):
            of_text = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0]),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            for window in map(make_disjoint_window, of_text):
                windows.append(window)
                owners.append(number)
        totals = [0.0] * len(requests)
        for owner, (log_probability, _) in zip(owners, self.score(windows), strict=True):
            totals[owner] += log_probability
        return totals

    def score(self, pairs: Sequence[tuple[list[int], list[int]]]) -> list[tuple[float, bool]]:
        """Return for pairs of a context and the tokens to score after it their log-probability,
        nats, and True if each is the likeliest. A collective.
        """
        requests = []
        for context, scored in pairs:
            if len(scored) > self.max_length:
                raise ConfigError(
                    f"an evaluation's request scores {len(scored)} tokens, and has at most"
                    f" {self.max_length}; use a longer training.seq_len or evaluation.max_length,"
                    " or another task"
                )
            tokens = [*context, *scored][-(self.max_length + 1) :]
            requests.append(Request(tokens, len(scored)))
        return score(self.model, requests, batch_size=self.batch_size, after_batch=self.poll)

    # Generation

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = True) -> list[str]:
        by_options: dict[str, list[int]] = {}
        for number, request in enumerate(requests):
            by_options.setdefault(json.dumps(request.args[1], sort_keys=True), []).append(number)
        texts: dict[int, str] = {}
        for numbers in by_options.values():
            contexts = [requests[number].args[0] for number in numbers]
            new = self._continue(contexts, requests[numbers[0]].args[1], numbers)
            texts |= zip(numbers, new, strict=True)
        return [texts[number] for number in range(len(requests))]

    def _continue(
        self, contexts: Sequence[str], options: dict[str, Any], numbers: Sequence[int]
    ) -> list[str]:
        """Return the text after each context. numbers: of requests, for seeds. A collective."""
        kwargs: dict[str, Any] = dict(normalize_gen_kwargs(options))
        eos = self.texts.decode([self.eot_token_id])
        stops = handle_stop_sequences(kwargs.get("until"), eos=eos)
        limit = kwargs["max_gen_toks"]
        if limit >= self.max_length:
            raise ConfigError(
                f"an evaluation's request generates {limit} tokens, and has at most"
                f" {self.max_length} with its prompt; use a longer training.seq_len, or another"
                " task"
            )
        sampling = GREEDY
        if kwargs.get("do_sample"):
            sampling = Sampling(
                temperature=kwargs.get("temperature", 1.0),
                top_k=kwargs.get("top_k", 50),  # Hugging Face's defaults
                top_p=kwargs.get("top_p", 1.0),
            )
        rank, degree = data_rank(self.model.mesh)
        own = range(rank, len(contexts), degree)
        room = self.max_length - limit
        prompts = [self.tok_encode(contexts[i])[-room:] for i in own]
        # A stop string begins in one of its last tokens, or in one before them
        last = 2 + max(len(self.texts.encode(stop)) for stop in stops)

        def is_complete(_: int, tokens: Sequence[int]) -> bool:
            text = self.texts.decode(tokens[-last:])
            return any(stop in text for stop in stops if stop)

        new: list[list[int]] = []
        most = -(-len(contexts) // degree)
        for start in range(0, most, self.batch_size):
            batch = slice(start, start + self.batch_size)
            new += generate(
                self.model,
                prompts[batch],
                max_new_tokens=limit,
                stop={self.eot_token_id},
                is_complete=is_complete,
                sampling=sampling,
                seeds=[numbers[i] for i in own[batch]],
                batch_size=self.batch_size,
                vocab_size=self.texts.vocab_size,
            )
            self.poll()
        special = (self.texts.bos_id, self.texts.eos_id)
        texts: dict[int, str] = {}
        for i, tokens in zip(own, new, strict=True):
            text = self.texts.decode([token for token in tokens if token not in special])
            texts[i] = postprocess_generated_text(text, stops, None)
        for of_rank in all_gather_objects(texts):
            texts |= of_rank
        return [texts[i] for i in range(len(contexts))]
