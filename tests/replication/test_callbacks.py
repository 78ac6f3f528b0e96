"""The replication callback: who is called, in which order, with what; and who is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from replication import (
    CallbackContext,
    DataParallel,
    UnsynchronizedWarning,
    execute_replication_callbacks,
    patch_replication_callback,
    replicate,
)
from syncbn import convert_model
from tests.kit.layers import Centering
from tests.kit.wrappers import CustomDataParallel


class Recorder(nn.Module):
    """Writes down the callbacks that it gets: its name, the copy's number, the context."""

    def __init__(self, out: list[Any], name: str, *children: nn.Module) -> None:
        super().__init__()
        self.out = out
        self.name = name
        for index, child in enumerate(children):
            self.add_module(f"c{index}", child)

    def __data_parallel_replicate__(self, ctx: CallbackContext, copy_id: int) -> None:
        self.out.append((self.name, copy_id, ctx))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for child in self.children():
            x = child(x)
        return x


def tree(out: list[Any]) -> nn.Module:
    return Recorder(
        out,
        "root",
        nn.Sequential(Recorder(out, "a"), nn.ReLU(), Recorder(out, "b", Recorder(out, "b.c"))),
        Recorder(out, "d"),
    )


ORDER = ["root", "a", "b", "b.c", "d"]


def copies(module: nn.Module, n: int) -> list[nn.Module]:
    return replicate(module, ["cpu"] * n)


# -- who is called -----------------------------------------------------------------------------


def test_copies_of_one_layer_share_a_context_and_layers_do_not():
    out: list[Any] = []
    execute_replication_callbacks(copies(tree(out), 3))
    contexts = {name: {id(ctx) for n, _, ctx in out if n == name} for name in ORDER}
    assert [len(ids) for ids in contexts.values()] == [1] * 5
    assert len(set.union(*contexts.values())) == 5


@pytest.mark.parametrize("kind", [nn.Sequential, nn.LSTM])
def test_paths_of_contexts_are_those_of_named_modules(kind):
    net = nn.Sequential(tree([]), tree([]), nn.LSTM(1, 1) if kind is nn.LSTM else nn.ReLU())
    net.append(net[1])
    net.register_module("absent", None)
    paths = []
    for module in net.modules():
        module.__data_parallel_replicate__ = lambda ctx, copy_id: paths.append(ctx.path)
    model = DataParallel(net, ["cpu"] * 2)
    model.replicate(net, model.device_ids)
    assert paths == [path for path, _ in net.named_modules()] * 2


# -- who is refused, before anyone is called ---------------------------------------------------


def test_no_copies_are_refused():
    with pytest.raises(ValueError, match=r"at least one copy of a module \(got none\)"):
        execute_replication_callbacks([])


def test_copy_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"^expected a torch.nn.Module \(got str\)$"):
        execute_replication_callbacks([nn.Identity(), "module"])


RELU = nn.ReLU()
RELUS = [nn.Sequential(*[nn.ReLU() for _ in range(n)]) for n in (1, 2)]
NAMED = [nn.ModuleDict({name: nn.ReLU() for name in names}) for names in ("ab", "ba")]


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ([RELUS[0], nn.Sequential(nn.GELU())], "`0` (ReLU), copy 1 has `0` (GELU)"),
        ([RELUS[1], RELUS[1], RELUS[0]], "`1` (ReLU), copy 2 has none"),
        (NAMED, "`a` (ReLU), copy 1 has `b` (ReLU)"),
        ([nn.Sequential(RELU, RELU), RELUS[1]], "none, copy 1 has `1` (ReLU)"),
    ],
    ids=["type", "children", "order", "ties"],
)
def test_copies_that_do_not_match_are_refused_before_any_callback_runs(modules, message):
    out: list[Any] = []
    whole = [nn.Sequential(Recorder(out, "first"), module) for module in modules]
    with pytest.raises(ValueError, match=f"where copy 0 has {re.escape(message)}"):
        execute_replication_callbacks(modules)
    with pytest.raises(ValueError, match="must have the same submodules"):
        execute_replication_callbacks(whole)
    assert out == []


def test_a_callback_that_is_none_is_switched_off():
    out: list[Any] = []
    modules = [tree(out) for _ in range(2)]
    for module in modules:
        module.c1.__data_parallel_replicate__ = None
    execute_replication_callbacks(modules)
    assert [name for name, _, _ in out] == ORDER[:-1] * 2


class Refuses(nn.Module):
    def __init__(self, refuse: Callable[..., None]) -> None:
        super().__init__()
        self.__data_parallel_replicate__ = refuse


@pytest.mark.parametrize("refused", [0, 1, 2])
@pytest.mark.parametrize("error", [ValueError, SystemExit])
@pytest.mark.parametrize("is_root", [False, True])
def test_error_in_a_callback_names_the_module_and_the_copy(refused, error, is_root):
    def refuse(ctx: CallbackContext, copy_id: int) -> None:
        if copy_id == refused:
            raise raised

    raised, layer = error("callback"), Refuses(refuse)
    net = layer if is_root else nn.Sequential(nn.ReLU(), nn.Sequential(layer))
    with pytest.raises(error) as caught:
        execute_replication_callbacks(copies(net, 3))
    assert caught.value is raised
    where = f"`{'(root)' if is_root else '1.0'}` (Refuses), copy {refused} of 3"
    assert raised.__notes__ == [f"in __data_parallel_replicate__ of {where}"]


# -- patch_replication_callback ----------------------------------------------------------------


def recorded(model: nn.Module, x: torch.Tensor | None = None) -> list[tuple[str, int]]:
    """The callbacks of one forward of a model around a `Recorder`."""
    model.module.out.clear()
    model(torch.zeros(4, 1) if x is None else x)
    return [(name, copy_id) for name, copy_id, _ in model.module.out]


