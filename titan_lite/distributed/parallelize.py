"""Build this rank's part of the model: split, parallelize, checkpoint, shard, compile.

    model = parallelize(config, layout, mesh, machine=machine)      # on the meta device
    model.materialize(device)
    model.init_weights(seed=0)
    losses = model.forward_backward(batches, tokens)                # of each local batch

The trainer, the planner, `verify` and the parity tests all call this.
"""

import functools
from collections.abc import Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from titan_lite import progress
from titan_lite.compile.report import CompileReport
from titan_lite.config import Config, Parallelism
from titan_lite.distributed.activation_checkpoint import (
    apply_activation_checkpoint,
    checkpoint_rule,
)
from titan_lite.distributed.axes import axes_of, by_axis
from titan_lite.distributed.context_parallel import (
    apply_context_parallel,
    causal_attention,
    own_positions,
)
from titan_lite.distributed.expert_parallel import apply_expert_parallel
from titan_lite.distributed.layout import AXES, Layout
from titan_lite.distributed.mesh import axis_of, expert_mesh, parameter_mesh
from titan_lite.distributed.pipeline import (
    DeviceBatch,
    MicrobatchShapes,
    Pipeline,
    SingleStage,
    keep_modules,
)
from titan_lite.distributed.pipeline_schedule import backwards_of
from titan_lite.distributed.process_group import all_gather_objects
from titan_lite.distributed.simple_fsdp import (
    FSDPOptions,
    apply_simple_fsdp,
    materialize,
)
from titan_lite.distributed.stage import Stage
from titan_lite.distributed.stage_ranks import stage_ranks
from titan_lite.distributed.tensor_parallel import apply_tensor_parallel
from titan_lite.distributed.tied_table import TiedTable
from titan_lite.dtensor import shard_of
from titan_lite.feature import all_features, features_of
from titan_lite.models.attention import doc_starts, doc_stats, masks_by_kernel
from titan_lite.models.loss import Loss, VocabularyShard
from titan_lite.models.transformer import Transformer, saved_buffers, takes_documents

if TYPE_CHECKING:  # Inductor takes a second to import, and an eager run does without
    from titan_lite.compile.graph_passes import GraphPasses
    from titan_lite.cost.machine import Machine


