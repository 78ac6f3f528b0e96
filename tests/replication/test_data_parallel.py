"""`DataParallel` and `data_parallel`: n replicas do what the module does, and say so when not."""

from __future__ import annotations

import copy
import itertools
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import replication
from replication import DataParallel, data_parallel, patch_replication_callback
from syncbn import convert_model
from tests.kit.junk import nested
from tests.kit.layers import Centering, Echo, Numbered, echoed
from tests.kit.properties import examples
from tests.kit.steps import batch, network, step
from tests.kit.wrappers import AsTorchDoes, ours

CPU = torch.device("cpu")


def test_module_without_arguments_runs_once():
    class Asked(Numbered):
        def forward(self) -> str:
            return f"copy {self.copy_id}"

    assert DataParallel(Asked(), ["cpu"] * 3)() == ["copy 0"]


def test_without_grad_the_replicas_are_cut_off():
    class Shows(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return torch.full((len(x),), self.weight.requires_grad)

    model = DataParallel(Shows(1, 1), ["cpu"] * 2)
    assert model(torch.zeros(2, 1)).tolist() == [True, True]
    with torch.no_grad():
        assert model(torch.zeros(2, 1)).tolist() == [False, False]


# -- arguments ---------------------------------------------------------------------------------


def test_older_names_name_the_same_objects():
    assert replication.DataParallelWithCallback is DataParallel
    assert replication.ReplicationCallbackDataParallel is DataParallel
    older = replication.exec_data_parallel_replication_callback
    assert older is replication.execute_replication_callbacks


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
@pytest.mark.parametrize("device_ids", [None, [0, 1], (0,), range(2)], ids=str)
def test_without_an_accelerator_the_module_is_called_directly(device_ids):
    module = Numbered()
    module.forward = lambda x: (threading.get_ident(), module.copy_id)
    model = DataParallel(module, device_ids)
    assert model.device_ids == []
    assert model(torch.zeros(4)) == (threading.get_ident(), None)


@pytest.mark.parametrize(
    ("device_ids", "error", "text"),
    [
        *((none, ValueError, r"name a device, such as \['cpu'\] \* n") for none in ([], range(0))),
        *((value, TypeError, "must be a list with one item") for value in ("cpu", CPU, 2)),
        *((["cpu", v], TypeError, "is an int, a str or a") for v in (None, 1.0, True, ())),
        (["cuda:99"] * 2, ValueError, "this machine has no device 'cuda:99'"),
        *(([name], ValueError, "is not a device of torch; use .cpu. for") for name in ("gpu", "")),
    ],
)
def test_what_names_no_devices_is_refused(device_ids, error, text):
    with pytest.raises(error, match=text):
        DataParallel(nn.ReLU(), device_ids)


class Number(int):
    """As NumPy has its own."""


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
@pytest.mark.parametrize("number", [int, Number])
def test_indices_may_be_whole_numbers_of_any_kind(number):
    assert DataParallel(nn.ReLU(), [number(0), number(1)]).device_ids == []
    assert DataParallel(nn.ReLU(), [number(-1)] * 2).device_ids == [torch.device("cpu")] * 2


def test_the_function_moves_no_module():
    net = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"cpu \(`weight`\)"):
        data_parallel(net, torch.ones(2, 2), ["meta"])
    assert net.weight.device == torch.device("cpu")


def test_outputs_go_to_the_output_device_and_the_module_stays_on_the_first():
    model = DataParallel(nn.ReLU(), ["cpu", "cpu"], output_device="meta")
    assert model.device_ids == [CPU] * 2 and model.src_device_obj == CPU
    assert torch.device(model.output_device) == torch.device("meta")
    assert model(torch.zeros(4)).device.type == "meta"


def test_repr_and_state_dict_match_torchs_class():
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    assert repr(model).startswith("DataParallel(\n  (module): Linear(")


# -- subclasses --------------------------------------------------------------------------------


def test_each_step_can_be_overridden():
    steps = ["scatter", "replicate", "parallel_apply", "gather"]
    seen: list[str] = []

    def telling(name: str) -> Callable[..., Any]:
        def step(self: DataParallel, *args: Any) -> Any:
            seen.append(name)
            return getattr(DataParallel, name)(self, *args)

        return step

    tells = type("Tells", (DataParallel,), {name: telling(name) for name in steps})
    tells(Centering(), ["cpu"] * 2)(torch.randn(4, 2))
    assert seen == steps


def test_torchs_scatter_may_override_ours_where_there_are_no_arguments():
    class ScatteredByTorch(DataParallel):
        scatter = nn.DataParallel.scatter

    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(1)

    assert torch.equal(ScatteredByTorch(Constant(), ["cpu"] * 2)(), torch.ones(1))


# -- data_parallel -----------------------------------------------------------------------------


def test_function_passes_keyword_arguments():
    module, x = nn.ReLU(), torch.randn(5, 3)
    module.forward = lambda *, x: x + 1
    output = data_parallel(module, None, ["cpu"] * 2, module_kwargs={"x": x})
    assert torch.equal(output, x + 1)


@pytest.mark.parametrize("dim", [1, -1])
def test_function_takes_output_device_and_dimension(dim):
    x = torch.randn(2, 6)
    output = data_parallel(nn.ReLU(), x, ["cpu"] * 3, "cpu", dim=dim)
    assert torch.equal(output, x.relu())


# -- any order of set-up, any arguments --------------------------------------------------------


STEPS = ("convert", "wrap", "to", "patch")


@pytest.mark.parametrize("wrapper", [ours, AsTorchDoes], ids=["ours", "the user's"])
@pytest.mark.parametrize("order", [*itertools.permutations(STEPS)], ids=" ".join)
def test_every_order_of_setup_trains_like_one_device_or_names_the_missing_step(wrapper, order):
    """vacancy#40, #45."""
    net = network().float()
    twin = copy.deepcopy(net).double()
    model: Any = net
    actions = {
        "convert": convert_model,
        "wrap": lambda model: wrapper(model, 3),
        "to": lambda model: model.to(torch.float64),
        "patch": lambda model: patch_replication_callback(model) and model,
    }
    for name in order:
        if name == "patch" and order.index("patch") < order.index("wrap"):
            with pytest.raises(TypeError, match=r"expected a torch.nn.DataParallel .*Sequential"):
                actions[name](model)
            continue
        model = actions[name](model) or model
    if order.index("patch") < order.index("wrap"):
        patch_replication_callback(model)
    x, dy = batch(7)
    torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))


LEAVES = st.sampled_from(["tensor", 1, 2.5, "text", None, True])
ARGS = st.lists(nested(LEAVES), max_size=2)
KWARGS = st.dictionaries(st.sampled_from("abc"), nested(LEAVES), max_size=2)


def mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: mapped(function, item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(mapped(function, item) for item in value)
    return function(value)


@examples(0.6)
@given(args=ARGS, kwargs=KWARGS)
def test_the_module_sees_the_same_with_and_without_replicas(args, kwargs):
    """pytorch#7457, mmcv#792. Arguments and outputs, whatever they are nested in."""

    def filled(leaf: Any) -> Any:
        return torch.arange(8.0).view(4, 2) if leaf == "tensor" else leaf

    def emptied(leaf: Any) -> Any:
        return "tensor" if isinstance(leaf, Tensor) else leaf

    asked, returned = (tuple(args), kwargs), echoed(*args, **kwargs)
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
        assert mapped(emptied, output) == (returned if is_alone else mapped(joined, returned))
