"""Converting networks there and back loses nothing."""

from __future__ import annotations

import copy
import warnings

import pytest
import torch
from torch import nn

from replication import DataParallel, ReplicaAware
from replication.callback import has_replication_callback
from syncbn import (
    DataParallelWithCallback,
    SynchronizedBatchNorm1d,
    SynchronizedBatchNorm2d,
    SynchronizedBatchNorm3d,
    convert_model,
    patch_sync_batchnorm,
    revert_model,
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


class Fused(nn.BatchNorm2d):
    """A batch norm that does something more, as other libraries have."""

    def forward(self, x):
        return super().forward(x).relu()


def layers(module):
    return [m for m in module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]


@pytest.mark.parametrize(
    ("plain", "synchronized"),
    [
        (nn.BatchNorm1d, SynchronizedBatchNorm1d),
        (nn.BatchNorm2d, SynchronizedBatchNorm2d),
        (nn.BatchNorm3d, SynchronizedBatchNorm3d),
    ],
)
def test_each_class_becomes_its_counterpart_and_comes_back(plain, synchronized):
    assert type(convert_model(plain(3))) is synchronized
    assert type(revert_model(synchronized(3))) is plain


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


def test_a_round_trip_gives_bit_equal_outputs():
    net = Block().eval()
    other = revert_model(convert_model(copy.deepcopy(net)))
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(net(x), other(x))


@pytest.mark.parametrize("layer", [Fused(3), nn.LazyBatchNorm2d()], ids=lambda m: type(m).__name__)
def test_other_classes_are_left_alone_with_a_warning_that_names_them(layer):
    kind = type(layer)
    net = nn.Sequential(nn.Conv2d(3, 3, 1), layer, nn.BatchNorm2d(3))
    with pytest.warns(UserWarning, match=rf"`1` \({kind.__name__}, "):
        convert_model(net)
    assert type(net[1]) is kind
    assert type(net[2]) is SynchronizedBatchNorm2d


def test_what_stays_synchronized_is_named():
    net = nn.Sequential(nn.BatchNorm1d(3), convert_model(nn.BatchNorm1d(3)))
    nn.utils.parametrizations.spectral_norm(net[1])
    with pytest.warns(UserWarning, match=r"stay synchronized: `1` \(ParametrizedSynchron"):
        revert_model(net)


def test_nothing_to_convert_is_no_reason_to_warn():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        convert_model(nn.Sequential(nn.Linear(2, 2), nn.InstanceNorm1d(3)))


def test_a_stock_data_parallel_keeps_its_settings_and_gains_callbacks():
    wrapper = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3)))
    # As they are where there are accelerators; without one torch leaves them unset.
    wrapper.device_ids, wrapper.output_device, wrapper.dim = [1, 0], 1, 1
    converted = convert_model(wrapper)
    assert converted is wrapper
    assert isinstance(converted, DataParallelWithCallback)
    assert (wrapper.device_ids, wrapper.output_device, wrapper.dim) == ([1, 0], 1, 1)
    assert type(wrapper.module[0]) is SynchronizedBatchNorm1d
    revert_model(wrapper)
    assert type(wrapper) is nn.DataParallel
    assert type(wrapper.module[0]) is nn.BatchNorm1d


def test_a_stock_data_parallel_still_runs_after_conversion():
    wrapper = nn.DataParallel(nn.Sequential(nn.BatchNorm1d(3)))
    assert convert_model(wrapper)(torch.randn(4, 3)).shape == (4, 3)
    assert copy.deepcopy(wrapper)(torch.randn(4, 3)).shape == (4, 3)


def test_our_data_parallel_stays_what_it_is():
    model = DataParallel(nn.BatchNorm1d(3), ["cpu"] * 2)
    before = dict(vars(model))
    convert_model(model)
    assert vars(model) == before
    revert_model(model)
    assert type(model) is DataParallel


def test_a_customized_data_parallel_is_patched_and_unpatched():
    class Customized(nn.DataParallel):
        pass

    model = Customized(nn.BatchNorm1d(3))
    convert_model(model)
    assert isinstance(model, Customized) and has_replication_callback(model)
    revert_model(model)
    assert type(model) is Customized and not has_replication_callback(model)


def test_a_converted_network_synchronizes():
    net = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten()).double()
    model = DataParallel(convert_model(copy.deepcopy(net)), ["cpu"] * 3)
    x = torch.randn(7, 3, 6, 6, dtype=torch.float64)
    torch.testing.assert_close(model(x), net(x))
    torch.testing.assert_close(model.module[1].running_var, net[1].running_var)


def test_the_patch_changes_what_a_builder_builds_and_ends():
    with patch_sync_batchnorm():
        assert type(nn.BatchNorm2d(3)) is SynchronizedBatchNorm2d
        with patch_sync_batchnorm():
            assert type(nn.BatchNorm1d(3)) is SynchronizedBatchNorm1d
        assert type(nn.BatchNorm3d(3)) is SynchronizedBatchNorm3d
    assert nn.BatchNorm2d.__module__.startswith("torch.")
    assert type(nn.BatchNorm2d(3)) is nn.BatchNorm2d


def test_the_patch_ends_when_the_builder_raises():
    with pytest.raises(KeyError), patch_sync_batchnorm():
        raise KeyError
    assert nn.BatchNorm1d.__module__.startswith("torch.")


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


def test_torchs_synchronized_layers_are_converted_for_any_dimensions_and_back():
    net = nn.Sequential(nn.SyncBatchNorm(3), nn.SyncBatchNorm(3, affine=False)).double()
    state = {name: tensor.clone() for name, tensor in net.state_dict().items()}
    before = [dict(vars(layer)) for layer in net]
    convert_model(net)
    # DistributedDataParallel refuses those of torch's class without a GPU.
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


def test_layers_that_talk_note_their_paths():
    class Talks(ReplicaAware, nn.Module):
        pass

    net = convert_model(nn.Sequential(nn.Sequential(Talks(), nn.BatchNorm1d(2))))
    assert [layer._layer_name for layer in net[0]] == ["0.0", "0.1"]
