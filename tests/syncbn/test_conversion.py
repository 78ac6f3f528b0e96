"""Converting networks there and back loses nothing."""

from __future__ import annotations

import copy
import pickle
import re
import sys
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

import syncbn
from replication import (
    DataParallel,
    ReplicaAware,
    ReplicationError,
    UnsynchronizedWarning,
    patch_replication_callback,
)
from replication.callbacks import runs_callbacks
from replication.groups.registry import ProcessGroupHandle
from syncbn import (
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    SynchronizedBatchNormNd,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
    summary,
    verify,
)
from tests.kit.layers import Centering, Fused, SyncFused
from tests.kit.steps import step
from tests.kit.wrappers import CustomDataParallel, ours, patched
from tests.older_toolkit.batchnorm import (
    Base,
    BatchNorm1dOlder,
    BatchNorm2dCorrected,
    BatchNorm2dOlder,
    BatchNorm3dOlder,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)
        self.bn = nn.BatchNorm2d(4, momentum=None)
        self.again = self.bn  # tied
        self.rest = nn.ModuleDict({"a": nn.BatchNorm1d(2, affine=False), "b": nn.BatchNorm3d(5)})
        self.none = None
        self.listed = [self.bn]  # not registered, but the same layer

    def forward(self, x):
        return self.bn(self.conv(x))


def layers(module):
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


def test_everything_about_a_layer_is_kept():
    net = Block().double()
    net.bn.eval()
    net.bn.weight.requires_grad_(False)
    net.bn.track_running_stats = False
    net.bn.marked = "by the user"
    calls = []
    handle = net.bn.register_forward_hook(lambda *_: calls.append(1))
    before = {name: dict(vars(m)) for name, m in net.named_modules()}
    tensors = {n: id(t) for n, t in [*net.named_parameters(), *net.named_buffers()]}
    names = [name for name, _ in net.named_modules(remove_duplicate=False)]

    for _ in range(2):  # the second time changes nothing
        assert convert_model(net) is net
    assert {type(m) for m in layers(net)} == {
        SynchronizedBatchNorm1d,
        SynchronizedBatchNorm2d,
        SynchronizedBatchNorm3d,
    }
    assert net.bn is net.again is net.listed[0]
    # Besides, each notes its path, for messages.
    noted = {
        name: vars(m).pop("_layer_name") for name, m in net.named_modules() if m in layers(net)
    }
    assert all(path == name for name, path in noted.items())
    assert {name: dict(vars(m)) for name, m in net.named_modules()} == before
    assert {n: id(t) for n, t in [*net.named_parameters(), *net.named_buffers()]} == tensors
    assert [name for name, _ in net.named_modules(remove_duplicate=False)] == names
    net(torch.randn(2, 3, 5, 5, dtype=torch.float64))
    assert calls == [1]
    handle.remove()
    net(torch.randn(2, 3, 5, 5, dtype=torch.float64))
    assert calls == [1]

    assert revert_model(net) is net
    assert {type(m) for m in layers(net)} == {nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d}
    assert {name: dict(vars(m)) for name, m in net.named_modules()} == before


def test_layers_of_a_users_class_are_converted_by_a_second_base_class_and_back():
    options = {"eps": 1e-3, "momentum": None}
    layers = [Fused(3, **options), Fused(3), nn.BatchNorm2d(3)]
    net = nn.Sequential(nn.Conv2d(3, 3, 1), *layers).double()
    net[1].act = nn.PReLU()
    net[2].eval()
    plain = copy.deepcopy(net)
    before = [dict(vars(module)) for module in net]
    for _ in range(2):  # the second time changes nothing
        assert convert_model(net, classes={Fused: SyncFused}) is net
    kinds = [SyncFused, SyncFused, SynchronizedBatchNorm2d]
    assert [type(layer) for layer in net[1:]] == kinds
    assert summary(net).paths("synchronized") == ["1", "2", "3"]
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 3)(x), plain(x))
    torch.testing.assert_close(net.state_dict(), plain.state_dict())

    pickled = pickle.loads(pickle.dumps(copy.deepcopy(net[2:])))
    assert [type(layer) for layer in revert_model(pickled)] == [Fused, nn.BatchNorm2d]
    assert [dict(vars(module)) for module in revert_model(net)] == before


