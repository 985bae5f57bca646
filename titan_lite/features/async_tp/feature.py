"""Asynchronous tensor parallelism, or chunks of tokens, in a compiled run."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from titan_lite.config import Config
from titan_lite.feature import Feature
from titan_lite.features.async_tp.keys import AsyncTensorParallelKeys, TokenChunksKeys

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from titan_lite.compile.graph_passes import Pass
    from titan_lite.models.transformer import Transformer


class AsyncTensorParallel(Feature):
    def is_on(self, config: Config) -> bool:
        fuses = AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel
        return fuses or TokenChunksKeys.of(config).tensor_parallel_chunks > 1

    def passes(self, config: Config, passes: list["Pass"]) -> list["Pass"]:
        from titan_lite.compile.passes.defer_weight_grads import defer_weight_grads
        from titan_lite.compile.passes.order_activations import order_activation_collectives

        if not AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel:
            from titan_lite.features.async_tp.token_chunks import cut_token_chunks

            position = passes.index(order_activation_collectives)
            return [*passes[:position], cut_token_chunks, *passes[position:]]
        from titan_lite.features.async_tp.fused_matmuls import (
            keep_with_matmuls,
            mark_fused_collectives,
        )

        of_activations = (defer_weight_grads, order_activation_collectives)
        of_parameters = [each for each in passes if each not in of_activations]
        return [mark_fused_collectives, *of_parameters, keep_with_matmuls]

    def inductor_settings(
        self, config: Config, model: "Transformer", mesh: "DeviceMesh"
    ) -> Mapping[str, object]:
        # Blocks alone have matmuls that collectives overlap with.
        fuses = AsyncTensorParallelKeys.of(config).enable_async_tensor_parallel
        if not fuses or not model.layers:
            return {}
        from titan_lite.features.async_tp.fused_matmuls import inductor_settings_of

        return inductor_settings_of(mesh.get_group("tp").group_name)

    def for_verify(self, config: Config) -> tuple[Config, str]:
        """Without Inductor, which alone fuses; and with chunks that divide the tokens."""
        parallelism = config.parallelism
        ranks = parallelism.context_parallel_degree * parallelism.tensor_parallel_degree
        chunks = TokenChunksKeys.of(config)
        if config.training.seq_len // ranks % chunks.tensor_parallel_chunks:
            chunks = chunks.replace(tensor_parallel_chunks=2)
        keys = AsyncTensorParallelKeys.of(config).replace(enable_async_tensor_parallel=False)
        return config.replace(parallelism=keys, compile=chunks), ""

    def turned_off_by(self, change: Mapping[str, str]) -> Mapping[str, str]:
        if change.get("parallelism.tensor_parallel_degree") == "1":
            return {"parallelism.enable_async_tensor_parallel": "false"}
        return {}


FEATURE = AsyncTensorParallel()
