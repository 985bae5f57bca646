"""What is in host memory: buckets, the same numbers, the order of streams, and the bytes that stay on the device."""

import contextlib
import gc
import math
from unittest import mock

import pytest
import torch
from test_adamw import CONFIG, build_model, set_gradients
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from titan_lite.config import Optimizer, Training
from titan_lite.optimizer import offload
from titan_lite.optimizer.build import build_optimizer, optimizer_state, set_learning_rate
from titan_lite.optimizer.clipping import clip_grad_norm_
from titan_lite.optimizer.offload import buckets_of, state_bytes

# Of the 676 parameters of the small model; pieces are whole vectors of a CPU, whose kernel rounds the rest in another way.
SMALL = mock.patch.object(offload, "BUCKET", 96)


def build(dtype=torch.float32, state="float32", where="optimizer"):
    model = build_model().to(dtype)
    config = Optimizer(**{**vars(CONFIG), "state_dtype": state})
    return model, build_optimizer(config, dict(model.named_parameters()), seed=3, offload=where)


def give_gradients(model, optimizer, step):
    """Two microbatches, and their clipping."""
    for microbatch in (step, step + 10):
        before = [parameter.grad for parameter in model.parameters()]
        set_gradients(model, microbatch)
        for parameter, sum_before in zip(model.parameters(), before, strict=True):
            rows, parameter.grad = parameter.grad, sum_before
            if optimizer.host and optimizer.host.everything:
                optimizer.host.put(parameter, rows)
            else:
                parameter.grad = rows if sum_before is None else sum_before + rows
    return clip_grad_norm_(model.parameters(), 0.1, optimizer.host)


def train(model, optimizer, steps):
    norms = []
    for step in steps:
        norms.append(give_gradients(model, optimizer, step))
        set_learning_rate(optimizer, CONFIG.lr * step / 4)
        optimizer.step(torch.tensor(float(step == 3)))  # the third is skipped
        optimizer.zero_grad()
    return norms


@pytest.mark.parametrize("most", [20, 64, 1000])
def test_buckets_have_every_row_once_in_order_and_are_full(most):
    shapes = [torch.Size(shape) for shape in [(9, 7), (0, 5), (3,), (20,), (1, 20), (30, 4)]]
    buckets = buckets_of(shapes, most)
    rows = [
        (piece.number, row)
        for bucket in buckets
        for piece in bucket
        for row in range(piece.start, piece.stop)
    ]
    assert rows == [(number, row) for number, shape in enumerate(shapes) for row in range(shape[0])]
    sizes = [
        sum((p.stop - p.start) * math.prod(shapes[p.number][1:]) for p in bucket)
        for bucket in buckets
    ]
    assert max(sizes) <= most
    for size, following in zip(sizes, buckets[1:], strict=False):
        assert size + math.prod(shapes[following[0].number][1:]) > most  # its next row did not fit


@SMALL
@pytest.mark.parametrize("where", ["optimizer", "all"])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_offloaded_update_is_the_one_on_the_device_to_the_bit(dtype, state, where):
    found, expected = build(dtype, state, where), build(dtype, state, "none")
    norms = [train(model, optimizer, range(1, 6)) for model, optimizer in (found, expected)]
    assert norms[0] == norms[1]
    assert min(norms[0]) > 0.1  # so that all are clipped
    assert all(
        torch.equal(*pair)
        for pair in zip(found[0].parameters(), expected[0].parameters(), strict=True)
    )
    states = [
        optimizer_state(optimizer, dict(model.named_parameters()))
        for model, optimizer in (found, expected)
    ]
    assert states[0].keys() == states[1].keys()
    for name, tensor in states[0].items():
        assert tensor.dtype == states[1][name].dtype
        assert torch.equal(tensor, states[1][name]), name


def tensors_alive():
    gc.collect()
    found = [
        each for each in gc.get_objects() if type(each) in (torch.Tensor, torch.nn.Parameter)
    ]  # no fake ones of other tests
    return {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in found}


