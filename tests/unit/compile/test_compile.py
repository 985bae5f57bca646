"""The compile stage on one process: a budget of activations, functions, and what is said of that
which cannot be compiled.
"""

import pytest
import torch
from plain_weights import PlainWeights
from torch._inductor import config as inductor_config

from titan_lite.compile import backends
from titan_lite.compile import compile as stage
from titan_lite.compile.compile import compile_model
from titan_lite.compile.errors import CompileError, explain
from titan_lite.compile.graph_passes import GraphPasses
from titan_lite.compile.model_parts import TraceableModel
from titan_lite.compile.settings import PassSettings
from titan_lite.config import Compile, ConfigError
from titan_lite.config.families import ModelConfig
from titan_lite.models.transformer import Transformer

CONFIG = ModelConfig(
    dim=32, n_layers=3, n_heads=4, n_kv_heads=2, hidden_dim=96, vocab_size=64, max_seq_len=16
)


def aot_eager():
    return GraphPasses(PassSettings(Compile(enable=True, backend="aot_eager")))


def traceable(model):
    blocks = getattr(model, "layers", torch.nn.ModuleDict())
    return TraceableModel(model, PlainWeights(model), blocks)


def trained(budget):
    """(bytes saved for backward besides parameters, loss, gradients)"""
    torch._dynamo.reset()
    model = Transformer(CONFIG)
    model.init_weights(0)
    compiled = compile_model(traceable(model), aot_eager(), memory_budget=budget)
    own = {parameter.data_ptr() for parameter in model.parameters()} | {
        buffer.data_ptr() for buffer in model.buffers()
    }
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(0))
    logits = compiled(tokens)
    saved = {
        t.data_ptr(): t.untyped_storage().nbytes()
        for t in logits.grad_fn.saved_tensors
        if t.data_ptr() not in own
    }
    loss = logits.square().mean()
    loss.backward()
    return sum(saved.values()), loss.detach(), [parameter.grad for parameter in model.parameters()]


def settings():
    return (
        torch._dynamo.config.recompile_limit,
        torch._functorch.config.force_non_lazy_backward_lowering,
        torch._functorch.config.activation_memory_budget,
    )


def test_a_smaller_budget_saves_less_and_computes_the_same():
    """And settings of the compiler are afterwards what they were."""
    before = settings()
    whole, loss, gradients = trained(1.0)
    sizes = [whole]
    for budget in (0.5, 0.0):
        size, same_loss, same_gradients = trained(budget)
        torch.testing.assert_close(same_loss, loss)
        for one, other in zip(same_gradients, gradients, strict=True):
            torch.testing.assert_close(one, other)
        sizes.append(size)
    assert sizes[0] > sizes[1] > sizes[2]
    assert sizes[1] < 0.75 * sizes[0]
    assert settings() == before


def test_two_models_of_one_code_have_static_shapes_each():
    """As the first and the last stage of a pipeline on one rank."""
    torch._dynamo.reset()
    sizes = set()

    def keep_sizes(graph, name):
        sizes.update(
            type(size)
            for node in graph.graph.find_nodes(op="placeholder")
            for size in node.meta["val"].shape
        )

    for length in (16, 8):
        model = Transformer(CONFIG)
        model.init_weights(0)
        schedule = aot_eager()
        schedule.run = keep_sizes
        compiled = compile_model(traceable(model), schedule)
        compiled(torch.zeros(2, length, dtype=torch.long)).sum().backward()
    assert sizes == {int}


# Compilers of this machine


@pytest.mark.parametrize(
    ("of_cpu", "of_torch", "before", "after"),
    [
        pytest.param(["avx2", "avx512", "avx512_vnni"], "AVX512", None, True, id="AVX-512"),
        pytest.param(["avx2"], "AVX2", None, True, id="AVX2"),
        pytest.param(["avx2", "avx512"], "AVX2", None, None, id="torch uses fewer"),
        pytest.param([], "NO AVX", None, None, id="no x86"),
        pytest.param(["avx2"], "AVX2", False, False, id="the user decides"),
    ],
)
def test_vector_instructions_of_torchs_own_kernels_need_no_trial(
    of_cpu, of_torch, before, after, monkeypatch
):
    monkeypatch.setattr(stage, "x86_isa_checker", lambda: of_cpu)
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: of_torch)
    with inductor_config.patch({"cpp.vec_isa_ok": before}):
        stage.trust_vector_instructions()
        assert inductor_config.cpp.vec_isa_ok is after


