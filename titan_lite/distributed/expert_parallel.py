"""Expert parallelism: a rank has some experts whole, and computes them for the tokens of all ranks.

    apply_expert_parallel(model, mesh_of_experts["ep"])     # before SimpleFSDP, which shards a part

With n tokens on a rank before and N = ep n, and E experts, of which a rank has E / ep:

    x (n, C), weights and choices (n, K), of the rank that routed them
      -> all-gather -> (N, C), (N, K)
      -> own experts of these tokens (models/experts.py) -> (N, C), a part of each sum over K
      -> reduce-scatter -> (n, C)

A token travels once however many of its experts another rank has: (ep - 1) n C numbers a way, as in
an exchange of rows with ep = K. Shapes are static, nothing waits for the host, and a rank without a
token for its experts takes part as others do. Modules compute on plain tensors: a graph has plain
collectives, which passes move.

Experts are on a mesh of their own (mesh.expert_mesh): ep is the innermost part of the ranks of
dp_shard x cp x tp, and the others share the shards of an expert.
"""

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.fx.traceback import annotate

from titan_lite import collectives
from titan_lite.collectives import Axis
from titan_lite.config import ConfigError
from titan_lite.config.errors import shown
from titan_lite.distributed.mesh import axis_of
from titan_lite.distributed.specialize import specialize
from titan_lite.distributed.tensor_parallel import exchange_tokens, split_over
from titan_lite.models.experts import Experts
from titan_lite.models.fqns import is_of_experts
from titan_lite.models.transformer import Transformer


def apply_expert_parallel(model: Transformer, mesh: DeviceMesh) -> None:
    """Split the experts of `model` over the one-axis `mesh` in place; FQNs do not change.

    The mesh's size divides the number of experts. Parameters become DTensors on `mesh`; those on
    the meta device stay there. Raises ConfigError for experts of another class than Experts.
    """
    check_experts(model)
    axis = axis_of(mesh)
    for module in model.modules():
        if not isinstance(module, Experts):
            continue
        count = module.n_experts // axis.degree
        module.own = range(axis.rank * count, (axis.rank + 1) * count)
        for name, parameter in module._parameters.items():
            assert parameter is not None
            module._parameters[name] = split_over(mesh, parameter, 0)
        module.__dict__["_ep"] = axis
        specialize(module, expert_parallel)


def check_experts(model: Transformer) -> None:
    """Raise ConfigError for matrices of experts that are not those of a module Experts."""
    for fqn, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None or not is_of_experts(parameter.shape):
                continue
            if type(module) is not Experts:
                raise ConfigError(
                    f"model.name = {shown(model.config.family)}: {fqn}.{name} is of a"
                    f" {type(module).__qualname__}, and expert parallelism splits the module"
                    " titan_lite.models.experts.Experts alone; use it, or"
                    " parallelism.expert_parallel_degree = 1"
                )


def expert_parallel(cls: type[Experts]) -> dict[str, object]:
    """Return the members of a module that computes its experts for the tokens of all ranks."""

    def forward(self: nn.Module, x: Tensor, weights: Tensor, choices: Tensor) -> Tensor:
        axis: Axis = self._ep  # type: ignore[assignment]
        with annotate({"axis": "ep"}):  # names the nodes for reports, those of backward too
            x = exchange_tokens(x, axis, _all_gather, _reduce_scatter)
            weights = exchange_tokens(weights, axis, _all_gather, _reduce_scatter)
            choices = _all_gather(choices, axis)
        parts = cls.forward(self, x, weights, choices)  # type: ignore[arg-type]
        with annotate({"axis": "ep"}):
            return exchange_tokens(parts, axis, _reduce_scatter, _all_gather)

    return {"forward": forward}


def _all_gather(x: Tensor, axis: Axis) -> Tensor:
    return collectives.all_gather(x.contiguous(), axis.degree, axis.group)


def _reduce_scatter(x: Tensor, axis: Axis) -> Tensor:
    return collectives.reduce_scatter(x.contiguous(), axis.degree, axis.group)