def unpatched() -> CustomDataParallel:
    return CustomDataParallel(Recorder([], "root"), 2)


BOTH = [("root", 0), ("root", 1)]


@pytest.mark.parametrize("which", [0, 1], ids=["first handle", "second handle"])
def test_patches_are_made_and_removed_in_any_order(which):
    model = unpatched()
    before = dict(vars(model))
    assert recorded(model) == []
    handles = [patch_replication_callback(model) for _ in range(2)]
    assert recorded(model) == BOTH
    for _ in range(2):
        handles[which].remove()
        assert recorded(model) == []
        assert vars(model) == before
    patch_replication_callback(model)
    for stale in handles:
        stale.remove()
    assert recorded(model) == BOTH


@pytest.mark.parametrize("name", ["replicate", "parallel_apply"])
def test_patch_refuses_a_method_on_the_object_which_would_hide_its_own(name):
    """Older toolkits patch so."""
    model = unpatched()
    setattr(model, name, getattr(model, name))
    before = dict(vars(model))
    with pytest.raises(TypeError, match=rf"^{name} must be a method of the class \(got an attrib"):
        patch_replication_callback(model)
    assert type(model) is CustomDataParallel and vars(model) == before
    delattr(model, name)
    patch_replication_callback(model)
    assert recorded(model) == BOTH


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy])
@pytest.mark.parametrize("is_first", [False, True])
def test_copy_of_a_patched_data_parallel_is_patched_independently(copied, is_first):
    model = unpatched()
    handle = patch_replication_callback(model)
    twin = copied(model)
    twin.device_ids = ["cpu"] * 3
    everyone = [*BOTH, ("root", 2)]
    for removed in (handle, patch_replication_callback(twin))[:: 1 if is_first else -1]:
        one, expected = (model, BOTH) if removed is handle else (twin, everyone)
        assert recorded(one, torch.zeros(6, 1)) == expected
        removed.remove()
        assert recorded(one, torch.zeros(6, 1)) == []
    assert type(twin) is type(model) is CustomDataParallel


def test_patched_data_parallel_in_a_replica_runs_the_replicas_own_methods():
    seen: list[Any] = []

    class Sees(CustomDataParallel):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            seen.append(self)
            return super().replicate(module, device_ids)

    inner = Sees(Centering(), 2)
    patch_replication_callback(inner)
    x = torch.randn(8, 2)
    y = DataParallel(inner, ["cpu"] * 2)(x)
    torch.testing.assert_close(y, x - x.unflatten(0, (2, 4)).mean(1).repeat_interleave(4, 0))
    assert len({id(model) for model in (inner, *seen)}) == 3


@pytest.mark.parametrize("base", [CustomDataParallel, DataParallel])
def test_callbacks_run_once_where_a_replicate_of_the_users_runs_them_itself(base):
    class Runs(base):
        def replicate(self, module: Any, device_ids: Any) -> Any:
            replicas = super().replicate(module, device_ids)
            if base is CustomDataParallel:
                execute_replication_callbacks(replicas)
            return replicas

    model = Runs(Recorder([], "root"), 2 if base is CustomDataParallel else ["cpu"] * 2)
    patch_replication_callback(model)
    assert recorded(model) == BOTH


# -- in networks -------------------------------------------------------------------------------


@pytest.mark.parametrize("replicas", [1, 2])
def test_layers_that_were_the_only_copy_go_on_alone(replicas):
    """Callbacks run on the original itself; replicas may be made of it after that."""
    net = convert_model(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))).double()
    older = Centering()
    twin = nn.Sequential(copy.deepcopy(net[0]), nn.BatchNorm1d(3).double())
    twin.load_state_dict(net.state_dict())
    execute_replication_callbacks([nn.Sequential(net, older)])
    x = torch.randn(7, 3, dtype=torch.float64)
    torch.testing.assert_close(older(x), x - x.mean(0))
    for _ in range(2):
        torch.testing.assert_close(net(x), twin(x))
        torch.testing.assert_close(DataParallel(net, ["cpu"] * replicas)(x), twin(x))
    torch.testing.assert_close([*net.buffers()], [*twin.buffers()])


@pytest.mark.parametrize("outer", [1, 2, 3])
@pytest.mark.parametrize("inner", [1, 2])
def test_a_network_is_whole_after_it_was_inside_a_replica(outer, inner):
    """A DataParallel in a replica has its own copies; then its module is used again.

    On a single device it has none, but calls its module, which is the outer replicas' layer.
    """
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    nested = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * inner)
    x = torch.randn(12, 3, dtype=torch.float64)
    parts = x.chunk(1 if inner == 1 else outer)
    expected = [copy.deepcopy(net)(part) for part in parts]
    parameters = [*nested.parameters()]
    model = DataParallel(nested, ["cpu"] * outer)
    if inner > 1 and outer > 1:
        with pytest.warns(
            UnsynchronizedWarning, match="runs Sequential inside a replica"
        ) as found:
            y = model(x)
        assert len(found) == 1
        model.eval()(x)  # once for all replicas and forwards
        model.train()
    else:
        y = model(x)
    torch.testing.assert_close(y, torch.cat(expected))
    y.backward(torch.randn_like(y))
    assert all(map(lambda a, b: a is b, nested.parameters(), parameters))
    net.load_state_dict(nested.module.state_dict())
    torch.testing.assert_close(nested(x), net(x))
    torch.testing.assert_close(nested.module(x), net(x))
    torch.testing.assert_close([*nested.buffers()], [*net.buffers()])