@dataclass
class ParallelModel:
    """This rank's pipeline stages, and how a batch goes through them."""

    stages: list[Stage]
    config: Config
    layout: Layout
    mesh: DeviceMesh
    # one for each graph, filled when it is compiled at a stage's first call
    compile_reports: list[CompileReport] = field(default_factory=list)
    # set by `materialize`
    device: torch.device = field(init=False)
    positions: Tensor = field(init=False)  # of this rank's tokens in a sequence
    tied_table: TiedTable = field(init=False)
    runner: SingleStage | Pipeline = field(init=False)
    needs_doc_stats: bool = field(init=False)  # by the attention kernel of this device

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters by FQN, over all stages, without the copy of a tied table (tied_table.py)."""
        return {
            fqn: parameter
            for stage in self.stages
            for fqn, parameter in stage.model.named_parameters()
            if parameter is not self.tied_table.copy
        }

    @property
    def buffers(self) -> dict[str, Tensor]:
        """Buffers that a checkpoint has, by FQN, over all stages: equal on the ranks of a stage."""
        return {
            fqn: stage.model.get_buffer(fqn)
            for stage in self.stages
            for fqn in saved_buffers(stage.model)
        }

    def materialize(self, device: torch.device) -> None:
        """Allocate this rank's shards, uninitialized, and connect its stages to other ranks'."""
        for stage in self.stages:
            materialize(stage.model, device)
        training = self.config.training
        self.device = device
        self.positions = torch.tensor(self.stages[0].model.positions, device=device)
        self.tied_table = TiedTable(self.stages, self.layout, self.mesh["pp"])
        self.runner = build_runner(self, device)
        self.needs_doc_stats = training.mask_documents and masks_by_kernel(
            device,
            getattr(torch, training.mixed_precision_param),
            self.layout.model.head_dim,
            self.layout.degrees["cp"],
        )
        # a family of a user's own with another function gets a mask
        self.needs_doc_stats &= all(takes_documents(stage.model) for stage in self.stages)

    def init_weights(self, seed: int) -> None:
        """Initialize parameters and buffers; values depend on seed and FQN, not on the layout."""
        for stage in self.stages:
            stage.model.init_weights(seed, shard_of)

    def parameters_have_changed(self) -> None:
        """Copy a tied table to the last stage, and compute the scales with which weights travel.

        A collective. Call it after parameters are initialized, loaded or updated.
        """
        self.tied_table.update_copy()
        for stage in self.stages:
            stage.sharding.parameters_have_changed()

    def to_device(self, input: Tensor, label: Tensor, *, bos_id: int, eos_id: int) -> DeviceBatch:
        """Move a local batch (B, T) to the device, with what the model needs beside tokens.

        bos_id, eos_id: the tokens that begin and end a document, for training.mask_documents.
        """
        on_device = input.to(self.device, non_blocking=True)
        own_label = label.to(self.device, non_blocking=True)[:, self.positions]
        model_kwargs = {}
        if self.config.training.mask_documents:
            starts = doc_starts(on_device, bos_id, eos_id)
            model_kwargs["doc_starts"] = starts[:, self.positions]
        if self.needs_doc_stats:
            # on the host, as the batch is
            model_kwargs["doc_stats"] = doc_stats(input, bos_id, eos_id)
        return DeviceBatch(on_device[:, self.positions], own_label, model_kwargs)

    def forward_backward(self, batches: Sequence[DeviceBatch], tokens: Tensor) -> list[Tensor]:
        """Compute the gradients of an optimizer step, and return the losses of each local batch.

        tokens: counted ones of the step, over all ranks and replica groups: a scalar. Losses are
        divided by them: one for each sequence, (B,), zero before the last pipeline stage.
        """
        losses = []
        with ExitStack() as gathered:
            if self.layout.gathers_once:
                uses = len(batches) * self.layout.pipeline.microbatches
                for stage in self.stages:
                    gathered.enter_context(stage.gathered_for_step(uses))
            for batch in batches:
                losses.append(self.runner.forward_backward(batch, tokens))
                progress.beat()
        self.tied_table.add_gradients()
        return losses

    def evaluate(self, batch: DeviceBatch) -> Tensor:
        """Return the summed loss of each sequence of a local batch, (B,), without gradients; zero
        before the last stage.

        Modules are in the mode of evaluation meanwhile.
        """
        for stage in self.stages:
            stage.model.eval()
        try:
            return self.runner.evaluate(batch)
        finally:
            for stage in self.stages:
                stage.model.train()


def parallelize(
    config: Config,
    layout: Layout,
    mesh: DeviceMesh,
    *,
    machine: "Machine | None" = None,
    graph_passes: "GraphPasses | None" = None,
    backwards: Sequence[Collection[str]] | None = None,
) -> ParallelModel:
    """Build this rank's stages on the meta device. A collective: it may make process groups.

    The order matters. Context, tensor and expert parallelism decide which tokens and weights a rank
    has. Checkpointing comes before SimpleFSDP, so that recomputing a block reads its weights again.
    The compiler comes last, to see all collectives.

    machine: what the passes estimate times on. graph_passes: replace those of the recipe; with
    them, stages are compiled even if the recipe does not. backwards: replaces the kinds of backward
    that the stages of the layout run (`backwards_of`).
    """
    compiled = config.compile.enable
    tp = axis_of(mesh["tp"])
    loss = Loss(VocabularyShard(layout.model.vocab_size, tp), chunk=layout.loss_chunk)
    positions = own_positions(layout.seq_len, mesh["cp"].get_local_rank(), mesh["cp"].size())
    shard_mesh = parameter_mesh(mesh)
    mesh_of_experts = None
    if layout.model.n_experts:
        mesh_of_experts = expert_mesh(mesh, shard_mesh, layout.expert_parallel)
    fsdp = FSDPOptions(
        param_dtype=getattr(torch, config.training.mixed_precision_param),
        reduce_dtype=getattr(torch, config.training.mixed_precision_reduce),
        keep_gathered=kept_gathered(config.parallelism),
    )
    features = features_of(config)
    for feature in features:
        fsdp = feature.fsdp_options(config, fsdp)

    stages = []
    indices = layout.pipeline.stages_of(mesh["pp"].get_local_rank())
    for index in indices:
        modules = layout.pipeline.modules[index]
        with torch.device("meta"):
            model = Transformer(layout.model, positions)
        keep_modules(model, modules)
        apply_context_parallel(model, axis_of(mesh["cp"]), causal_attention)
        for feature in features:
            feature.before_tensor_parallel(config, model, tp)
        apply_tensor_parallel(model, mesh["tp"], layout.model.family)
        if mesh_of_experts is not None and layout.expert_parallel > 1:
            apply_expert_parallel(model, mesh_of_experts["ep"])
        for feature in features:
            feature.before_checkpointing(config, model, mesh)
        apply_activation_checkpoint(
            model.layers,
            config.activation_checkpoint.mode,
            config.activation_checkpoint.selective_ac_option,
            compiled=compiled,
        )
        sharding = apply_simple_fsdp(model, shard_mesh, fsdp, mesh_of_experts)
        if model.output is not None:
            model.output.loss = loss
        stages.append(Stage(model, sharding))

    parallel = ParallelModel(stages, config, layout, mesh)
    if compiled and graph_passes is None:
        graph_passes = build_graph_passes(config, mesh, machine)
    if graph_passes is not None:
        parallel.compile_reports = graph_passes.reports
        if backwards is None:
            backwards = backwards_of(config.parallelism, layout.pipeline)
        compile_stages(stages, [backwards[index] for index in indices], config, mesh, graph_passes)
    return parallel


def kept_gathered(parallelism: Parallelism) -> tuple[str, ...] | None:
    """Return the FQN prefixes of weights that stay gathered until backward; None: all do."""
    if parallelism.fsdp_reshard_after_forward == "never":
        return None
    if parallelism.fsdp_reshard_after_forward == "always":
        return ()
    return parallelism.fsdp_keep_gathered


def build_graph_passes(
    config: Config, mesh: DeviceMesh, machine: "Machine | None"
) -> "GraphPasses":
    """Return what runs the passes of the recipe on each graph."""
    from titan_lite.compile.graph_passes import GraphPasses, choose_passes
    from titan_lite.compile.settings import PassSettings

    fused = config.compile.backend == "inductor"
    settings = PassSettings(config.compile, machine, fused=fused, ranks=stage_ranks(mesh))
    return GraphPasses(settings, choose_passes(config), dump_folder=graph_folder(config, mesh))


def graph_folder(config: Config, mesh: DeviceMesh) -> Path | None:
    """Return where this rank writes its graphs, None if it does not.

    Of the ranks of a stage, which have the same graphs, the first one writes.
    """
    first = all(mesh[axis].get_local_rank() == 0 for axis in AXES if axis != "pp")
    if not config.compile.dump_graphs or not first:
        return None
    stage = f"pp_{mesh['pp'].get_local_rank()}_{config.compile.bucketing}"
    return Path(config.job.dump_folder) / "graphs" / stage


def compile_stages(
    stages: Sequence[Stage],
    backwards: Sequence[Collection[str]],
    config: Config,
    mesh: DeviceMesh,
    graph_passes: "GraphPasses",
) -> None:
    """Compile each stage, in place. Graphs are made at the first call of a stage.

    backwards: of each stage, as in `backwards_of`.
    """
    from titan_lite.compile.compile import compile_model
    from titan_lite.compile.model_parts import TraceableModel

    checkpointing = config.activation_checkpoint
    budget = checkpointing.memory_budget if checkpointing.mode == "memory_budget" else 1.0
    features = features_of(config)
    split_backward = None
    # The kinds say it, and not the recipe: `verify` traces a stage without its pipeline.
    if any("I" in kinds for kinds in backwards):
        (split_backward,) = filter(None, [each.split_backward() for each in all_features()])
    for stage, kinds in zip(stages, backwards, strict=True):
        inductor_settings: dict[str, object] = {}
        for feature in features:
            inductor_settings |= feature.inductor_settings(config, stage.model, mesh)
        compiled = functools.partial(
            compile_model,
            TraceableModel(stage.model, stage.sharding, stage.model.layers, checkpoint_rule),
            graph_passes,
            full_backward="B" in kinds,
            split_backward=split_backward if "I" in kinds else None,
            inductor_settings=inductor_settings,
        )
        stage.compiled = compiled(memory_budget=budget)
        stage.compiled_for_repeat = compiled()


def build_runner(model: ParallelModel, device: torch.device) -> SingleStage | Pipeline:
    """Return what sends a batch through the stages: a schedule if there are several ranks of pp."""
    layout, mesh = model.layout, model.mesh
    if layout.degrees["pp"] == 1:
        return SingleStage(model.stages[0])
    size = layout.microbatch_size
    tokens = layout.seq_len // layout.degrees["cp"]
    shapes = MicrobatchShapes(
        tokens=(size, tokens),
        hidden=(size, tokens // layout.degrees["tp"], layout.model.dim),
        dtype=getattr(torch, model.config.training.mixed_precision_param),
    )
    return Pipeline(
        model.stages,
        layout.pipeline,
        mesh["pp"],
        model.config.parallelism.pipeline_parallel_schedule,
        shapes,
        device,
    )


def gather_reports(model: ParallelModel) -> list[CompileReport]:
    """Return the compile reports of all pipeline ranks, with the axes of groups. A collective."""
    mesh = model.mesh
    axes = axes_of(mesh, model.layout.expert_parallel)
    named = [
        replace(report, timeline=report.timeline and by_axis(report.timeline, axes))
        for report in model.compile_reports
    ]
    if mesh["pp"].size() == 1:
        return named
    own = [replace(report, pp_rank=mesh["pp"].get_local_rank()) for report in named]
    by_rank = all_gather_objects(own, mesh.get_group("pp"))
    return [report for theirs in by_rank for report in theirs]
