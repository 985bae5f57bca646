"""Keep the table of tied embeddings on both ends of a pipeline: the first stage reads it as the
embedding, the last one as the output.

    table = TiedTable(model.stages, layout, mesh["pp"])
    table.add_gradients()       # after the last backward of a step
    table.update_copy()         # whenever parameters have changed

The parameter of the run is the first stage's: the optimizer updates it, checkpoints have it, and
the gradient norm counts it. The last stage has a copy without optimizer state. A rank exchanges its
shard with the rank that has the same shard of the other stage:

    first stage   gradient of the embedding + that of the output -> update -> table
                                                      ^                         |
    last stage                              gradient of the output             copy

Megatron-LM sums the gradient on both stages, and both update their tables. A copy takes a second
transfer in each step, which nothing hides, and saves the last stage the two moments. It is the same
to the bit whatever the update is, and whatever sums the gradients over replicas.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite.distributed.layout import Layout
from titan_lite.distributed.param_collectives import record_start
from titan_lite.distributed.stage import Stage
from titan_lite.dtensor import gradient_shard, local

FQN = "tok_embeddings.weight"


class TiedTable:
    """This rank's part in keeping the table and its copy equal.

    Its methods do nothing for untied embeddings, for an unsplit model, and on ranks without the
    first or the last stage. Where a rank has both, as in a V-shaped schedule, nothing is sent.
    """

    table: nn.Parameter | None = None
    copy: nn.Parameter | None = None

    def __init__(self, stages: Iterable[Stage], layout: Layout, pp: DeviceMesh):
        self.group = pp.get_group()
        self.first_rank = layout.pipeline.rank_of[0]  # along pp
        self.last_rank = layout.pipeline.rank_of[-1]
        for stage in stages if layout.copies_table else ():
            embedding, output = stage.model.tok_embeddings, stage.model.output
            if embedding is not None:  # it may be in another stage
                self.table = embedding._parameters["weight"]
            if output is not None:
                self.copy = output._parameters["weight"]

    @torch.no_grad()
    def add_gradients(self) -> None:
        """Add the gradient of the copy to that of the table, and free it."""
        if self.copy is not None:
            of_copy = gradient_shard(self.copy)
            self.copy.grad = None
            if self.table is None:
                self._send(of_copy, self.first_rank)
        if self.table is not None:
            of_table = gradient_shard(self.table)
            if self.copy is None:
                of_copy = torch.empty_like(of_table)
                self._receive(of_copy, self.last_rank)
            of_table += of_copy

    @torch.no_grad()
    def update_copy(self) -> None:
        """Copy the table to the last stage."""
        if self.table is not None and self.copy is not None:
            local(self.copy).copy_(local(self.table))
        elif self.table is not None:
            self._send(local(self.table), self.last_rank)
        elif self.copy is not None:
            self._receive(local(self.copy), self.first_rank)

    def _send(self, shard: Tensor, rank: int) -> None:
        """Send a shard to a rank along pp; the watchdog can name the parameter."""
        record_start(self.group.group_name, FQN)
        dist.send(shard, group=self.group, group_dst=rank)

    def _receive(self, shard: Tensor, rank: int) -> None:
        """Receive a shard in place, as `_send` sends it."""
        record_start(self.group.group_name, FQN)
        dist.recv(shard, group=self.group, group_src=rank)
