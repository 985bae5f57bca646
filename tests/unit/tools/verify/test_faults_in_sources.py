"""Faults in the package's source, of the kinds that Megatron-LM 7452 lists: each is a difference on
a layout of few ranks.
"""

import dataclasses
import math

import pytest
import torch
from tiny import RECIPES

from titan_lite.collectives import all_gather
from titan_lite.config import load_config
from titan_lite.distributed import (
    context_parallel,
    expert_parallel,
    parallelize,
    param_collectives,
    simple_fsdp,
    tensor_parallel,
)
from titan_lite.distributed.buckets import Bucket
from titan_lite.distributed.gradient_reducer import BucketReduction
from titan_lite.distributed.layout import DEGREES, Layout
from titan_lite.distributed.mesh import PARAMETER_AXES
from titan_lite.distributed.param_collectives import ShardSpec
from titan_lite.distributed.step_gather import StepGradients, StepReader
from titan_lite.features.moe import balance
from titan_lite.models import loss
from titan_lite.tools.verify import check, trace_ranks
from titan_lite.tools.verify.proxy import KEYS

THIS = "test_faults_in_sources.py"  # the fault's own line
FAULTS = {}  # name: (what plants it, degrees, options, what the verdict names)


def fault(*options, named, **degrees):
    """Return a decorator of a function that plants a fault, seen on a layout of these degrees.

    named: of the first wrong value, its operator or source file; or what a rank has.
    """

    def decorate(plant):
        FAULTS[plant.__name__] = (plant, degrees, options, named)
        return plant

    return decorate


def with_sums(change):
    """Change the groups over which the gradients of a shard are summed."""
    right = simple_fsdp.shard_parameter

    def wrong(*arguments):
        parameter, spec = right(*arguments)
        return parameter, dataclasses.replace(spec, sum_groups=change(spec.sum_groups))

    return wrong


@fault(tp=2, named="param_collectives.py")
def norms_are_not_summed_over_tp(patch):
    patch.setattr(simple_fsdp, "shard_parameter", with_sums(lambda groups: ()))


@fault(dp_replicate=2, named="param_collectives.py")
def nothing_is_summed_over_replicas(patch):
    patch.setattr(simple_fsdp, "shard_parameter", with_sums(lambda groups: groups[1:]))


@fault(tp=2, named="all_reduce")
def norms_are_summed_twice(patch):
    patch.setattr(simple_fsdp, "shard_parameter", with_sums(lambda groups: groups * 2))


@fault(dp_shard=2, named=THIS)
def gradients_are_means(patch):
    right = ShardSpec.finish_reduce
    patch.setattr(ShardSpec, "finish_reduce", lambda self, x: right(self, x) / self.axis.degree)


@fault(
    "--parallelism.fsdp_communication=step",
    "--training.global_batch_size=8",
    dp_shard=2,
    named="embedding",  # its elements are the right ones
)
def a_weight_of_a_step_begins_with_the_last_rank(patch):
    right = Bucket.weights_of
    patch.setattr(
        Bucket, "weights_of", lambda self, tables: right(self, [table.flip(0) for table in tables])
    )


@fault(
    "--parallelism.fsdp_communication=step",
    "--training.global_batch_size=16",
    dp_replicate=2,
    dp_shard=2,
    named="reduce: ",
)
def a_bucket_is_not_summed_over_replicas(patch):
    right = BucketReduction.__init__

    def wrong(self, bucket, dtype):
        right(self, bucket, dtype)
        self.remaining = min(1, self.remaining)

    patch.setattr(BucketReduction, "__init__", wrong)


@fault(
    "--parallelism.fsdp_communication=step",
    "--training.global_batch_size=8",
    "--model.tied_embeddings=yes",
    dp_shard=2,
    named="reduce: ",
)
def one_gradient_of_a_tied_table_is_lost(patch):
    right = StepReader.receive

    def wrong(self, fqn, gradient):
        is_first = self.reads[fqn] > 1 and fqn not in self.first_reads
        right(self, fqn, torch.zeros_like(gradient) if is_first else gradient)

    patch.setattr(StepReader, "receive", wrong)