class SyncAgain(SyncFused):
    """A synchronized class that takes the place of another one."""


def test_the_class_before_the_first_conversion_comes_back():
    layer = convert_model(Fused(3), classes={Fused: SyncFused})
    assert type(convert_model(layer, classes={SyncFused: SyncAgain})) is SyncAgain
    assert type(revert_model(layer)) is Fused


@pytest.mark.parametrize(
    "classes",
    [
        Fused,
        [Fused],
        {"Fused": SyncFused},
        {Fused: None},
        {Fused: lambda old: SyncFused(3)},
        {Fused: nn.BatchNorm2d},
        {Fused: ReplicaAware},
        {Fused: SyncFused(3)},
        {int: SyncFused},
        {Fused: SynchronizedBatchNorm2d},
        {Fused: type("Swapped", (SynchronizedBatchNorm2d, Fused), {})},
        {nn.BatchNorm2d: SynchronizedBatchNorm1d},
    ],
    ids=str,
)
def test_classes_that_are_no_classes_are_refused_before_any_change(classes):
    net = nn.Sequential(nn.BatchNorm2d(3), Fused(3))
    with pytest.raises(TypeError, match="classes must") as caught:
        convert_model(net, classes=classes)
    assert repr(classes) in str(caught.value)
    assert [type(layer) for layer in net] == [nn.BatchNorm2d, Fused]


class Functional(nn.BatchNorm2d):
    """Never reaches the forward of a second base class."""

    def forward(self, x):
        return nn.functional.batch_norm(x, None, None, self.weight, self.bias, training=True)


class OfTorch(nn.SyncBatchNorm):
    """Inherits a forward of torch's that never reaches it."""


class Processing(nn.SyncBatchNorm):
    """Reaches a forward of torch's by super()."""

    def forward(self, x):
        return super().forward(x).relu()


@pytest.mark.parametrize("old", [Functional, OfTorch, Processing])
def test_a_forward_that_does_not_lead_to_the_synchronized_one_is_refused(old):
    new = type("New", (old, SynchronizedBatchNormNd), {})
    layer = old(3)
    with pytest.raises(TypeError, match=r"calls super.*, or with its own forward"):
        convert_model(layer, classes={old: new})
    assert type(layer) is old
    with pytest.warns(UnsynchronizedWarning, match=r"New, its forward does not lead to the sync"):
        convert_model(new(3))
    rewritten = type("Rewritten", (new,), {"forward": SynchronizedBatchNormNd.forward})
    assert summary(rewritten(3)).paths("synchronized") == [""]
    convert_model(layer, classes={old: rewritten})
    assert type(layer) is rewritten


def test_layers_derived_from_torchs_for_processes_follow_the_advice_and_come_back():
    """Clause 6d: layers that can't be converted are named."""
    net = nn.Sequential(nn.Conv2d(3, 3, 1), Processing(3)).double()
    state = copy.deepcopy(net.state_dict())
    x = torch.randn(7, 3, 4, 4, dtype=torch.float64)
    with pytest.warns(UnsynchronizedWarning, match="part of the batch in `1` .Processing.; call"):
        DataParallel(net, ["cpu"] * 2)(x)
    net.load_state_dict(state)
    with pytest.warns(UnsynchronizedWarning) as caught:
        convert_model(net)
    advice = "classes={Processing: ...} with a class derived from SynchronizedBatchNorm2d (or 1d"
    assert advice in str(caught[0].message)

    class SyncProcessing(SynchronizedBatchNormNd):
        def forward(self, x):
            return super().forward(x).relu()

    plain = nn.Sequential(nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3), nn.ReLU()).double()
    plain.load_state_dict(state)
    convert_model(net, classes={Processing: SyncProcessing})
    torch.testing.assert_close(DataParallel(net, ["cpu"] * 2)(x), plain(x))
    assert type(revert_model(net)[1]) is Processing


