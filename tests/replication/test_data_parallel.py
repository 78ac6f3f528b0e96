"""`DataParallel` and `data_parallel`: n replicas do what the module does, and say so when not."""

from __future__ import annotations

import copy
import gc
import pickle
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import replication
from replication import DataParallel, data_parallel, patch_replication_callback
from tests.layers import (
    AsTorchDoes,
    Centering,
    CustomDataParallel,
    Numbered,
    freed,
)

no_accelerator = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without an accelerator"
)


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), Centering(), nn.Linear(8, 2))


def grads(module: nn.Module, y: Tensor, x: Tensor, dy: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(y, [x, *module.parameters()], dy))


# -- the same numbers --------------------------------------------------------------------------


@pytest.mark.parametrize("n", [1, 2, 3, 5])
@pytest.mark.parametrize("samples", [1, 4, 7])
def test_replicas_compute_what_the_module_does(n, samples):
    module = net()
    x, dy = torch.randn(samples, 3, requires_grad=True), torch.randn(samples, 2)
    expected = module(x)
    actual = DataParallel(module, ["cpu"] * n)(x)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(grads(module, actual, x, dy), grads(module, expected, x, dy), strict=True):
        torch.testing.assert_close(a, e)


def test_two_steps_are_bit_equal():
    model = DataParallel(nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2)), ["cpu"] * 4)
    x, dy = torch.randn(21, 3, requires_grad=True), torch.randn(21, 2)
    first, second = (grads(model, model(x), x, dy) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_training_goes_as_with_the_module():
    module, x, target = net(), torch.randn(10, 3), torch.randn(10, 2)
    model = DataParallel(copy.deepcopy(module), ["cpu"] * 3)
    for trained in (module, model):
        optimizer = torch.optim.SGD(trained.parameters(), lr=0.1)
        for _ in range(5):
            optimizer.zero_grad()
            nn.functional.mse_loss(trained(x), target).backward()
            optimizer.step()
    for a, e in zip(model.module.parameters(), module.parameters(), strict=True):
        torch.testing.assert_close(a, e)


def test_batch_dimension_may_be_another():
    class Transposed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x * len(x)

    x = torch.randn(2, 6)
    assert torch.equal(DataParallel(Transposed(), ["cpu"] * 3, dim=1)(x), 2 * x)


def test_keyword_arguments_are_split():
    class Adds(nn.Module):
        def forward(self, x: Tensor, *, y: Tensor, scale: int) -> dict[str, Tensor]:
            return {"sum": x + scale * y}

    x, y = torch.randn(5, 2), torch.randn(5, 2)
    assert torch.equal(DataParallel(Adds(), ["cpu"] * 2)(x, y=y, scale=2)["sum"], x + 2 * y)


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


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_layers_communicate_without_grad(mode):
    x = torch.randn(6, 2)
    with mode():
        y = DataParallel(Centering(), ["cpu"] * 3)(x)
    torch.testing.assert_close(y, x - x.mean(0))
    assert not y.requires_grad


# -- arguments ---------------------------------------------------------------------------------


def test_it_is_a_data_parallel_of_torch():
    assert issubclass(DataParallel, nn.DataParallel)


@pytest.mark.parametrize("name", ["DataParallelWithCallback", "ReplicationCallbackDataParallel"])
def test_older_names_name_the_same_class(name):
    assert getattr(replication, name) is DataParallel


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
@no_accelerator
@pytest.mark.parametrize("device_ids", [None, [0, 1], (0,)], ids=str)
def test_without_an_accelerator_the_module_is_called_directly(device_ids):
    module = Numbered()
    module.forward = lambda x: (threading.get_ident(), module.copy_id)
    model = DataParallel(module, device_ids)
    assert model.device_ids == []
    assert model(torch.zeros(4)) == (threading.get_ident(), None)


def test_single_device_calls_the_module_itself():
    module = Numbered()
    module.forward = lambda x: (threading.get_ident(), module.copy_id)
    assert DataParallel(module, ["cpu"])(torch.zeros(4)) == (threading.get_ident(), None)


@pytest.mark.parametrize("device_ids", [[], (), {}, set(), range(0)], ids=repr)
def test_empty_list_of_devices_is_refused(device_ids):
    with pytest.raises(ValueError, match="device_ids must name at least one device"):
        DataParallel(nn.ReLU(), device_ids)


@pytest.mark.parametrize("device_ids", ["cpu", torch.device("cpu"), ["cpu", None], ["cpu", 1.5]])
def test_what_names_no_devices_is_refused(device_ids):
    with pytest.raises(TypeError):
        DataParallel(nn.ReLU(), device_ids)


class Number(int):
    """As NumPy has its own."""


@pytest.mark.filterwarnings("ignore::replication.UnsynchronizedWarning")
@no_accelerator
@pytest.mark.parametrize("number", [int, Number])
def test_indices_may_be_whole_numbers_of_any_kind(number):
    assert DataParallel(nn.ReLU(), [number(0), number(1)]).device_ids == []
    with pytest.raises(ValueError, match="must be indices of devices"):
        DataParallel(nn.ReLU(), [number(-1), "cpu"])


def test_the_function_takes_devices_one_by_one():
    y = data_parallel(nn.ReLU(), torch.ones(4, 2), (device for device in ["cpu"] * 2))
    assert y.tolist() == [[1, 1]] * 4


def test_the_function_moves_no_module():
    net = nn.Linear(2, 2)
    with pytest.raises(RuntimeError, match=r"cpu \(`weight`\)"):
        data_parallel(net, torch.ones(2, 2), ["meta"])
    assert net.weight.device == torch.device("cpu")


def test_negative_indices_are_refused():
    with pytest.raises(ValueError, match=r"must be indices of devices \(got \[0, -1\]\)"):
        DataParallel(nn.ReLU(), [0, -1])


@pytest.mark.parametrize("arguments", [(["cuda:99"] * 2,), (["cpu"] * 2, "cuda:99")], ids=str)
def test_device_that_the_machine_lacks_is_refused(arguments):
    with pytest.raises(ValueError, match="this machine has no device 'cuda:99'"):
        DataParallel(nn.ReLU(), *arguments)


def test_what_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"expected a torch\.nn\.Module \(got function\)"):
        DataParallel(lambda x: x, ["cpu"] * 2)


