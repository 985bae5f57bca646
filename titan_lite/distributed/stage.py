"""A pipeline stage of this rank: its model, its sharding and, if it is compiled, its graphs.

    stage = Stage(model, apply_simple_fsdp(model, mesh, options))
    stage.compiled = compile_model(TraceableModel(...), schedule)   # None: eager mode
    with stage.gathered_for_step(microbatches=4):
        stage(tokens).sum().backward()

An unsplit model is one stage. Who runs a stage calls it, and never its model: the model alone
does not know its graphs.
"""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from titan_lite.distributed.simple_fsdp import Sharding
from titan_lite.models.transformer import Transformer

if TYPE_CHECKING:  # with Inductor, a second to import
    from titan_lite.compile.compiled_model import CompiledModel


@dataclass
class Stage:
    """A model or a pipeline stage of it, called as the model is."""

    model: Transformer
    sharding: Sharding
    compiled: "CompiledModel | None" = None
    compiled_for_repeat: "CompiledModel | None" = None  # in its place within `repeating`

    def __call__(self, *args: Tensor, **model_kwargs: Tensor) -> Tensor:
        run = self.model if self.compiled is None else self.compiled
        output: Tensor = run(*args, **model_kwargs)
        return output

    @contextmanager
    def repeating(self) -> Iterator[None]:
        """Return a context in which a step runs again with the model changed (StepPart.repeat): it
        has graphs of its own, made when a step needs them first.
        """
        self.compiled, self.compiled_for_repeat = self.compiled_for_repeat, self.compiled
        try:
            yield
        finally:
            self.compiled, self.compiled_for_repeat = self.compiled_for_repeat, self.compiled

    def gathered_for_step(self, microbatches: int) -> AbstractContextManager[None]:
        """Return a context in which weights are gathered once and gradients reduced once, for all
        microbatches of an optimizer step (step_gather.py).
        """
        return self.sharding.gathered_for_step(microbatches, compiled=self.compiled is not None)
