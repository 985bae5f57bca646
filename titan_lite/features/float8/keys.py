"""The keys of matmuls in float8. Imports no torch."""

from typing import ClassVar, Literal

from titan_lite.config.section import ModuleNames, Section


class Float8Keys(Section):
    """Matmuls of the blocks' linear layers in float8, for GPUs from H100 on."""

    table: ClassVar[str] = "float8"

    enable: bool = False
    """Compute forward and both gradients of these layers in float8; weights stay in float32.
    Experts compute in mixed_precision_param, routers in float32."""

    recipe: Literal["tensorwise", "rowwise", "rowwise_with_gw_hp"] = "tensorwise"
    """Numbers that share a scale. tensorwise: a tensor's, the fastest; rowwise: a row's, more
    exact; rowwise_with_gw_hp: a row's, and gradients of weights in mixed_precision_param, the most
    exact."""

    all_gather: bool = False
    """FSDP gathers these weights in float8, half the bytes; only tensorwise."""

    filter_fqns: ModuleNames = ()
    """Layers that stay in mixed_precision_param, by parts of their names: "attention.wk",
    "layers.0"; embedding and output always do."""


KEYS = (Float8Keys,)
TENSORS: dict[str, str] = {}
OF_TORCHTITAN = {
    "float8.enable_float8_linear": "use float8.enable",
    "model.converters": "use float8.enable for float8",
    "quantize": (
        "only linear layers in float8: use [float8] with enable, recipe, all_gather and filter_fqns"
    ),
    "training.fp8_linear": "use float8.enable",
}