def test_a_warning_about_many_layers_names_the_first_of_each_class():
    """Clause 6d: layers that can't be converted are named."""
    layers = [layer for _ in range(50) for layer in (Fused(3), nn.LazyBatchNorm2d())]
    with pytest.warns(UnsynchronizedWarning) as caught:
        convert_model(nn.Sequential(*layers))
    text = str(caught[0].message)
    assert "`0`, `2`, `4` and 47 more (Fused, a derived class: pass" in text
    assert "`1`, `3`, `5` and 47 more (LazyBatchNorm2d, lazy: call" in text
    assert text.count("\n") == 3 and len(text) < 500


def test_the_warning_shows_the_argument_to_pass():
    net = nn.Sequential(Fused(3), nn.BatchNorm2d(3))
    with pytest.warns(UnsynchronizedWarning) as caught:
        convert_model(net)
    assert [warning.filename for warning in caught] == [__file__]
    text = str(caught[0].message)
    (argument,) = re.findall(r"classes=.*?}", text)
    (definition,) = re.findall(r"class SyncFused.*: pass", text)
    names = {**globals(), "syncbn": syncbn, "net": net}
    exec(definition, names)
    eval(f"convert_model(net, {argument})", names)  # without a warning
    assert type(net[0]) is names["SyncFused"] is not SyncFused
    x = torch.randn(6, 3, 2, 2)
    assert verify(net, x)


@pytest.fixture
def timm_layer(monkeypatch):
    """A layer of a class like timm's, under the name of timm's."""
    module: Any = ModuleType("timm.layers.norm_act")
    for name, base in ("BatchNormAct2d", TimmLayer), ("SyncBatchNormAct", TimmLayerOfProcesses):
        setattr(module, name, type(name, (base,), {"__module__": module.__name__}))
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    monkeypatch.setitem(sys.modules, "timm.layers", ModuleType("timm.layers"))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    return module.BatchNormAct2d(3)


class TimmLayer(nn.BatchNorm2d):
    def __init__(self, *args, **options) -> None:
        super().__init__(*args, **options)
        self.drop = nn.Identity()
        self.act = nn.SiLU(inplace=True)

    def forward(self, x):
        self.num_batches_tracked += self.training
        output = nn.functional.batch_norm(
            *(x, self.running_mean, self.running_var, self.weight, self.bias, self.training)
        )
        return self.act(self.drop(output))


class TimmLayerOfProcesses(nn.SyncBatchNorm):
    """timm takes its parts from the layer that it converts."""

    def forward(self, x):
        return self.act(self.drop(super().forward(x)))


def test_what_timm_makes_of_its_layer_is_converted_like_the_layer(timm_layer):
    kind = sys.modules[type(timm_layer).__module__].SyncBatchNormAct
    layer = kind(3)
    layer.drop, layer.act = timm_layer.drop, timm_layer.act
    assert summary(layer).paths("plain") == [""]
    assert type(convert_model(layer)) is type(convert_model(timm_layer))
    assert type(revert_model(layer)) is kind


def test_the_layer_of_timm_is_converted_with_its_activation(timm_layer):
    kind = type(timm_layer)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), timm_layer).double()
    plain = copy.deepcopy(net)
    assert summary(net).paths("plain") == ["1"]
    convert_model(net)
    # timm's own functions know the layer by its class.
    assert isinstance(net[1], SynchronizedBatchNorm2d) and isinstance(net[1], kind)
    x = torch.randn(5, 3, 4, 4, dtype=torch.float64)
    for training in (True, False):
        expected = plain.train(training)(x)
        net.train(training)
        for one in (copy.deepcopy(net), pickle.loads(pickle.dumps(net)), net):
            torch.testing.assert_close(DataParallel(one, ["cpu"] * 2)(x), expected)
            torch.testing.assert_close(one.state_dict(), plain.state_dict())
    torch.testing.assert_close(net(x), expected)
    revert_model(net)
    assert type(net[1]) is kind and vars(net[1]).keys() == vars(plain[1]).keys()