@fault(
    "--parallelism.fsdp_communication=step",
    "--training.global_batch_size=8",
    dp_shard=2,
    named="reduce: ",
)
def the_last_microbatch_replaces_the_others(patch):
    right = StepGradients.add

    def wrong(self, spec, gradient, *, copy):
        self.sums.pop(spec.fqn, None)
        right(self, spec, gradient, copy=copy)

    patch.setattr(StepGradients, "add", wrong)


@fault(cp=2, named="rank 0: its labels are not those of its place")
def labels_are_the_first_ones(patch):
    right = parallelize.ParallelModel.to_device

    def wrong(self, input, label, **tokens):
        batch = right(self, input, label, **tokens)
        return batch._replace(label=label[:, : len(self.positions)])

    patch.setattr(parallelize.ParallelModel, "to_device", wrong)


@fault("--training.mask_documents", cp=2, named="rank 0: its doc_starts are not those of its place")
def documents_are_those_of_own_tokens(patch):
    right = parallelize.ParallelModel.to_device

    def wrong(self, input, label, *, bos_id, eos_id):
        batch = right(self, input, label, bos_id=bos_id, eos_id=eos_id)
        starts = parallelize.doc_starts(batch.input, bos_id, eos_id)
        return batch._replace(model_kwargs={"doc_starts": starts})

    patch.setattr(parallelize.ParallelModel, "to_device", wrong)


@fault("--training.mask_documents", named="rank 0: a run does not give the model doc_starts")
def documents_are_forgotten(patch):
    right = parallelize.ParallelModel.to_device
    patch.setattr(
        parallelize.ParallelModel,
        "to_device",
        lambda *arguments, **ids: right(*arguments, **ids)._replace(model_kwargs={}),
    )


@fault(
    "--parallelism.fsdp_communication=step",
    "--training.global_batch_size=8",
    cp=2,
    named="models/transformer.py",  # the gradient of hidden states lacks a part
)
def values_have_no_gradient(patch):
    patch.setattr(
        parallelize,
        "causal_attention",
        lambda q, k, v, mask=None: context_parallel.causal_attention(q, k, v.detach(), mask),
    )


@fault(cp=2, named="the shard of tok_embeddings.weight")
def gradients_are_not_summed_over_cp(patch):
    patch.setattr(parallelize, "parameter_mesh", lambda mesh: mesh[PARAMETER_AXES])