def test_outputs_go_to_the_output_device():
    assert DataParallel(nn.ReLU(), ["cpu"] * 2, "meta")(torch.zeros(4)).device.type == "meta"


def test_module_elsewhere_is_refused():
    model = DataParallel(nn.Linear(2, 2, device="meta"), ["cpu"] * 2)
    with pytest.raises(RuntimeError, match=r"on device cpu \(device_ids\[0\]\) .* device: meta"):
        model(torch.zeros(4, 2))


def test_devices_without_an_index_are_kept_as_they_are():
    model = DataParallel(nn.Linear(2, 2, device="meta"), ["meta", "meta"])
    assert model.device_ids == [torch.device("meta")] * 2


def test_the_module_stays_on_the_first_device_wherever_outputs_go():
    model = DataParallel(nn.Linear(1, 1), ["cpu", "meta"], output_device="meta")
    assert model.src_device_obj == torch.device("cpu")
    assert torch.device(model.output_device) == torch.device("meta")


def test_repr_and_state_dict_match_torchs_class():
    model = DataParallel(nn.Linear(2, 2), ["cpu"] * 2)
    assert list(model.state_dict()) == ["module.weight", "module.bias"]
    assert repr(model).startswith("DataParallel(\n  (module): Linear(")


# -- subclasses --------------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [CustomDataParallel, AsTorchDoes])
def test_customized_data_parallel_of_the_user_can_be_patched(wrap):
    module = net()
    model = wrap(module, 3)
    patch_replication_callback(model)
    x, dy = torch.randn(8, 3, requires_grad=True), torch.randn(8, 2)
    expected, actual = module(x), model(x)
    torch.testing.assert_close(actual, expected)
    for a, e in zip(grads(module, actual, x, dy), grads(module, expected, x, dy), strict=True):
        torch.testing.assert_close(a, e)