def test_class_derived_from_timms_is_left_alone(timm_layer):
    derived = type("Derived", (type(timm_layer),), {})(3)
    with pytest.warns(UnsynchronizedWarning, match=r"\(Derived, .* classes=\{Derived: "):
        convert_model(derived)
    with pytest.warns(UserWarning, match="still synchronized"):
        revert_model(type("More", (type(convert_model(timm_layer)),), {})(3))


def test_what_stays_synchronized_is_named():
    net = nn.Sequential(nn.BatchNorm1d(3), convert_model(nn.BatchNorm1d(3)))
    nn.utils.parametrizations.spectral_norm(net[1])
    with pytest.warns(UserWarning, match=r"still synchronized: `1` \(Parametrized") as caught:
        revert_model(net)
    assert [warning.filename for warning in caught] == [__file__]


def test_model_without_batch_norm_is_warned_of_at_the_users_line():
    with pytest.warns(UnsynchronizedWarning, match="found no batch norm in Sequential") as caught:
        convert_model(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(3)))
    assert [warning.filename for warning in caught] == [__file__]


class FrozenBatchNorm2d(nn.Module):
    """As torchvision's: constants, and no class in common with batch norm."""


def test_a_network_whose_batch_norm_is_frozen_is_told_so():
    net = nn.Sequential(nn.Conv2d(3, 2, 1), FrozenBatchNorm2d())
    text = "found no batch norm in Sequential that trains (got frozen layers: `1`); leave them"
    with pytest.warns(UnsynchronizedWarning, match=re.escape(text)):
        assert convert_model(net) is net


class Aware(ReplicaAware, nn.Module):
    """A user's connected layer."""


@pytest.mark.parametrize(
    "module",
    [
        convert_model(nn.BatchNorm1d(3)),
        nn.Sequential(Aware()),
        nn.DataParallel(nn.Linear(2, 2)),
        DataParallel(convert_model(nn.BatchNorm1d(3)), ["cpu"] * 2),
    ],
    ids=["synchronized", "replica-aware", "wrapper", "again"],
)
def test_model_with_something_to_connect_is_no_reason_to_warn(module, recwarn):
    convert_model(module)
    assert not recwarn.list


class Listed(nn.Module):
    """Batch norm in containers that torch does not look into."""

    def __init__(self, container, kind=nn.BatchNorm1d) -> None:
        super().__init__()
        layers = [kind(3), nn.Sequential(nn.Linear(3, 3), kind(3))]
        self.hidden = {
            "list": layers,
            "tuple": tuple(layers),
            "dict": dict(enumerate(layers)),
            "nested": {"a": (layers,)},
        }[container]


@pytest.mark.parametrize("kind", [nn.BatchNorm1d, SynchronizedBatchNorm1d])
@pytest.mark.parametrize("container", ["list", "tuple", "dict", "nested"])
def test_layers_in_plain_containers_are_named(container, kind):
    net = nn.Sequential(nn.BatchNorm1d(3), Listed(container, kind))
    with pytest.warns(UnsynchronizedWarning) as caught:
        convert_model(net)
    (text,) = [str(warning.message) for warning in caught]
    assert f"`1.hidden`, `1.hidden` ({kind.__name__}, in a plain list" in text
    rows = [layer for layer in summary(net).layers if layer.kind.name == "left alone"]
    assert [layer[:2] for layer in rows] == [("1.hidden", kind.__name__)] * 2
    assert all("nn.ModuleList" in layer.kind.note for layer in rows)


class CallingSuper(DataParallel):
    def replicate(self, module: nn.Module, device_ids: Any) -> Any:
        return super().replicate(module, device_ids)


def test_a_wrapper_whose_replicate_calls_super_is_left_as_it_is():
    """So it can be pickled."""
    model = convert_model(CallingSuper(nn.BatchNorm1d(3), ["cpu"] * 2))
    assert type(model) is CallingSuper
    (wrapper, _) = summary(model).layers
    assert wrapper.kind == ("wrapper", "connects the copies of its layers")
    x = torch.randn(6, 3)
    copied = pickle.loads(pickle.dumps(model))
    torch.testing.assert_close(copied(x), nn.BatchNorm1d(3)(x))


