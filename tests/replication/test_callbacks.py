"""The replication callback: who is called, in which order, with what; and who is refused."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from replication import (
    CallbackContext,
    DataParallel,
    execute_replication_callbacks,
    patch_replication_callback,
    register_replication_callback,
    replicate,
)
from syncbn import convert_model
from tests.layers import Centering, CustomDataParallel, copied_each_way, pickled


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


@pytest.mark.parametrize("those", [[0, 2], [0], [1], [2]])
def test_layer_whose_copies_have_the_callback_in_part_is_called_where_it_has_it(those):
    calls = []
    modules = [nn.Identity() for _ in range(3)]
    for index in those:
        modules[index].__data_parallel_replicate__ = lambda ctx, copy_id: calls.append(copy_id)
    execute_replication_callbacks(modules)
    assert calls == those


def test_submodule_that_a_class_gives_its_copies_is_called():
    class Grows(nn.Identity):
        def _replicate_for_data_parallel(self) -> Any:
            replica = super()._replicate_for_data_parallel()
            replica._modules["own"] = Recorder(out, "own")
            return replica

    out: list[Any] = []
    net = nn.Sequential(Recorder(out, "a"), Grows(), Recorder(out, "b"))
    DataParallel(net, ["cpu"] * 2)(torch.zeros(2, 1))
    assert [(name, copy_id) for name, copy_id, _ in out] == [
        (name, copy_id) for copy_id in range(2) for name in ("a", "own", "b")
    ]


@pytest.mark.parametrize("kind", [nn.Sequential, nn.LSTM])
def test_paths_of_contexts_are_those_of_named_modules(kind):
    net = nn.Sequential(tree([]), tree([]), nn.LSTM(1, 1) if kind is nn.LSTM else nn.ReLU())
    net.append(net[1])
    net.register_module("absent", None)
    paths = []
    for module in net.modules():
        register_replication_callback(module, lambda m, ctx, copy_id: paths.append(ctx.path))
    model = DataParallel(net, ["cpu"] * 2)
    model.replicate(net, model.device_ids)
    assert paths == [path for path, _ in net.named_modules()] * 2


# -- who is refused, before anyone is called ---------------------------------------------------


@pytest.mark.parametrize("copies", [[], iter([])], ids=["list", "iterator"])
def test_no_copies_are_refused(copies):
    with pytest.raises(ValueError, match=r"at least one copy of a module \(got none\)"):
        execute_replication_callbacks(copies)


def test_copy_that_is_no_module_is_refused():
    with pytest.raises(TypeError, match=r"^copy 1 must be a module \(got str\)$"):
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
@pytest.mark.parametrize("is_registered", [False, True])
def test_error_in_a_callback_names_the_module_and_the_copy(refused, error, is_root, is_registered):
    def refuse(*arguments: Any) -> None:
        if arguments[-1] == refused:
            raise raised

    raised, layer = error("callback"), nn.ReLU() if is_registered else Refuses(refuse)
    if is_registered:
        register_replication_callback(layer, refuse)
    net = layer if is_root else nn.Sequential(nn.ReLU(), nn.Sequential(layer))
    with pytest.raises(error) as caught:
        execute_replication_callbacks(copies(net, 3))
    assert caught.value is raised
    name = "a registered callback" if is_registered else "__data_parallel_replicate__"
    where = f"`{'(root)' if is_root else '1.0'}` ({type(layer).__name__})"
    assert raised.__notes__ == [f"in {name} of {where}, copy {refused} of 3"]


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


class RebuildsItself(CustomDataParallel):
    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.module, len(self.device_ids))


@copied_each_way
@pytest.mark.parametrize("kind", [CustomDataParallel, RebuildsItself])
@pytest.mark.parametrize("is_first", [False, True])
def test_copy_of_a_patched_data_parallel_is_patched_independently(copied, kind, is_first):
    model = kind(Recorder([], "root"), 2)
    handle = patch_replication_callback(model)
    twin = copied(model)
    for removed in (handle, patch_replication_callback(twin))[:: 1 if is_first else -1]:
        assert recorded(model if removed is handle else twin) == BOTH
        removed.remove()
        assert recorded(model if removed is handle else twin) == []
    assert type(twin) is type(model) is kind
    assert set(vars(twin)) == set(vars(model)) == set(vars(unpatched()))


@copied_each_way
def test_copy_of_a_patched_data_parallel_runs_on_its_own_devices(copied):
    model = unpatched()
    patch_replication_callback(model)
    twin = copied(model)
    twin.device_ids = ["cpu"] * 3
    assert recorded(twin, torch.zeros(6, 1)) == [*BOTH, ("root", 2)]
    assert recorded(model, torch.zeros(6, 1)) == BOTH


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


def test_stock_data_parallel_without_an_accelerator_calls_the_module():
    model = nn.DataParallel(Recorder([], "root"))
    if model.device_ids:
        pytest.skip("this machine has an accelerator")
    patch_replication_callback(model)
    assert recorded(model) == []


def test_patch_leaves_our_own_class_as_it_is():
    model = DataParallel(Recorder([], "root"), ["cpu"] * 2)
    before = dict(vars(model))
    handle = patch_replication_callback(model)
    assert vars(model) == before
    assert recorded(model) == BOTH
    handle.remove()
    assert recorded(model) == BOTH


# -- registered callbacks ----------------------------------------------------------------------


def set_number(module: nn.Module, ctx: CallbackContext, copy_id: int) -> None:
    module.number = copy_id


def test_registered_callback_is_called_on_each_copy_of_its_module_only():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    register_replication_callback(net[1], set_number)
    replicas = copies(net, 3)
    execute_replication_callbacks(replicas)
    assert [replica[1].number for replica in replicas] == [0, 1, 2]
    assert not any(hasattr(m, "number") for m in (net[0], net[1], *(r[0] for r in replicas)))


def test_registered_callbacks_come_after_the_method_in_their_order_with_its_context():
    out: list[Any] = []
    module = Recorder(out, "method")
    for name in ("first", "second"):
        register_replication_callback(
            module, lambda m, ctx, copy_id, name=name: out.append((name, copy_id, ctx))
        )
    execute_replication_callbacks(copies(module, 2))
    names = ["method", "first", "second"]
    assert [(name, i) for name, i, _ in out] == [(n, i) for i in range(2) for n in names]
    assert len({id(ctx) for _, _, ctx in out}) == 1


def test_handle_takes_the_callback_away():
    linear = nn.Linear(1, 1)
    handle = register_replication_callback(linear, set_number)
    handle.remove()
    handle.remove()
    (replica,) = replicas = copies(linear, 1)
    execute_replication_callbacks(replicas)
    assert not hasattr(replica, "number")
    with register_replication_callback(linear, set_number):
        (replica,) = replicas = copies(linear, 1)
    execute_replication_callbacks(replicas)
    assert not hasattr(replica, "number")


@pytest.mark.parametrize("copied", [copy.deepcopy, pickled])
def test_copy_of_a_module_has_its_callbacks_and_is_independent(copied):
    linear = nn.Linear(1, 1)
    handle = register_replication_callback(linear, set_number)
    twin = copied(linear)
    handle.remove()
    (replica,) = replicas = copies(twin, 1)
    execute_replication_callbacks(replicas)
    assert replica.number == 0
    assert list(twin.state_dict()) == ["weight", "bias"]


def test_callbacks_of_a_module_that_came_from_another_process_are_kept(monkeypatch):
    """The numbers of handles also begin at 0 there."""
    monkeypatch.setattr(RemovableHandle, "next_id", 0)
    linear = nn.Linear(1, 1)
    register_replication_callback(linear, set_number)
    RemovableHandle.next_id = 0
    handle = register_replication_callback(linear, set_number)
    assert len(linear._replication_callbacks) == 2
    handle.remove()
    assert len(linear._replication_callbacks) == 1


def test_bound_method_of_a_replicated_module_is_called_on_the_replica():
    class Root(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.ReLU()
            self.told = None
            register_replication_callback(self.layer, self.tell)

        def tell(self, module: nn.Module, ctx: CallbackContext, copy_id: int) -> None:
            self.told = copy_id

    root = Root()
    replicas = copies(root, 2)
    execute_replication_callbacks(replicas)
    assert [replica.told for replica in replicas] == [0, 1]
    assert root.told is None


def test_registration_refuses_anything_else():
    with pytest.raises(TypeError, match=r"expected a torch.nn.Module \(got type\)"):
        register_replication_callback(nn.Linear, set_number)
    for module in (copies(nn.Linear(1, 1), 1)[0], DataParallel(nn.Linear(1, 1), ["cpu"])):
        with pytest.raises(TypeError, match="a DataParallel or a replica has no callbacks"):
            register_replication_callback(module, set_number)
    with pytest.raises(TypeError, match=r"expected a callable \(got int\)"):
        register_replication_callback(nn.Linear(1, 1), 3)


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
    """A DataParallel in a replica has copies of its own; then its module is used again.

    On a single device it has none, but calls its module, which is the outer replicas' layer.
    """
    net = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).double()
    nested = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * inner)
    x = torch.randn(12, 3, dtype=torch.float64)
    parts = x.chunk(1 if inner == 1 else outer)
    expected = [copy.deepcopy(net)(part) for part in parts]
    parameters = [*nested.parameters()]
    y = DataParallel(nested, ["cpu"] * outer)(x)
    torch.testing.assert_close(y, torch.cat(expected))
    y.backward(torch.randn_like(y))
    assert all(map(lambda a, b: a is b, nested.parameters(), parameters))
    net.load_state_dict(nested.module.state_dict())
    torch.testing.assert_close(nested(x), net(x))
    torch.testing.assert_close(nested.module(x), net(x))
    torch.testing.assert_close([*nested.buffers()], [*net.buffers()])
