"""What each rank computes, and compares with one CPU device in float64."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from replication import ProcessGroup
from syncbn import SynchronizedBatchNorm2d, convert_model, verify
from tests.cuda.matrix import (
    SIZES,
    Precision,
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
    state_of,
    step,
)
from tests.kit.collectives import CASES, leaves, reduced
from tests.kit.layers import Recomputed

IMAGES = Samples((6, 4, 5))


def ddp(net: nn.Module, **options: Any) -> nn.Module:
    return DistributedDataParallel(net, device_ids=[torch.cuda.current_device()], **options)


#: How a rank wraps its network.
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "alone": lambda net: net,
    "DDP": ddp,
    "DDP, static graph, bucket views": lambda net: ddp(
        net, static_graph=True, gradient_as_bucket_view=True
    ),
    "DDP, searches unused": lambda net: ddp(net, find_unused_parameters=True),
}

#: How its layers are synchronized.
CONVERSIONS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "syncbn": convert_model,
    "nn.SyncBatchNorm": nn.SyncBatchNorm.convert_sync_batchnorm,
}


def own_part(sizes: Sequence[int]) -> slice:
    """The samples of this rank."""
    rank = distributed.get_rank()
    return slice(sum(sizes[:rank]), sum(sizes[: rank + 1]))


def total(tensor: Tensor) -> Tensor:
    """The sum over the ranks, in float64."""
    result = tensor.detach().double().clone()
    distributed.all_reduce(result)
    return result.cpu()


def of_the_batch(found: Step, wrap: str) -> Step:
    """The gradients of parameters as they are of the whole batch."""
    size = distributed.get_world_size()

    def whole(grad: Tensor) -> Tensor:
        if hasattr(grad, "full_tensor"):
            grad = grad.full_tensor()
        # Wrappers average over the ranks.
        return total(grad) if wrap == "alone" else grad.double() * size

    return {
        name: whole(t).to(t.dtype) if name.endswith(".grad") and name != "x.grad" else t
        for name, t in found.items()
    }


def shard_of(expected: Step, part: slice) -> Step:
    """What this rank has of a step of the whole batch."""
    return {name: t[part] if name in ("y", "x.grad") else t for name, t in expected.items()}


def as_accurate(
    precision: Precision, samples: Samples, options: dict[str, Any], split: str, conversion: str
) -> None:
    sizes = SIZES[split](distributed.get_world_size())
    plain = layer(samples, options, precision)
    net = CONVERSIONS[conversion](copy.deepcopy(plain)).cuda()
    x, dy = batch(samples, sum(sizes), precision.inputs)
    exact = copy.deepcopy(plain).double()
    expected = step(exact, exact, x.double(), dy.double())
    own = plain.cuda()
    torchs = step(own, own, x.cuda(), dy.cuda())
    part = own_part(sizes)
    found = of_the_batch(step(net, net, x[part].cuda(), dy[part]), "alone")
    if options == {"momentum": None}:  # see `test_replicas`
        expected.pop("running_var"), found.pop("running_var")
    assert_as_accurate(found, shard_of(expected, part), shard_of(torchs, part), x)


def trains(
    wrap: str, samples: Samples, options: dict[str, Any], split: str, conversion: str = "syncbn"
) -> None:
    trains_like(network(samples, options), wrap, samples, split, CONVERSIONS[conversion])


def trains_like(
    plain: nn.Module,
    wrap: str,
    samples: Samples,
    split: str,
    convert: Callable[[nn.Module], nn.Module] = convert_model,
) -> None:
    """Three steps of training."""
    size = distributed.get_world_size()
    sizes = SIZES[split](size)
    net = convert(copy.deepcopy(plain)).cuda()
    inner = net.net if isinstance(net, Recomputed) else net
    model, part = WRAPS[wrap](net), own_part(sizes)
    optimizers = [
        torch.optim.SGD(n.parameters(), lr=0.05) for n in (inner, plain) if list(n.parameters())
    ]
    for _ in range(3):
        x, dy = batch(samples, sum(sizes))
        found = of_the_batch(step(model, inner, x[part].cuda(), dy[part]), wrap)
        assert_close(found, shard_of(step(plain, plain, x, dy), part))
        for parameter, name in zip(inner.parameters(), gradients_of(inner), strict=True):
            parameter.grad = found[name].to(parameter)
        for optimizer in optimizers:
            optimizer.step()


def trains_in_a_checkpoint(wrap: str, is_reentrant: bool, streams: bool) -> None:
    with side_streams() if streams else contextlib.nullcontext():
        trains_like(
            network(IMAGES, {}),
            wrap,
            IMAGES,
            "uneven",
            lambda net: Recomputed(convert_model(net), is_reentrant),
        )


def trains_on_side_streams(wrap: str) -> None:
    with side_streams():
        trains_like(convolutions(), wrap, IMAGES, "uneven")


def trains_beside_another_current_device(wrap: str) -> None:
    plain, size = network(IMAGES, {}), distributed.get_world_size()
    net = convert_model(copy.deepcopy(plain)).cuda()
    here = torch.device("cuda", torch.cuda.current_device())
    model = WRAPS[wrap](net)
    sizes = SIZES["uneven"](size)
    part = own_part(sizes)
    x, dy = batch(IMAGES, sum(sizes))
    with torch.cuda.device((here.index + 1) % torch.cuda.device_count()):
        found = of_the_batch(step(model, net, x[part].to(here), dy[part]), wrap)
    assert_close(found, shard_of(step(plain, plain, x, dy), part))


def evaluates(wrap: str) -> None:
    plain = network(IMAGES, {}).eval()
    net = convert_model(copy.deepcopy(plain)).cuda()
    model = WRAPS[wrap](net).eval()
    sizes = SIZES["uneven"](distributed.get_world_size())
    part = own_part(sizes)
    x, dy = batch(IMAGES, sum(sizes))
    found = of_the_batch(step(model, net, x[part].cuda(), dy[part]), wrap)
    assert_close(found, shard_of(step(plain, plain, x, dy), part))


def trains_without_graph(mode: Callable[[], Any]) -> None:
    plain = network(IMAGES, {})
    net = convert_model(copy.deepcopy(plain)).cuda()
    sizes = SIZES["uneven"](distributed.get_world_size())
    part = own_part(sizes)
    x, _ = batch(IMAGES, sum(sizes))
    with mode():
        y = net(x[part].pin_memory().to("cuda", non_blocking=True)).clone()
    with torch.no_grad():
        right = plain(x)[part]
    assert_close({"y": y, **state_of(net)}, {"y": right, **state_of(plain)})


def takes_second_derivatives(options: dict[str, Any], split: str) -> None:
    plain = network(IMAGES, options)
    net = convert_model(copy.deepcopy(plain)).cuda()
    sizes = SIZES[split](distributed.get_world_size())
    part = own_part(sizes)
    x, dy = batch(IMAGES, sum(sizes))
    found = []
    for model, own, up in ((net, x[part].cuda(), dy[part].cuda()), (plain, x, dy)):
        leaf = own.detach().clone().requires_grad_()
        y = model(leaf)
        (first,) = torch.autograd.grad((y.pow(3) * up).sum(), leaf, create_graph=True)
        first.square().sum().backward()
        found.append({"y": first.detach(), "x.grad": leaf.grad, **gradients_of(model)})
    ours, expected = found
    assert_close(of_the_batch(ours, "alone"), shard_of(expected, part), 1e-8)


def autocasts(wrap: str, dtype: torch.dtype) -> None:
    plain = convolutions()
    net = convert_model(copy.deepcopy(plain)).cuda().float()
    model = WRAPS[wrap](net)
    sizes = SIZES["uneven"](distributed.get_world_size())
    part = own_part(sizes)
    x, dy = batch(IMAGES, sum(sizes))

    def run(leaf: Tensor) -> Tensor:
        with torch.autocast("cuda", dtype=dtype):
            return model(leaf)  # type: ignore[no-any-return]

    found = of_the_batch(step(run, net, x[part].cuda().float(), dy[part]), wrap)
    # Convolutions round to half precision six times on the way to a gradient.
    expected = shard_of(step(plain, plain, x, dy), part)
    assert_close(found, expected, tolerance=6 * torch.finfo(dtype).eps)


def scales_losses(wrap: str) -> None:
    """All ranks leave out the same steps, because gradients are averaged before they are seen."""
    size = distributed.get_world_size()
    plain = convolutions()
    net = convert_model(copy.deepcopy(plain)).cuda().float()
    model, scaler = WRAPS[wrap](net), torch.amp.GradScaler("cuda", init_scale=256.0)
    optimizers = [torch.optim.Adam(n.parameters(), lr=0.01) for n in (net, plain)]
    x, _ = batch(IMAGES, 4 * size)
    part = own_part([4] * size)
    for _ in range(4):
        for optimizer in optimizers:
            optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            y = model(x[part].cuda().float())
        scaler.scale(y.float().square().mean()).backward()
        scaler.step(optimizers[0])
        scaler.update()
        plain(x).square().mean().backward()
        optimizers[1].step()
    assert scaler.get_scale() == 256
    assert_close(state_of(net), state_of(plain), tolerance=0.05)


def shards_parameters(dtype: torch.dtype, per_layer: bool, reduces: torch.dtype | None) -> None:
    """FSDP2, in float64 or with a policy of mixed precision."""
    size, is_exact = distributed.get_world_size(), dtype == torch.float64
    plain = convolutions(8)
    net = convert_model(copy.deepcopy(plain)).cuda()
    options: dict[str, Any] = {}
    if not is_exact:
        net = net.float()
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduces)
    if per_layer:
        for module in net:
            if list(module.parameters()):
                fully_shard(module, **options)
    model = fully_shard(net, **options)
    part = own_part([4] * size)
    samples = Samples((8, 4, 5))
    x, dy = batch(samples, 4 * size)
    own = x[part].cuda() if is_exact else x[part].cuda().float()
    found = of_the_batch(step(model, net, own, dy[part]), "FSDP2")
    found = {n: t.full_tensor() if hasattr(t, "full_tensor") else t for n, t in found.items()}
    expected = shard_of(step(plain, plain, x, dy), part)
    assert_close(found, expected, 1e-9 if is_exact else 12 * torch.finfo(dtype).eps)


def normalizes_in_groups(group_size: int, by_name: bool) -> None:
    """Ranks in groups, by `group_size` or by groups of `torch.distributed`."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    first = rank // group_size * group_size
    options: dict[str, Any] = {"group_size": group_size}
    if by_name:
        groups = [
            distributed.new_group(list(range(start, start + group_size)))
            for start in range(0, size, group_size)
        ]
        options = {"process_group": groups[rank // group_size]}
    net = SynchronizedBatchNorm2d(6, dtype=torch.float64, device="cuda", **options)
    plain = nn.BatchNorm2d(6).double()
    x, dy = batch(IMAGES, 4 * size)
    mine = slice(4 * rank, 4 * rank + 4)
    found = step(net, net, x[mine].cuda(), dy[mine])
    group = slice(4 * first, 4 * (first + group_size))
    expected = step(plain, plain, x[group], dy[group])
    inside = slice(4 * (rank - first), 4 * (rank - first) + 4)
    names = ("y", "x.grad", "running_mean", "running_var", "num_batches_tracked")
    right = shard_of(expected, inside)
    assert_close({n: found[n] for n in names}, {n: right[n] for n in names})


def collects(name: str) -> None:
    """A collective, and its first and second derivatives."""
    rank, size = distributed.get_rank(), distributed.get_world_size()
    case = CASES[name]
    group = ProcessGroup(name="here")
    own = tuple(x.detach().cuda().requires_grad_() for x in leaves(case, size)[rank])
    others = leaves(case, size)
    expected = case.oracle(others)
    outputs = case.call(group, *own)
    for found, right in zip(outputs, expected[rank], strict=True):
        torch.testing.assert_close(found.cpu(), right)
    # Of the sum over the ranks of the same function of each rank's outputs, with its own weights.
    weights = [
        torch.randn(y.shape, dtype=y.dtype, generator=torch.Generator().manual_seed(r))
        for r, ys in enumerate(expected)
        for y in ys
    ]
    flat = iter(weights)
    losses = [sum((next(flat) * y.square()).sum() for y in ys) for ys in expected]
    before = sum(len(ys) for ys in expected[:rank])
    mine = weights[before : before + len(outputs)]
    loss = sum((w.cuda() * y.square()).sum() for w, y in zip(mine, outputs, strict=True))
    grads = []
    for value, inputs in ((loss, own), (sum(losses), [x for xs in others for x in xs])):
        options = {"create_graph": True, "materialize_grads": True}
        first = torch.autograd.grad(value, inputs, **options)
        penalty = sum(g.square().sum() for g in first)
        second = torch.autograd.grad(penalty, inputs, materialize_grads=True)
        grads.append([*first, *second])
    ours, all_of_them = grads
    n = len([x for xs in others for x in xs])
    begin = sum(len(xs) for xs in others[:rank])
    theirs = [all_of_them[k + begin + i] for k in (0, n) for i in range(len(own))]
    for found, right in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found.cpu(), right)


def reduces(op: str, dtype: torch.dtype) -> None:
    size, rank = distributed.get_world_size(), distributed.get_rank()
    values = [torch.randint(-2, 3, (2, 3)).to(dtype) for _ in range(size)]
    found = ProcessGroup(name="here").all_reduce(values[rank].cuda(), op)
    right = reduced(
        op, [v.to(torch.complex128 if v.is_complex() else torch.float64) for v in values]
    )
    torch.testing.assert_close(found.cpu(), right.to(dtype))


def moves(dtype: torch.dtype) -> None:
    """Collectives that compute nothing, on dtypes that backends lack."""
    size, rank = distributed.get_world_size(), distributed.get_rank()
    values = [torch.randint(0, 2, (r, 2)).to(dtype) for r in range(size)]
    group = ProcessGroup(name="here")
    for found, right in zip(group.all_gather(values[rank].cuda()), values, strict=True):
        torch.testing.assert_close(found.cpu(), right)
    last = torch.randint(0, 2, (3,)).to(dtype)
    own = last if rank == size - 1 else torch.zeros_like(last)
    torch.testing.assert_close(group.broadcast(own.cuda(), size - 1).cpu(), last)
    objects = group.all_gather_object({"rank": rank})
    assert list(objects) == [{"rank": other} for other in range(size)]
    group.barrier()


def verifies(wrap: str, is_right: bool) -> None:
    size = distributed.get_world_size()
    net = convert_model(convolutions())
    if not is_right:
        net[1] = nn.BatchNorm2d(6).double()
    x, _ = batch(IMAGES, 2 * size + 1)
    wrapper = None if wrap == "alone" else WRAPS[wrap]
    assert bool(verify(net.cuda(), x, wrap=wrapper)) == is_right