@pytest.mark.parametrize("kind", [nn.DataParallel, CustomDataParallel, DataParallel])
def test_a_round_trip_leaves_nothing_on_a_wrapper_or_its_layers(kind):
    wrapper = kind(nn.BatchNorm1d(3), *([2] if kind is CustomDataParallel else []))
    before = dict(vars(wrapper)), dict(vars(wrapper.module))
    assert runs_callbacks(type(convert_model(wrapper)))
    assert isinstance(wrapper, DataParallel) or kind is CustomDataParallel
    assert {name: vars(wrapper)[name] for name in before[0]} == before[0]
    for model in (wrapper, copy.deepcopy(wrapper)):
        assert model(torch.randn(4, 3)).shape == (4, 3)
    wrapper.module.reset_running_stats()
    wrapper.module._process_group = ProcessGroupHandle(object())
    revert_model(wrapper)
    assert type(wrapper) is kind and (vars(wrapper), vars(wrapper.module)) == before
    # The user's own choice from here on, which is not the conversion's to undo.
    patch_replication_callback(wrapper)
    patched = dict(vars(wrapper))
    revert_model(wrapper)
    assert vars(wrapper) == patched


def test_group_size_is_given_to_every_layer_and_taken_away_again():
    net = nn.Sequential(nn.BatchNorm1d(3), SynchronizedBatchNorm1d(3), nn.Linear(3, 3))
    convert_model(net, group_size=2)
    assert [layer.group_size for layer in net[:2]] == [2, 2]
    convert_model(net)
    assert [layer.group_size for layer in net[:2]] == [2, 2]
    revert_model(net)
    assert not any(hasattr(layer, "group_size") for layer in net)


@pytest.mark.parametrize("layers", [[nn.BatchNorm1d(3), nn.BatchNorm1d(3)], [nn.Linear(3, 3)]])
def test_what_is_no_process_group_is_refused_before_anything_is_converted(layers):
    net = nn.Sequential(*layers)
    before = [type(layer) for layer in net]
    with pytest.raises(TypeError, match=r"process_group must be .* \(got str\)"):
        convert_model(net, process_group="world")
    assert [type(layer) for layer in net] == before


def test_a_group_by_position_is_refused_with_the_name_of_the_argument():
    """As `torch.nn.SyncBatchNorm` and its ``convert_sync_batchnorm`` take it."""
    net, group = nn.Sequential(nn.BatchNorm1d(3)), object()
    with pytest.raises(
        TypeError, match=r"^group_size must be .*; pass a group of .*process_group="
    ):
        convert_model(net, group)
    assert type(net[0]) is nn.BatchNorm1d
    with pytest.raises(
        TypeError, match=r"^device must be .*got object.* pass a group by name: pro"
    ):
        SynchronizedBatchNormNd(3, 1e-5, 0.1, True, True, group)


def test_torchs_synchronized_layers_are_converted_for_any_dimensions_and_back():
    net = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, affine=False)).double()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    before = [dict(vars(layer)) for layer in net]
    convert_model(net)
    # DistributedDataParallel refuses layers of torch's class without a GPU.
    assert not any(isinstance(layer, nn.SyncBatchNorm) for layer in net)
    with pytest.raises(ValueError, match="expected at least 2D input"):
        net(torch.zeros(3, dtype=torch.float64))
    for shape in [(6, 3), (6, 3, 4), (6, 3, 2, 2), (6, 3, 2, 2, 2)]:
        x = torch.randn(shape, dtype=torch.float64)
        y = DataParallel(net, ["cpu"] * 3)(x)
        plain = nn.functional.batch_norm(x, None, None, training=True)
        torch.testing.assert_close(y, nn.functional.batch_norm(plain, None, None, training=True))
    net.load_state_dict(state)
    revert_model(net)
    assert [type(layer) for layer in net] == [nn.SyncBatchNorm] * 2
    assert [dict(vars(layer)) for layer in net] == before