@pytest.mark.parametrize("where", ["optimizer", "all"])
@pytest.mark.parametrize("bucket", [100, 2**24])
@pytest.mark.parametrize("state", ["float32", "bfloat16"])
def test_what_stays_on_the_device_is_what_the_planner_counts(state, bucket, where):
    with mock.patch.object(offload, "BUCKET", bucket):
        model, optimizer = build(state=state, where=where)
        before = tensors_alive()
        give_gradients(model, optimizer, 1)
        optimizer.step()
        if where == "optimizer":
            optimizer.zero_grad()
        made = {place: nbytes for place, nbytes in tensors_alive().items() if place not in before}
        named = optimizer_state(optimizer, dict(model.named_parameters()))
        host = {
            tensor.data_ptr(): tensor.nbytes for name, tensor in named.items() if "exp_avg" in name
        }
        weights = 0
        if where == "all":
            host |= {
                tensor.data_ptr(): tensor.nbytes
                for each in model.parameters()
                for tensor in (each.detach(), each.grad)
            }
            weights = sum(parameter.nbytes for parameter in model.parameters())
        counts = sum(name.endswith(".step") for name in named)
        sections = Training(offload=where), Optimizer(state_dtype=state)
        for_rounding = sum(
            rows.nbytes for rows, _ in optimizer.places.values()
        )  # 4 bytes a row, which the planner leaves out
        on_device, in_host = state_bytes(
            *sections, sum(parameter.numel() for parameter in model.parameters())
        )
    assert sum(host.values()) == in_host
    numbers = 4 * counts + (
        8 * counts + 4 if where == "all" else 0
    )  # step counts; norms of gradients, and what clips them
    assert sum(made.values()) + weights - in_host == sum(on_device) + numbers + for_rounding
    assert bool(for_rounding) is (state == "bfloat16")


# Streams


class Stream:
    """A stream with a vector clock: of each stream, how many of its operators have surely ended."""

    def __init__(self, name):
        self.name, self.clock = name, {}

    def wait_event(self, clock):
        self.clock = {
            name: max(self.clock.get(name, 0), clock.get(name, 0)) for name in {*self.clock, *clock}
        }

    def wait_stream(self, other):
        self.wait_event(other.clock)

    def record_event(self):
        return dict(self.clock)


class Races(TorchDispatchMode):
    """Pairs of operators on two streams that touch the same bytes, one of which writes, and neither of which waits for the other.

    Only copies tell what they read; of other operators every argument counts as written.
    """

    def __init__(self):
        super().__init__()
        self.current = self.main = Stream("main")
        self.done, self.found, self.between = [], [], set()

    @contextlib.contextmanager
    def stream(self, stream):
        before, self.current = self.current, stream
        yield
        self.current = before

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func.is_view:
            return result
        name = self.current.name
        self.current.clock[name] = self.current.clock.get(name, 0) + 1
        for place, tensor in enumerate(tree_leaves((args, kwargs))):
            if isinstance(tensor, torch.Tensor) and tensor.numel():
                start = tensor.data_ptr()
                writes = func is not torch.ops.aten.copy_.default or place == 0
                mine = (name, self.current.clock[name], start, start + tensor.nbytes, writes)
                for stream, count, begin, end, wrote in self.done:
                    if stream != name and begin < mine[3] and start < end and (writes or wrote):
                        self.between.add((stream, name))
                        if self.current.clock.get(stream, 0) < count:
                            self.found.append((stream, name, str(func)))
                self.done.append(mine)
        return result


@pytest.mark.parametrize("missing", ["", "wait_event", "wait_stream"])
@pytest.mark.parametrize("bucket", [100, 2**24])
@pytest.mark.parametrize(
    ("where", "state"), [("optimizer", "float32"), ("optimizer", "bfloat16"), ("all", "float32")]
)
def test_copies_on_streams_and_updates_wait_for_each_other(
    where, state, bucket, missing, monkeypatch
):
    """As on a GPU, whose streams are replaced by clocks. Without the waits, the races are found."""
    with mock.patch.object(offload, "BUCKET", bucket):
        model, optimizer = build(state=state, where=where)
        give_gradients(model, optimizer, 0)
        optimizer_state(optimizer, dict(model.named_parameters()))
        races = Races()
        optimizer.host.streams = (Stream("to the device"), Stream("back"))
        monkeypatch.setattr("torch.cuda.current_stream", lambda: races.main)
        monkeypatch.setattr("torch.cuda.stream", races.stream)
        if missing:
            monkeypatch.setattr(Stream, missing, lambda self, other: None)
        with races:
            for step in (1, 2, 3):
                weights = [
                    parameter.detach().clone() for parameter in model.parameters()
                ]  # as a gather reads them
                give_gradients(model, optimizer, step)
                optimizer.step()
    assert {("to the device", "main"), ("main", "back"), ("back", "to the device")} <= races.between
    assert where == "optimizer" or {("main", "to the device"), ("back", "main")} <= races.between
    del weights
    assert bool(races.found) is bool(missing)