def test_each_step_can_be_overridden():
    class Tells(DataParallel):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.steps: list[str] = []

        def scatter(self, *args: Any) -> Any:
            self.steps.append("scatter")
            return super().scatter(*args)

        def replicate(self, *args: Any) -> Any:
            self.steps.append("replicate")
            return super().replicate(*args)

        def parallel_apply(self, *args: Any) -> Any:
            self.steps.append("parallel_apply")
            return super().parallel_apply(*args)

        def gather(self, *args: Any) -> Any:
            self.steps.append("gather")
            return super().gather(*args)

    model = Tells(Centering(), ["cpu"] * 2)
    model(torch.randn(4, 2))
    assert model.steps == ["scatter", "replicate", "parallel_apply", "gather"]


class ScatteredByTorch(DataParallel):
    def scatter(self, *args: Any) -> Any:
        return nn.DataParallel.scatter(self, *args)


def test_torchs_scatter_may_override_ours_where_there_are_no_arguments():
    class Constant(nn.Module):
        def forward(self) -> Tensor:
            return torch.ones(1)

    assert torch.equal(ScatteredByTorch(Constant(), ["cpu"] * 2)(), torch.ones(1))


# -- one object, many forwards -----------------------------------------------------------------


@pytest.mark.parametrize(
    "copied",
    [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))],
    ids=["deepcopy", "pickle"],
)
def test_copy_computes_the_same(copied):
    model, x = DataParallel(net(), ["cpu"] * 3), torch.randn(7, 3)
    expected = model(x)
    assert torch.equal(copied(model)(x), expected)


def test_data_parallel_inside_a_replica_makes_separate_copies():
    inner = DataParallel(Centering(), ["cpu"] * 2)
    x = torch.randn(8, 2)
    halves = [half - half.mean(0) for half in x.split(4)]
    torch.testing.assert_close(DataParallel(inner, ["cpu"] * 2)(x), torch.cat(halves))


def test_model_is_freed_after_its_last_reference():
    model = DataParallel(net(), ["cpu"] * 2)
    model(torch.randn(4, 3)).sum().backward()
    gone = weakref.ref(model.module[2])
    del model
    gc.collect()  # a layer for the older toolkits refers to itself, through its callback
    assert freed(gone)


def test_graph_is_freed_with_the_output():
    class Saves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, token: Any) -> Tensor:
            ctx.token = token
            return x.clone()

        @staticmethod
        def backward(ctx: Any, dy: Tensor) -> Any:
            return dy, None

    class Token:
        pass

    tokens: list[Any] = []

    class Saving(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            token = Token()
            tokens.append(weakref.ref(token))
            return Saves.apply(x, token)

    model = DataParallel(nn.Sequential(nn.Linear(2, 2), Saving(), Centering()), ["cpu"] * 2)
    gc.collect()
    gc.disable()
    try:
        y = model(torch.randn(4, 2))
        assert all(token() is not None for token in tokens)
        del y
        assert freed(*tokens)
    finally:
        gc.enable()


# -- data_parallel -----------------------------------------------------------------------------


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: (x,)], ids=["tensor", "tuple"])
def test_function_computes_what_the_module_does(wrap):
    module, x = net(), torch.randn(5, 3)
    torch.testing.assert_close(data_parallel(module, wrap(x), ["cpu"] * 2), module(x))


def test_function_passes_keyword_arguments():
    module, x = net(), torch.randn(5, 3)
    module.forward = lambda *, x: x + 1
    output = data_parallel(module, None, ["cpu"] * 2, module_kwargs={"x": x})
    assert torch.equal(output, x + 1)


def test_function_takes_output_device_and_dimension():
    x = torch.randn(2, 6)
    output = data_parallel(nn.ReLU(), x, ["cpu"] * 3, "cpu", dim=1)
    assert torch.equal(output, x.relu())


@no_accelerator
def test_function_without_an_accelerator_calls_the_module():
    module, x = net(), torch.randn(5, 3)
    assert torch.equal(data_parallel(module, x), module(x))