# -- layers of older toolkits ------------------------------------------------------------------


def older_network(layer=BatchNorm2dOlder):
    """A network that a program with its own copy of an older toolkit builds."""
    return nn.Sequential(nn.Conv2d(3, 4, 3), layer(4, eps=1e-3, momentum=0.3), nn.Flatten())


def plain_twin(net):
    """The network with `torch.nn.BatchNorm2d` and the same parameters, on one device."""
    twin = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4, 1e-3, 0.3), nn.Flatten()).double()
    state = {k: v for k, v in net.state_dict().items() if "_tmp" not in k and "iter" not in k}
    twin.load_state_dict(state)
    return twin


@pytest.mark.parametrize("layer", [BatchNorm2dOlder, BatchNorm2dCorrected])
@pytest.mark.filterwarnings("ignore:syncbn does not correct the bias")
def test_layers_with_their_own_pipes_are_converted_and_have_the_numbers_of_one_device(layer):
    net = older_network(layer).double()
    nn.init.normal_(net[1].weight)
    twin = plain_twin(net)
    x, dy = torch.randn(7, 3, 5, 5).double(), torch.randn(7, 36).double()
    model = DataParallel(convert_model(net), ["cpu"] * 3)
    torch.testing.assert_close(step(model, net, x, dy), step(twin, twin, x, dy))


@pytest.mark.parametrize(
    ("older", "new", "plain"),
    [
        (BatchNorm1dOlder, SynchronizedBatchNorm1d, nn.BatchNorm1d),
        (BatchNorm2dOlder, SynchronizedBatchNorm2d, nn.BatchNorm2d),
        (BatchNorm3dOlder, SynchronizedBatchNorm3d, nn.BatchNorm3d),
    ],
)
def test_everything_about_a_layer_of_an_older_toolkit_is_kept_but_its_pipes(older, new, plain):
    layer = older(3, eps=1e-3, momentum=0.3, affine=older is not BatchNorm1dOlder).eval()
    layer.marked = "by the user"
    layer.register_forward_hook(lambda *_: None)
    pipes = ("_sync_master", "_is_parallel", "_parallel_id", "_slave_pipe")
    before = {name: value for name, value in vars(layer).items() if name not in pipes}
    tensors = list(map(id, layer.state_dict(keep_vars=True).values()))
    assert summary(layer).paths("plain") == [""]
    for _ in range(2):  # the second time changes nothing
        assert convert_model(layer) is layer
        assert type(layer) is new and vars(layer) == {**before, "_layer_name": None}
    assert list(map(id, layer.state_dict(keep_vars=True).values())) == tensors
    assert vars(revert_model(layer)) == before
    assert type(layer) is plain


def test_bias_corrected_statistics_are_warned_of_and_their_checkpoints_still_load():
    net = older_network(BatchNorm2dCorrected)
    checkpoint = copy.deepcopy(net.state_dict())
    assert "1._running_iter" in checkpoint
    checkpoint["1.running_mean"] += 1
    with pytest.warns(UserWarning, match=r"correct the bias .* layer\.momentum = .*`1`") as caught:
        convert_model(net)
    assert [(w.category, w.filename) for w in caught] == [(UserWarning, __file__)]
    assert net[1].momentum == 0.3
    assert list(net[1].state_dict()) == list(nn.BatchNorm2d(4).state_dict())
    net.load_state_dict(checkpoint)
    assert net[1].running_mean.tolist() == [1.0] * 4
    assert "1._running_iter" in checkpoint
    net[1].load_state_dict({k[2:]: v for k, v in checkpoint.items() if k[0] == "1"})
    with pytest.raises(RuntimeError, match="Unexpected key"):
        net.load_state_dict({**checkpoint, "1._running_magic": torch.ones(1)})


def derived(name, base=BatchNorm2dOlder, **members):
    return type(name, (base,), {"__module__": __name__, **members})


