"""What users of such toolkits asked for of devices, checkpoints and arguments."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present

from replication import (
    CallbackContext,
    DataParallel,
    execute_replication_callbacks,
    replicate,
)
from replication.devices import (
    accelerator,
    current_stream,
    default_devices,
    device_in_use,
    device_of,
    usable_devices,
    use_device,
)
from syncbn import SynchronizedBatchNorm1d, convert_model
from tests.processes import run_python
from tests.stepping import batch, network, step, wraps

# -- replicas on their devices -----------------------------------------------------------------


class Holds(nn.Module):
    """Holds parameters and buffers in every kind of container; its callback looks at them."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
        self.listed = nn.ParameterList([torch.ones(2), torch.zeros(3)])
        self.named = nn.ParameterDict({"a": torch.ones(2), "b": torch.zeros(1)})
        self.nested = nn.ModuleList([nn.ParameterList([torch.ones(1)]), nn.ParameterDict()])
        for index in range(2):  # a list of buffers, as libraries write it
            self.register_buffer(f"buffer_{index}", torch.full((2,), float(index)))
        self.none = SynchronizedBatchNorm1d(2, affine=False, track_running_stats=False)
        self.in_callback: Any = None

    def tensors(self) -> list[Tensor]:
        held = [self.weight, *self.listed, *self.named.values(), *self.nested[0]]
        return [*held, *(getattr(self, f"buffer_{index}") for index in range(2))]

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        devices = {tensor.device for tensor in self.tensors()}
        self.in_callback = (ctx.devices[copy_id], devices, self.weight.dtype)


def test_callbacks_and_forwards_find_all_tensors_on_the_replicas_device():
    """pytorch#36035, #40457, #38493."""
    net = Holds()
    replicas = replicate(net, ["cpu", "meta"])
    execute_replication_callbacks(replicas)
    for replica, device in zip(replicas, ("cpu", "meta"), strict=True):
        device = torch.device(device)
        assert list(replica.parameters()) == []
        assert replica.in_callback == (device, {device}, torch.float64)
        assert [(t.shape, t.dtype) for t in replica.tensors()] == [
            (t.shape, t.dtype) for t in net.tensors()
        ]
        assert [len(replica.listed), *replica.named.keys()] == [2, "a", "b"]
        assert len(replica.nested[1]) == 0
        assert replica.none.weight is None
        assert replica.none.running_mean is None
        assert not replica.weight.is_leaf
        assert replica.weight.requires_grad


def test_device_of_a_replica_may_come_from_a_plain_attribute():
    """As torch's own replicas leave it where it is."""
    module = nn.Module()
    assert device_of(module) is None
    module.table = torch.empty(2, device="meta")
    assert device_of(module) == torch.device("meta")


def test_device_in_use_is_set_by_the_innermost_block():
    cpu, meta = torch.device("cpu"), torch.device("meta")
    with use_device(cpu, None):
        with use_device(meta, None):
            assert device_in_use() == meta
        assert device_in_use() == cpu
    assert device_in_use() is None


def test_torch_that_names_no_accelerator_keeps_a_list_of_types(monkeypatch):
    monkeypatch.delattr(torch, "accelerator", raising=False)
    assert accelerator() is None
    monkeypatch.setattr(torch.xpu, "device_count", lambda: 2)
    assert accelerator() == "xpu"
    assert default_devices() == [torch.device("xpu", 0), torch.device("xpu", 1)]


def test_a_backend_needs_neither_streams_nor_a_current_device(monkeypatch):
    module = SimpleNamespace(device_count=lambda: 2)
    monkeypatch.setattr(torch, "get_device_module", lambda device: module)
    first, second = usable_devices(["hpu", "hpu:1"])
    assert (first, second) == (torch.device("hpu:0"), torch.device("hpu:1"))
    assert current_stream(second) is None
    with use_device(second, None):
        assert device_in_use() == second
    with pytest.raises(ValueError, match="this machine has no device 'hpu:2'"):
        usable_devices(["hpu:2"])


CPU_BUILD = """
import torch
for name in ("_broadcast_coalesced", "_broadcast", "_scatter", "_gather", "_cuda_getDeviceCount"):
    if hasattr(torch._C, name):
        delattr(torch._C, name)
def refuse(*args): raise AssertionError("CUDA was asked for")
torch.cuda._lazy_init = torch.cuda.init = refuse
import replication, syncbn
net = syncbn.convert_model(torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.BatchNorm1d(3)))
model = replication.DataParallel(net, ["cpu"] * 3)
y = model(torch.randn(8, 3))
y.backward(torch.randn_like(y))
print(net[1].num_batches_tracked.item())
"""


@pytest.mark.slow
def test_nothing_needs_what_builds_for_the_cpu_lack():
    """pytorch#109709, #143239."""
    done = run_python("-c", CPU_BUILD)
    assert (done.stdout.split(), done.stderr) == (["1"], "")


# -- checkpoints -------------------------------------------------------------------------------


@wraps
@pytest.mark.parametrize("prefix", ["", "module."], ids=["module", "DataParallel"])
def test_what_replicas_have_learnt_serves_on_one_device(wrap, prefix):
    """In torch's own layers, which know nothing of us; and back."""
    net = network()
    plain = copy.deepcopy(net)
    model = wrap(convert_model(net), 3)
    for samples in (7, 4):
        step(model, net, *batch(samples))
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.1 * parameter.grad
    file = io.BytesIO()
    torch.save((model if prefix else net).state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    assert all(key.startswith(prefix) for key in state)
    consume_prefix_in_state_dict_if_present(state, prefix)
    plain.load_state_dict(state, strict=True)
    x, dy = batch(5)
    assert torch.equal(plain.eval()(x), net.eval()(x))
    other = convert_model(network())
    other.load_state_dict(plain.state_dict(), strict=True)
    expected = step(plain.train(), plain, x, dy)
    torch.testing.assert_close(step(wrap(other, 2), other, x, dy), expected)


# -- arguments ---------------------------------------------------------------------------------

LEAVES = st.sampled_from(["tensor", 1, 2.5, "text", None, True])
KEYS = st.sampled_from("abc")
NESTED = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.dictionaries(KEYS, inner, max_size=3),
    ),
    max_leaves=8,
)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, item) for item in value)
    return function(value)


class Echo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return args, kwargs


@settings(max_examples=60)
@given(args=st.lists(NESTED, max_size=2), kwargs=st.dictionaries(KEYS, NESTED, max_size=2))
def test_the_module_sees_the_same_with_and_without_replicas(args, kwargs):
    """pytorch#7457, mmcv#792. Arguments and outputs, whatever they are nested in."""

    def filled(leaf: Any) -> Any:
        return torch.arange(8.0).view(4, 2) if leaf == "tensor" else leaf

    def emptied(leaf: Any) -> Any:
        return "tensor" if isinstance(leaf, Tensor) else leaf

    asked = (tuple(args), kwargs)
    for devices in (None, ["cpu"], ["cpu"] * 2, ["cpu"] * 3):
        net = Echo()
        call_args, call_kwargs = mapped(filled, asked)
        output = DataParallel(net, devices)(*call_args, **call_kwargs)
        replicas = len(net.seen)

        def joined(leaf: Any, replicas: int = replicas) -> Any:
            return leaf if leaf in (None, "tensor") else [leaf] * replicas

        for seen in net.seen:
            assert mapped(emptied, seen) == asked
        # Where nothing is joined, what is no tensor stays as it is.
        is_alone = devices is None or len(devices) == 1
        assert mapped(emptied, output) == (asked if is_alone else mapped(joined, asked))
