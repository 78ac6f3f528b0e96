"""What a synchronized layer costs on a GPU: its kernels to those of `torch.nn.SyncBatchNorm`.

    kernels     time on the GPU of the kernels that a layer runs over tensors of the size of its
                input, and between them, forward and backward, for one of several shards; to those
                that `torch.nn.SyncBatchNorm` runs for the same shard
    step        the ResNet-50-like network under `replication.DataParallel`, converted to plain

All replicas are on one device, so one GPU will do. Without any there are no figures.

    python -m benchmarks.gpu
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor, nn

from benchmarks.measuring import Row, alternating, replica_counts, run
from benchmarks.networks import resnet
from replication import DataParallel
from syncbn import convert_model
from syncbn.graph import Denominator, merge_shards, synchronized_batch_norm

SHAPE = (32, 256, 112, 112)

CASES = [
    (torch.float32, torch.contiguous_format),
    (torch.float32, torch.channels_last),
    (torch.float16, torch.channels_last),
    (torch.bfloat16, torch.channels_last),
]


def ours(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> None:
    """Forward and backward of a shard, whose group is itself."""
    y, _ = synchronized_batch_norm(
        x, weight, bias, Denominator(1e-5), lambda shard: merge_shards([shard])[0]
    )
    torch.autograd.grad(y, (x, weight, bias), dy)  # which adds to no gradient of before


def theirs(x: Tensor, dy: Tensor, weight: Tensor, bias: Tensor) -> None:
    """The kernels that `torch.nn.SyncBatchNorm` runs for a shard, one after the other."""
    x = x.detach()
    values = x.numel() // x.size(1)
    mean, inverse = torch.batch_norm_stats(x, 1e-5)
    counts = mean.new_full((1,), values)
    mean, inverse = torch.batch_norm_gather_stats_with_counts(
        x, mean[None], inverse[None], None, None, 0.1, 1e-5, counts
    )
    torch.batch_norm_elemt(x, weight, bias, mean, inverse, 1e-5)
    sums = torch.batch_norm_backward_reduce(dy, x, mean, inverse, weight, True, True, True)
    torch.batch_norm_backward_elemt(
        dy, x, mean, inverse, weight, sums[0], sums[1], counts.to(torch.int32)
    )


def finished(function: Callable[[], None]) -> None:
    """Calls it and waits for the GPU."""
    function()
    torch.cuda.synchronize()


def kernels(dtype: torch.dtype, layout: torch.memory_format, steps: int, quick: bool) -> float:
    shape = (2, 3, 4, 4) if quick else SHAPE
    x, dy = (torch.randn(shape).to("cuda", dtype, memory_format=layout) for _ in range(2))
    weight, bias = torch.rand(2, shape[1], device="cuda").unbind()
    args = (x.requires_grad_(), dy, weight.requires_grad_(), bias.requires_grad_())
    one, other = alternating(
        [partial(finished, partial(way, *args)) for way in (ours, theirs)], steps
    )
    return one / other


def step(replicas: int, steps: int, quick: bool) -> float:
    """The median time of a step of synchronized replicas to that of plain ones."""
    samples, size = (2, 32) if quick else (32, 224)
    images = torch.randn(samples * replicas, 3, size, size, device="cuda")
    classes = torch.arange(samples * replicas, device="cuda") % 10
    models = [
        DataParallel(net.cuda(), ["cuda:0"] * replicas)
        for net in (convert_model(resnet(16 if quick else 64)), resnet(16 if quick else 64))
    ]

    def trained(model: nn.Module) -> None:
        nn.functional.cross_entropy(model(images), classes).backward()

    one, other = alternating([partial(finished, partial(trained, m)) for m in models], steps)
    return one / other


def rows(steps: int, quick: bool = False) -> Iterator[Row]:
    if not torch.cuda.is_available():
        yield Row("gpu", "no CUDA device here", {})
        return
    for dtype, layout in CASES:
        name = f"kernels, {dtype}, {layout}".replace("torch.", "")
        # Of one shard, however many there are.
        yield Row("gpu", name, {2: kernels(dtype, layout, steps, quick)}, goal=1.0)
    figures = {n: step(n, steps, quick) for n in replica_counts(quick)}
    yield Row("gpu", "step, converted, to plain BatchNorm", figures, goal=1.03)


if __name__ == "__main__":
    raise SystemExit(run(rows, __doc__))