def changed(layer, **attributes):
    for name, value in attributes.items():
        setattr(layer, name, value)
    return layer


class Freezable:
    """Comes after torch's classes in the order of bases."""

    def freeze(self):
        self.eval()


@pytest.mark.parametrize(
    "layer",
    [
        derived("Fused", forward=lambda self, x: x)(3),
        derived("Same")(3),
        type("Mixed", (BatchNorm2dOlder, Freezable), {})(3),
        changed(BatchNorm2dOlder(3), scale=nn.Parameter(torch.ones(1))),
        changed(BatchNorm2dOlder(3), forward=print),
    ],
    ids=lambda layer: type(layer).__name__,
)
def test_layer_of_an_older_toolkit_that_does_more_is_left_alone_by_name(layer):
    kind, state = type(layer), dict(vars(layer))
    with pytest.warns(UnsynchronizedWarning) as caught:
        convert_model(nn.Sequential(layer))
    (text,) = [str(warning.message) for warning in caught]
    reason = "its base has another synchronization: pass classes="
    assert f"`0` ({kind.__name__}, {reason}{{{kind.__name__}: ...}}" in text
    assert type(layer) is kind and vars(layer) == state
    assert summary(layer).paths("left alone") == [""]


def test_layer_of_an_older_toolkit_without_dimensions_in_its_name_takes_any():
    layer = derived("SyncNorm", Base, __module__=Base.__module__)(3)
    assert type(convert_model(layer)) is SynchronizedBatchNormNd
    assert type(revert_model(layer)) is nn.SyncBatchNorm
    for shape in (6, 3), (6, 3, 2, 2):
        assert layer(torch.randn(shape)).shape == shape


def test_layers_are_converted_while_the_names_of_torch_are_patched():
    layers = nn.Sequential(nn.BatchNorm2d(3), BatchNorm2dOlder(3))
    with patch_sync_batchnorm():
        convert_model(layers)
        assert {type(layer) for layer in layers} == {SynchronizedBatchNorm2d}
        revert_model(layers)
    assert {type(layer) for layer in layers} == {nn.BatchNorm2d}


class OlderContext:
    """The context of a toolkit that knows no groups."""


def connected_by_older_toolkit(replicas):
    """The replicas, after the older toolkit has run the callbacks with its own contexts."""
    contexts = [OlderContext() for _ in replicas[0].modules()]
    for copy_id, replica in enumerate(replicas):
        for context, layer in zip(contexts, replica.modules(), strict=True):
            if hasattr(layer, "__data_parallel_replicate__"):
                layer.__data_parallel_replicate__(context, copy_id)
    return replicas


class OlderWrapper(CustomDataParallel):
    """The older toolkit's DataParallel."""

    def replicate(self, module, device_ids):
        return connected_by_older_toolkit(super().replicate(module, device_ids))


@pytest.mark.parametrize("wrap", [ours, patched(CustomDataParallel)], ids=["ours", "patched"])
def test_a_patch_of_an_older_toolkit_beside_ours(wrap):
    plain = nn.BatchNorm1d(3).double()
    nets = convert_model(copy.deepcopy(plain)), Centering()
    synchronized, piped = (wrap(net, 2) for net in nets)
    for model in (synchronized, piped):
        replicate = model.replicate
        model.replicate = lambda *args, of=replicate: connected_by_older_toolkit(of(*args))
    x = torch.randn(6, 3, dtype=torch.float64)
    torch.testing.assert_close(synchronized(x), plain(x))
    with pytest.raises(
        ReplicationError, match="register_slave connects the replicas of one forward"
    ):
        piped(x)


def test_wrapper_of_an_older_toolkit_around_converted_layers():
    net = older_network().double()
    twin = plain_twin(net)
    x = torch.randn(6, 3, 5, 5, dtype=torch.float64)
    with pytest.warns(UnsynchronizedWarning, match="patch_replication_callback"):
        OlderWrapper(convert_model(copy.deepcopy(net)), 2)(x)
    model = convert_model(OlderWrapper(net, 2))
    torch.testing.assert_close(model(x), twin(x))