# What cannot be compiled


def failing(name, graph, wanted):
    if wanted == name:
        raise RuntimeError("parallelism.enable_such_a_thing = true: there is none\nand more of it")


@pytest.mark.parametrize("wanted", ["forward", "backward"])
def test_a_pass_that_fails_on_the_model_is_told_with_the_keys_to_change(wanted, monkeypatch):
    monkeypatch.setattr(
        GraphPasses, "run", lambda schedule, graph, name: failing(name, graph, wanted)
    )
    with pytest.raises(CompileError) as failure:
        trained(1.0)
    assert (
        str(failure.value)
        == 'compile.backend = "aot_eager" cannot compile the model (parallelism.enable_such_a_thing'
        " = true: there is none); use compile.enable = false"
    )
    assert isinstance(failure.value.__cause__, RuntimeError)


def test_a_pass_that_knows_the_key_speaks_for_itself(monkeypatch):
    def refuse(schedule, graph, name):
        raise ConfigError("compile.bucketing = x: z; use y")

    monkeypatch.setattr(GraphPasses, "run", refuse)
    with pytest.raises(CompileError, match=r"^compile.bucketing = x: z; use y$"):
        trained(1.0)


def test_what_inductor_cannot_compile_aot_eager_may(monkeypatch):
    def broken(graph, inputs):
        raise RuntimeError("no kernel for this")

    monkeypatch.setattr(backends, "compile_fx_inner", broken)
    model = Transformer(CONFIG)
    config = Compile(enable=True, bucketing="none")
    compiled = compile_model(traceable(model), GraphPasses(PassSettings(config)))
    with pytest.raises(CompileError) as failure:
        compiled(torch.zeros(1, 16, dtype=torch.long))
    assert (
        str(failure.value)
        == 'compile.backend = "inductor" cannot compile the model (no kernel for this); use'
        ' compile.backend = "aot_eager" or compile.enable = false'
    )


@pytest.mark.parametrize(
    ("error", "reason"),
    [(KeyError("wq"), "KeyError 'wq'"), (AssertionError(), "AssertionError")],
)
def test_an_error_whose_text_is_no_sentence_has_its_class(error, reason):
    assert f"cannot compile the model ({reason}); use" in explain(
        error, Compile(enable=True), in_backend=False
    )


def test_a_model_that_depends_on_values_is_told_and_no_other_backend_named():
    class Branch(torch.nn.Module):
        def forward(self, x):
            return x + 1 if x.sum() > 0 else x

    model = Branch()
    config = Compile(enable=True, bucketing="none")
    compiled = compile_model(traceable(model), GraphPasses(PassSettings(config)))
    with pytest.raises(CompileError) as failure:
        compiled(torch.ones(3))
    sentence = str(failure.value)
    assert sentence.startswith('compile.backend = "inductor" cannot compile the model (')
    assert sentence.endswith("); use compile.enable = false")


def test_what_triton_needs_of_a_machine_is_asked_before_a_start(monkeypatch, tmp_path):
    inductor = Compile(enable=True, backend="inductor")
    monkeypatch.setattr(stage, "has_triton", lambda: True)
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.setattr(stage.shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match=r"needs a C compiler for triton \(gcc, clang, or CC\)"):
        stage.check_backend(inductor, "cuda")
    monkeypatch.setattr(stage.shutil, "which", lambda name: f"/usr/bin/{name}")
    monkeypatch.setattr(stage.sysconfig, "get_path", lambda name: str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"triton needs \S+/Python.h \(python3\.\d+-dev on Debian\)"
    ):
        stage.check_backend(inductor, "cuda")
    (tmp_path / "Python.h").touch()
    stage.check_backend(inductor, "cuda")
