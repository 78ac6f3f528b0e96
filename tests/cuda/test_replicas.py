"""Replicas on CUDA devices have the numbers of one device."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from replication import (
    DataParallel,
    DataParallelCriterion,
    Scattered,
    patch_replication_callback,
)
from syncbn import SynchronizedBatchNorm2d, convert_model, verify
from tests.cuda.matrix import (
    DEVICES,
    OPTIONS,
    PRECISIONS,
    SAMPLES,
    SIZES,
    Samples,
    Step,
    assert_as_accurate,
    assert_close,
    batch,
    convolutions,
    gradients_of,
    layer,
    network,
    side_streams,
    skip_file_without,
    state_of,
    step,
)
from tests.kit.collectives import CASES, OPS, derivatives, in_replicas, leaves, reduced
from tests.kit.layers import Centering, Recomputed
from tests.kit.properties import pairwise

skip_file_without(1)
pytestmark = pytest.mark.gpu

LISTS = {
    "all": DEVICES,
    "reversed": DEVICES[::-1],
    "one twice": DEVICES[-1:] * 2,
    "each twice": [device for device in DEVICES for _ in range(2)],
}
every_list = pytest.mark.parametrize("where", LISTS)

#: Numbers of samples that scatter splits between k devices, beside the sizes of shards.
BATCHES: dict[str, Callable[[int], int]] = {
    "a batch": lambda k: 4 * k,
    "a batch, uneven": lambda k: 4 * k - 1,
    "a batch of one more than devices": lambda k: k + 1,
    "a batch of fewer than devices": lambda k: max(2, k - 1),
}


class OnShards(nn.Module):
    """Splits a batch into shards of the given sizes, and joins the outputs."""

    def __init__(self, net: nn.Module, devices: Sequence[str], sizes: Sequence[int]) -> None:
        super().__init__()
        self.replicas = DataParallel(net, devices, gather_to_one_device=False)
        self.devices, self.sizes = devices, list(sizes)

    def forward(self, x: Tensor) -> Tensor:
        shards = zip(x.split(self.sizes), self.devices, strict=True)
        outputs = self.replicas(Scattered([shard.to(device) for shard, device in shards]))
        return torch.cat([y.to(x.device) for y in outputs])


def replicated(net: nn.Module, where: str, split: str) -> tuple[nn.Module, int]:
    """A model around a network, and the number of samples that it takes."""
    devices = LISTS[where]
    if split in BATCHES:
        return DataParallel(net, devices), BATCHES[split](len(devices))
    sizes = SIZES[split](len(devices))
    return OnShards(net, devices, sizes), sum(sizes)


@pairwise(
    where=LISTS,
    precision=PRECISIONS,
    samples=SAMPLES,
    options=OPTIONS,
    split=[*BATCHES, *SIZES],
)
def test_a_layer_is_as_accurate_as_torchs(where, precision, samples, options, split):
    plain = layer(samples, options, precision)
    net = convert_model(copy.deepcopy(plain)).to(LISTS[where][0])
    model, number = replicated(net, where, split)
    x, dy = batch(samples, number, precision.inputs)
    exact = copy.deepcopy(plain).double()
    expected = step(exact, exact, x.double(), dy.double())
    own = plain.to("cuda:0")
    torchs = step(own, own, x.to("cuda:0"), dy.to("cuda:0"))
    found = step(model, net, x.to(LISTS[where][0]), dy)
    if options == {"momentum": None} and precision.inputs != torch.float64:
        expected.pop("running_var"), found.pop("running_var")  # see the next test
    if split in BATCHES:  # joined shards take the format of the first
        assert found["y"].is_contiguous(memory_format=samples.format)
    assert_as_accurate(found, expected, torchs, x)


@pytest.mark.xfail(reason="kernels hand over 1 / sqrt(var) in float32, of shards and of the batch")
def test_the_variance_of_a_single_batch_is_as_accurate_as_torchs():
    """With ``momentum=None`` or 1 the running variance is that of one batch."""
    for _ in range(150):  # a tenth of all batches misses the bound, by up to half of it
        plain = nn.BatchNorm2d(6, momentum=None)
        net = convert_model(copy.deepcopy(plain)).to(DEVICES[0])
        x, _ = batch(Samples((6, 4, 5)), 8, torch.float32)
        DataParallel(net, DEVICES)(x.to(DEVICES[0]))
        exact, own = copy.deepcopy(plain).double(), plain.to(DEVICES[0])
        exact(x.double()), own(x.to(DEVICES[0]))
        states = [{"running_var": layer.running_var} for layer in (net, exact, own)]
        assert_as_accurate(*states, x)


@pairwise(where=LISTS, samples=SAMPLES, options=OPTIONS, split=[*BATCHES, *SIZES])
def test_training_has_the_numbers_of_one_device(where, samples, options, split):
    plain = network(samples, options)
    first = LISTS[where][0]
    net = convert_model(copy.deepcopy(plain)).to(first)
    model, number = replicated(net, where, split)
    batches = [batch(samples, number) for _ in range(3)]
    assert_close(trained(model, net, batches, first), trained(plain, plain, batches))


def trained(
    model: Callable[[Tensor], Tensor],
    net: nn.Module,
    batches: list[tuple[Tensor, Tensor]],
    device: str = "cpu",
) -> Step:
    """What each step gives."""
    parameters, found = list(net.parameters()), {}
    optimizer = torch.optim.SGD(parameters, lr=0.05) if parameters else None
    for index, (x, dy) in enumerate(batches):
        found |= {f"step {index}: {k}": t for k, t in step(model, net, x.to(device), dy).items()}
        if optimizer:
            optimizer.step()
    return found


# -- uses of a network ---------------------------------------------------------------------------

#: A model, an input of it as a leaf, and the gradient of its output; what a use gives.
Use = Callable[[Callable[[Tensor], Tensor], nn.Module, Tensor, Tensor], Sequence[Tensor | None]]


def evaluates(model, net, x, dy):
    for part in (model, net):
        part.eval()
    return _first_derivatives(model, net, x, dy)


def trains_without_graph(model, net, x, dy):
    with torch.no_grad():
        return [model(x)]


def trains_in_inference_mode(model, net, x, dy):
    with torch.inference_mode():
        return [model(x).clone()]


def takes_second_derivatives(model, net, x, dy):
    leaves = [x, *(p for p in net.parameters() if p.requires_grad)]
    first = torch.autograd.grad((model(x).pow(3) * dy).sum(), leaves, create_graph=True)
    return [*first, *torch.autograd.grad(sum(g.square().sum() for g in first), leaves)]


def adds_gradients_of_two_graphs(model, net, x, dy):
    y = model(x)
    (model(2 * x).pow(3) + model(x.square())).backward(dy)
    y.backward(dy, retain_graph=True)
    y.square().sum().backward()
    return [x.grad]


def needs_no_gradient_of_its_input(model, net, x, dy):
    model(x.detach()).backward(dy)
    return []


def has_frozen_weights(model, net, x, dy):
    return _frozen("weight", model, net, x, dy)


def has_frozen_biases(model, net, x, dy):
    return _frozen("bias", model, net, x, dy)


def is_frozen(model, net, x, dy):
    return _frozen("", model, net, x, dy)


def _frozen(name, model, net, x, dy):
    for key, parameter in net.named_parameters():
        parameter.requires_grad_(name not in key)
    return _first_derivatives(model, net, x, dy)


def gets_an_expanded_gradient(model, net, x, dy):
    (model(x).sum((2, 3)) * dy[..., 0, 0]).sum().backward()
    return [x.grad]


def takes_a_slice(model, net, x, dy):
    model(torch.stack((x, x), -1)[..., 0]).backward(dy)
    return [x.grad]


def takes_transposed_images(model, net, x, dy):
    model(x.transpose(2, 3)).backward(dy.transpose(2, 3))
    return [x.grad]


def takes_large_means(model, net, x, dy):
    return _first_derivatives(model, net, (x.detach() + 1e3).requires_grad_(), dy)


def runs_on_side_streams(model, net, x, dy):
    if not x.is_cuda:
        return _first_derivatives(model, net, x, dy)
    with side_streams():
        return _first_derivatives(model, net, x, dy)


def runs_its_backward_on_other_streams(model, net, x, dy):
    if not x.is_cuda:
        return _first_derivatives(model, net, x, dy)
    with side_streams():
        y = model(x)
    y.backward(dy)
    return [y, x.grad]


def runs_beside_another_current_device(model, net, x, dy):
    with torch.cuda.device(DEVICES[-1]):
        return _first_derivatives(model, net, x, dy)


def runs_beside_a_default_device(model, net, x, dy):
    with torch.device(DEVICES[-1]):
        return _first_derivatives(model, net, x, dy)


def takes_pinned_memory(model, net, x, dy):
    if not x.is_cuda:
        return [model(x), model(x)]
    pinned = x.detach().cpu().pin_memory()
    return [model(pinned), model(pinned.to(x.device, non_blocking=True))]


def _first_derivatives(model, net, x, dy):
    y = model(x)
    y.backward(dy)
    return [y, x.grad]


USES: dict[str, Use] = {
    use.__name__.replace("_", " "): use
    for use in (
        evaluates,
        trains_without_graph,
        trains_in_inference_mode,
        takes_second_derivatives,
        adds_gradients_of_two_graphs,
        needs_no_gradient_of_its_input,
        has_frozen_weights,
        has_frozen_biases,
        is_frozen,
        gets_an_expanded_gradient,
        takes_a_slice,
        takes_transposed_images,
        takes_large_means,
        runs_on_side_streams,
        runs_its_backward_on_other_streams,
        runs_beside_another_current_device,
        runs_beside_a_default_device,
        takes_pinned_memory,
    )
}


@every_list
@pytest.mark.parametrize("use", USES)
def test_a_use_has_the_results_of_one_device(where, use):
    assert_same_use(where, use, nn.Sequential)


@every_list
@pytest.mark.parametrize("use", [u for u in USES if u not in ("takes second derivatives",)])
def test_a_use_in_a_checkpoint_has_the_results_of_one_device(where, use):
    assert_same_use(where, use, Recomputed)


def assert_same_use(where: str, use: str, wrap: Callable[[nn.Module], nn.Module]) -> None:
    first, *_, last = devices = LISTS[where]
    plain = network(Samples((6, 4, 5)), {})
    net = convert_model(copy.deepcopy(plain)).to(first)
    model = DataParallel(wrap(net), devices, output_device=last)
    x, dy = batch(Samples((6, 4, 5)), 3 * len(devices) - 1)
    found = []
    for run, own, source, target in ((model, net, first, last), (plain, plain, "cpu", "cpu")):
        leaf = x.to(source).requires_grad_()
        results = USES[use](run, own, leaf, dy.to(target))
        named = {str(i): t for i, t in enumerate(results) if t is not None}
        found.append({**named, **gradients_of(own), **state_of(own)})
    assert_close(*found)


# -- automatic mixed precision -------------------------------------------------------------------


@every_list
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_has_the_numbers_of_one_device(where, dtype):
    """Convolutions make the inputs of the layers, in half precision."""
    devices, plain = LISTS[where], convolutions()
    net = convert_model(copy.deepcopy(plain)).to(devices[0], torch.float32)
    model = DataParallel(net, devices)
    x, dy = batch(Samples((6, 4, 5)), 4 * len(devices) - 1)

    def run(leaf: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            y = model(leaf)
        assert y.dtype == dtype
        return y

    found = step(run, net, x.to(devices[0], torch.float32), dy)
    # Convolutions round to half precision six times on the way to a gradient.
    assert_close(found, step(plain, plain, x, dy), tolerance=6 * torch.finfo(dtype).eps)


@every_list
def test_scaled_losses_train_as_one_device_does(where):
    devices, plain = LISTS[where], convolutions()
    net = convert_model(copy.deepcopy(plain)).to(devices[0], torch.float32)
    x, _ = batch(Samples((6, 4, 5)), 4 * len(devices))
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**24)  # too much: steps are left out
    taken = 0
    for model, own in ((DataParallel(net, devices), net), (plain, plain)):
        optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
        leaf = x.to(next(own.parameters()))
        if own is plain:
            for _ in range(taken):
                optimizer.zero_grad()
                model(leaf).square().mean().backward()
                optimizer.step()
            continue
        for _ in range(12):
            optimizer.zero_grad()
            state = copy.deepcopy(own.state_dict())
            with torch.autocast("cuda", dtype=torch.float16):
                y = model(leaf)
            scaler.scale(y.float().square().mean()).backward()
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() < before:  # as if the step had not been tried
                own.load_state_dict(state)
            else:
                taken += 1
    assert 0 < taken < 12
    assert_close(state_of(net), state_of(plain), tolerance=0.05)


# -- beside layers -------------------------------------------------------------------------------


@every_list
def test_a_criterion_on_shards_has_the_numbers_of_one_device(where):
    devices = LISTS[where]
    plain = nn.Sequential(convolutions(), nn.Flatten(), nn.Linear(120, 4).double())
    net = convert_model(copy.deepcopy(plain)).to(devices[0])
    model = DataParallel(net, devices, gather_to_one_device=False)
    criterion = DataParallelCriterion(nn.CrossEntropyLoss(), devices)
    x, _ = batch(Samples((6, 4, 5)), 3 * len(devices))
    target = torch.randint(0, 4, (len(x),))
    found = []
    for run, loss_of, own, device in (
        (model, criterion, net, devices[0]),
        (plain, F.cross_entropy, plain, "cpu"),
    ):
        leaf = x.to(device).requires_grad_()
        loss = loss_of(run(leaf), target.to(device)).mean()
        loss.backward()
        found.append({"loss": loss, "x.grad": leaf.grad, **gradients_of(own), **state_of(own)})
    assert_close(*found)


@every_list
@pytest.mark.parametrize("name", CASES)
def test_a_collective_has_the_values_and_derivatives_of_its_oracle(where, name):
    case, devices = CASES[name], LISTS[where]
    if name == "split" and len(devices) % 2:
        pytest.skip("needs pairs")
    inputs = leaves(case, len(devices))
    there = [tuple(x.to(d) for x in own) for own, d in zip(inputs, devices, strict=True)]
    outputs = in_replicas(case.call, there, devices)
    home = [tuple(y.cpu() for y in own) for own in outputs]
    others = leaves(case, len(devices))
    expected = case.oracle(others)
    for found, right in zip(home, expected, strict=True):
        torch.testing.assert_close(found, tuple(right))
    torch.testing.assert_close(derivatives(home, inputs), derivatives(expected, others))


@every_list
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int64, torch.int8])
@pytest.mark.parametrize("op", OPS)
def test_a_reduction_keeps_the_dtype(where, dtype, op):
    devices = LISTS[where]
    if op == "mean" and not dtype.is_floating_point:
        pytest.skip("integers have no mean")
    values = [torch.randint(-2, 3, (2, 3)).to(dtype) for _ in devices]
    there = [(value.to(device),) for value, device in zip(values, devices, strict=True)]
    for found in in_replicas(lambda group, x: group.all_reduce(x, op), there, devices):
        right = reduced(op, [v.double() for v in values]).to(dtype)
        torch.testing.assert_close(found.cpu(), right)


@every_list
def test_a_layer_with_pipes_of_the_older_toolkit_has_the_numbers_of_one_device(where):
    devices = LISTS[where]
    x, dy = batch(Samples((6,)), 3 * len(devices) - 1)
    net = nn.Sequential(Centering(), nn.Tanh(), Centering()).to(devices[0])
    plain = nn.Sequential(Centering(), nn.Tanh(), Centering())
    found = step(DataParallel(net, devices), net, x.to(devices[0]), dy)
    assert_close(found, step(plain, plain, x, dy))


@pytest.mark.parametrize("where", ["all", "reversed"])  # torch refuses a device twice
def test_a_patched_wrapper_of_torch_has_the_numbers_of_one_device(where):
    devices, plain = LISTS[where], network(Samples((6, 4, 5)), {})
    net = convert_model(copy.deepcopy(plain)).to(devices[0])
    model = nn.DataParallel(net, devices)
    patch_replication_callback(model)
    batches = [batch(Samples((6, 4, 5)), number) for number in (4 * len(devices) - 1, 2, 9)]
    assert_close(trained(model, net, batches, devices[0]), trained(plain, plain, batches))


@every_list
def test_unconverted_networks_compute_as_in_torchs_wrapper(where):
    devices = LISTS[where]
    plain = nn.Sequential(nn.Conv2d(6, 4, 3), nn.GroupNorm(2, 4), nn.Flatten()).double()
    net = copy.deepcopy(plain).to(devices[0])
    x, _ = batch(Samples((6, 4, 5)), 4 * len(devices) - 1)
    dy = torch.randn_like(plain(x))
    found = step(DataParallel(net, devices), net, x.to(devices[0]), dy)
    assert_close(found, step(plain, plain, x, dy))
    if len(set(devices)) == len(devices):
        torchs = step(nn.DataParallel(net, devices), net, x.to(devices[0]), dy)
        assert_close(found, {name: tensor.cpu() for name, tensor in torchs.items()}, 1e-12)


@every_list
@pytest.mark.parametrize("groups", [1, 2])
def test_groups_of_replicas_have_the_numbers_of_one_device_each(where, groups):
    devices = LISTS[where]
    size = len(devices) // groups
    layer = SynchronizedBatchNorm2d(6, group_size=size, dtype=torch.float64, device=devices[0])
    x, dy = batch(Samples((6, 4, 5)), 4 * len(devices))
    found = step(DataParallel(layer, devices), layer, x.to(devices[0]), dy)
    parts = zip(x.split(4 * size), dy.split(4 * size), strict=True)
    alone = [nn.BatchNorm2d(6).double() for _ in range(groups)]
    steps = [step(bn, bn, *part) for bn, part in zip(alone, parts, strict=True)]
    for name in ("y", "x.grad"):
        torch.testing.assert_close(found[name].cpu(), torch.cat([one[name] for one in steps]))
    for name in ("weight.grad", "bias.grad"):
        torch.testing.assert_close(found[name].cpu(), sum(one[name] for one in steps))
    torch.testing.assert_close(found["running_var"].cpu(), steps[0]["running_var"])


class Uneven(nn.Module):
    """Is wrong in replicas: it normalizes by its own shard."""

    def forward(self, x: Tensor) -> Tensor:
        return x - x.mean(0)


@every_list
@pytest.mark.parametrize("is_right", [True, False])
def test_verify_tells_right_networks_from_wrong_ones(where, is_right):
    devices = LISTS[where]
    net = nn.Sequential(convolutions(), *([] if is_right else [Uneven()]))
    x, _ = batch(Samples((6, 4, 5)), 2 * len(devices) + 1)
    assert bool(verify(convert_model(net).to(devices[0]), x, devices)) == is_right
