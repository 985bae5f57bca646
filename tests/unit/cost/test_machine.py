"""Prices of nodes and collectives on a machine by hand formulas; machines as files."""

import dataclasses

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import titan_lite.models.attention  # noqa: F401 - its operators
from titan_lite.config import ConfigError
from titan_lite.cost.machine import Link
from titan_lite.cost.op_cost import flops_of, node_seconds
from titan_lite.cost.profiles import PROFILES, load_machine

H100 = load_machine("H100")


@pytest.mark.parametrize(
    ("kind", "nbytes", "ranks", "expected"),
    [
        (
            "all_gather",
            8e9,
            range(8),
            8e9 * 7 / 8 / 360e9,
        ),  # 450 GB/s of NVLink, 0.8 of which collectives reach
        ("reduce_scatter", 8e9, range(8), 8e9 * 7 / 8 / 360e9),
        ("all_reduce", 8e9, range(8), 2 * 8e9 * 7 / 8 / 360e9 / 1.08),  # in the switch
        ("all_gather", 8e9, range(16), 8e9 * 15 / 16 / 320e9),  # eight network cards of 50 GB/s
        ("all_gather", 8e9, (0, 8, 16, 24), 8e9 * 3 / 4 / 40e9),  # one card a node
        ("all_gather", 8e9, (0, 1, 8, 9), 8e9 * 3 / 4 / 80e9),
    ],
)
def test_a_large_collective_takes_what_its_slowest_link_does(kind, nbytes, ranks, expected):
    latency = H100.collective(kind, 0, ranks)
    assert H100.collective(kind, nbytes, ranks) - latency == pytest.approx(expected, rel=5e-3)
    assert 0 < latency < 1e-3


PLAIN = dataclasses.replace(H100, multiprocessors=0)  # a ring without NCCL's protocols


def test_a_hop_between_nodes_takes_longer_than_one_within():
    two, one = (PLAIN.collective("all_gather", 0, range(ranks)) for ranks in (16, 8))
    assert two - one == pytest.approx((7 * 1.9 + 4.0) * 1e-6)
    assert H100.collective("all_gather", 0, range(16)) - H100.collective(
        "all_gather", 0, range(8)
    ) == pytest.approx(
        0.32 * (two - one)  # LL
    )
    assert H100.collective("all_gather", 1e9, [5]) == 0.0


def graph_of(function, *shapes, dtype=torch.bfloat16):
    return make_fx(function)(
        *(torch.empty(shape, device="meta", dtype=dtype) for shape in shapes)
    ).graph


def costs(graph, **options):
    return {
        node.name: node_seconds(node, H100, **options)
        for node in graph.nodes
        if node_seconds(node, H100, **options)
    }


def test_a_large_matmul_is_priced_by_its_flops_and_a_thin_one_by_its_bytes():
    (large,) = costs(graph_of(torch.mm, (8192, 4096), (4096, 14336))).values()
    wave = 2 * 128 * 256 * 4096 / (0.84 * 989.4e12 / 132) + 1.5e-6
    assert large == pytest.approx(28 * wave + 4e-6)  # 64 x 56 tiles on 132 multiprocessors
    (thin,) = costs(graph_of(torch.mm, (1, 4096), (4096, 14336))).values()
    assert thin == pytest.approx(2 * (4096 + 4096 * 14336 + 14336) / (0.85 * 3350e9) + 3e-6)


@pytest.mark.parametrize(("fast", "longer"), [(True, 1.0), (False, 1.15)])
def test_a_float8_matmul_has_the_peak_of_float8(fast, longer):
    def multiply(a, b, one):
        eights = (a.to(torch.float8_e5m2), b.to(torch.float8_e4m3fn).t())
        return torch._scaled_mm(
            *eights, one.float(), one.float(), out_dtype=torch.bfloat16, use_fast_accum=fast
        )

    graph = graph_of(multiply, (8192, 4096), (14336, 4096), ())
    (matmul,) = (node for node in graph.nodes if node.target is torch.ops.aten._scaled_mm.default)
    wave = longer * 2 * 128 * 256 * 4096 / (0.84 * 1978.9e12 / 132) + 1.5e-6
    assert node_seconds(matmul, H100) == pytest.approx(28 * wave + 4e-6)
    assert flops_of(matmul) == (2 * 8192 * 4096 * 14336, 0)


def test_attention_counts_half_where_it_is_causal_and_five_matmuls_backward():
    def attend(causal):
        return lambda q, k, v: torch.ops.aten._scaled_dot_product_flash_attention(
            q, k, v, 0.0, causal
        )[0]

    shapes = [(1, 32, 8192, 128)] * 3
    whole, causal = (max(costs(graph_of(attend(flag), *shapes)).values()) for flag in (False, True))
    assert whole == pytest.approx(
        4 * 32 * 8192 * 8192 * 128 / (0.52 * 989.4e12 * 8192 / 8692) + 3e-6
    )
    assert causal == pytest.approx(whole / 2, rel=1e-2)