@fault(dp_shard=3, named="the shard of layers.0.attention.wq.weight")
def uneven_shards_are_cut_as_numpy_does(patch):
    def wrong(size, parts, index):
        ends = [size * part // parts for part in range(parts + 1)]
        return range(ends[index], ends[index + 1])

    for module in (simple_fsdp, param_collectives):
        patch.setattr(module, "chunk_range", wrong)


@fault(cp=2, named="context_parallel.py")
def tails_come_in_the_order_of_ranks(patch):
    def wrong(gathered, degree):
        return gathered.unflatten(1, (degree, 2, -1)).transpose(1, 2).flatten(1, 3)

    patch.setattr(context_parallel, "in_position_order", wrong)


@fault(cp=2, named="rank 0: positions")
def positions_are_contiguous(patch):
    patch.setattr(
        parallelize,
        "own_positions",
        lambda n, rank, cp: [*range(rank * n // cp, (rank + 1) * n // cp)],
    )


@fault(cp=2, named="rank 0: positions")
def positions_are_of_the_other_rank(patch):
    right = parallelize.own_positions
    patch.setattr(parallelize, "own_positions", lambda n, rank, cp: right(n, cp - 1 - rank, cp))


@fault(cp=2, named="context_parallel.py")
def a_causal_mask_begins_at_the_first_key(patch):
    def wrong(q, k, v, mask=None):
        k, v = k[:, : q.shape[1]], v[:, : q.shape[1]]
        return context_parallel.causal_attention(q, k, v, mask)

    patch.setattr(parallelize, "causal_attention", wrong)


@fault(tp=2, named="embedding")
def the_vocabulary_begins_one_late(patch):
    right = loss.VocabularyShard.entries.fget

    def wrong(self):
        entries = right(self)
        return range(entries.start + (self.axis.rank > 0), entries.stop)

    patch.setattr(loss.VocabularyShard, "entries", property(wrong))


@fault(tp=2, named="embedding")
def labels_of_other_ranks_are_found(patch):
    def wrong(self, tokens):
        index = (tokens - self.entries.start).clamp(0, len(self.entries) - 1)
        return index, index >= 0

    patch.setattr(loss.VocabularyShard, "find", wrong)


@fault("--training.loss_chunk_tokens=-1", tp=2, named="loss.py")
def sums_of_the_loss_are_not_reduced(patch):
    patch.setattr(loss, "all_reduce", lambda x, how, group: x)


@fault(tp=2, named="loss.py")
def a_loss_in_chunks_is_not_reduced(patch):
    patch.setattr(loss, "all_reduce", lambda x, how, group: x)


@fault(tp=2, named=THIS)
def hidden_states_are_means(patch):
    right = tensor_parallel.reduce_scatter
    patch.setattr(
        tensor_parallel, "reduce_scatter", lambda x, degree, group: right(x, degree, group) / degree
    )


@fault(tp=2, named="models/transformer.py")
def tokens_are_gathered_in_another_order(patch):
    right = tensor_parallel.all_gather

    def wrong(x, degree, group):
        return torch.cat(right(x, degree, group).chunk(degree)[::-1])

    patch.setattr(tensor_parallel, "all_gather", wrong)


@fault(dp_shard=2, ep=2, named=THIS)
def experts_return_means(patch):
    right = expert_parallel._reduce_scatter
    patch.setattr(expert_parallel, "_reduce_scatter", lambda x, axis: right(x, axis) / axis.degree)


@fault(dp_shard=2, ep=2, named="models/experts.py")
def choices_are_not_gathered(patch):
    right = expert_parallel._all_gather

    def wrong(x, axis):
        return x.repeat(axis.degree, 1) if x.dtype == torch.int64 else right(x, axis)

    patch.setattr(expert_parallel, "_all_gather", wrong)


@fault("--experts.balance=sequence", dp_shard=1, tp=2, named="models/experts.py")
def shares_of_sequences_are_of_own_tokens(patch):
    right = balance.apply_balance

    def wrong(model, how, mesh):
        right(model, how, mesh)
        for router in balance.routers_of(model).values():
            router.sequence_groups = ()

    patch.setattr(balance, "apply_balance", wrong)


@fault(dp_replicate=2, dp_shard=2, named="rank 2: data-parallel rank")
def data_ranks_have_another_order(patch):
    def wrong(mesh):
        shard, replicate = mesh["dp_shard"], mesh["dp_replicate"]
        rank = shard.get_local_rank() * replicate.size() + replicate.get_local_rank()
        return rank, shard.size() * replicate.size()

    patch.setattr(trace_ranks, "data_rank", wrong)


@fault(tp=2, named="models/transformer.py")
def one_rank_joins_tokens_in_another_order(patch):
    """With the same operators as the other one."""

    def wrong(x, axis):
        parts = all_gather(x.contiguous(), axis.degree, axis.group).chunk(axis.degree)
        return torch.cat(parts[::-1] if axis.rank else parts, dim=1)

    patch.setattr(tensor_parallel, "all_gather_tokens", wrong)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_in_the_source_is_a_difference_and_is_named(name, monkeypatch):
    monkeypatch.setattr(check, "compare_sizes", lambda *_: None)
    plant, degrees, options, named = FAULTS[name]
    keys = [f"--parallelism.{key}={degrees.get(axis, 1)}" for axis, key in KEYS.items()]
    is_of_experts = "ep" in degrees or any("experts" in option for option in options)
    recipe = "qwen3_moe_debug" if is_of_experts else "llama3_8b"
    config = load_config(RECIPES / f"{recipe}.toml", [*keys, *options])
    layout = Layout.from_config(config, math.prod(degrees.get(axis, 1) for axis in DEGREES))
    plant(monkeypatch)
    verdict = check.check_layout(config, layout)
    assert not verdict.agrees
    assert named in (verdict.first_wrong or verdict.differences[0])