def test_a_fused_region_reads_and_writes_once():
    graph = graph_of(lambda x, y: ((x + y) * x).relu().sum(), (4096, 4096), (4096, 4096))
    size = 2 * 4096 * 4096
    fused, apart = costs(graph), costs(graph, fused=False)
    assert sum(apart.values()) == pytest.approx(
        (3 + 3 + 2 + 1) * size / (0.85 * 3350e9) + 4 * 3e-6, rel=1e-3
    )
    assert sum(fused.values()) < 0.7 * sum(apart.values())


def test_complex_numbers_are_not_fused():
    def rotate(x, angles):
        return (
            torch.view_as_real(torch.view_as_complex(x.float().unflatten(-1, (-1, 2))) * angles)
            .flatten(-2)
            .to(x.dtype)
        )

    graph = make_fx(rotate)(
        torch.empty(4096, 4096, device="meta", dtype=torch.bfloat16),
        torch.empty(2048, device="meta", dtype=torch.complex64),
    ).graph
    numbers = 4096 * 4096
    moved = (2 + 4) + (4 + 4) + (4 + 2)  # to float32, times the angles, to bfloat16
    assert sum(costs(graph).values()) == pytest.approx(
        moved * numbers / (0.85 * 3350e9) + 3 * 3e-6, rel=1e-3
    )


def test_views_and_inputs_are_free():
    assert costs(graph_of(lambda x: x.view(8, 2).t().detach(), (4, 4))) == {}


@pytest.mark.parametrize("name", [name for name in PROFILES if " " not in name])  # none on PCIe
def test_the_profiles(name):
    machine = load_machine(name)
    assert machine.name == name
    assert (
        machine.flops(torch.bfloat16) == machine.flops(torch.float16) > machine.flops(torch.float32)
    )
    assert machine.intra_node.bandwidth > machine.inter_node.bandwidth


def test_a_file_describes_a_machine_like_another(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "H100"\nranks_per_node = 4\ninter_node = { bandwidth = 25, latency = 5'
        " }\n[tflops]\nfloat8_e4m3fn = 1979\n"
    )
    machine = load_machine(str(path))
    assert machine == dataclasses.replace(
        H100,
        name="mine",
        like="H100",
        ranks_per_node=4,
        inter_node=Link(25, 5),
        tflops={**H100.tflops, "float8_e4m3fn": 1979},
    )


WHOLE = """
memory = 80
memory_bandwidth = 2000
tflops = { float32 = 20 }
intra_node = { bandwidth = 300, latency = 2 }
inter_node = { bandwidth = 25, latency = 5 }
"""


def test_a_file_describes_a_machine_of_its_own(tmp_path):
    path = tmp_path / "own.toml"
    path.write_text(WHOLE)
    assert load_machine(str(path)).flops(torch.bfloat16) == 20e12


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('like = "H101"', 'like = "H101" is not a profile; use GB200, .*'),
        (
            WHOLE.replace("float32 = 20", "float32 = 20, bf16 = 40"),
            r"tflops\.bf16\.\[key\]: Value error, expected a dtype of torch: bfloat16",
        ),
        (WHOLE + "memmory = 3", "memmory: Unexpected keyword argument"),
        (
            WHOLE.replace("memory = 80", "memory = -1"),
            "memory: Input should be greater than or equal to 0.000000001",
        ),
        (
            WHOLE.replace("memory = 80", 'memory = "80"'),
            "memory: Input should be a valid number",
        ),
        (WHOLE.replace("memory = 80", ""), "memory: Field required"),
        (
            WHOLE.replace("float32 = 20", "bfloat16 = 20"),
            "tflops: Value error, expected float32, the peak of dtypes",
        ),
        (
            WHOLE.replace(", latency = 2", ""),
            "intra_node.latency: Field required",
        ),
        ("memory = ", "not valid TOML"),
    ],
)
def test_a_wrong_file_says_what_is_wrong(text, message, tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=f"wrong.toml: {message}"):
        load_machine(str(path))


def test_all_mistakes_of_a_file_are_told_at_once(tmp_path):
    path = tmp_path / "wrong.toml"
    path.write_text(WHOLE.replace("80", "true") + "memmory = 3\npower = -1")
    with pytest.raises(ConfigError) as error:
        load_machine(str(path))
    names = [line.removeprefix(f"{path}: ").partition(":")[0] for line in error.value.args]
    assert names == ["memory", "power", "memmory"]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("h100", 'compile.machine = "h100" is not a profile; use GB200'),
        ("no.toml", 'compile.machine = "no.toml": no such file; use GB200'),
    ],
)
def test_an_unknown_machine(name, message):
    with pytest.raises(ConfigError, match=message):
        load_machine(name)


def test_zero_turns_off_what_is_off_by_default_and_other_links_have_no_switch(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'like = "H100"\nhost = 0\npower = 0\nintra_node = { bandwidth = 32, latency = 4.0 }\n'
    )
    machine = load_machine(str(path))
    assert (machine.host, machine.power, machine.nvls) == (0, 0, 0)
    assert H100.nvls > 0
