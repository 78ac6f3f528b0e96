"""What the cases on CUDA devices have in common: networks, batches, a step, and the tolerance.

A case is compared with `torch.nn.BatchNorm` on the CPU in float64, which sees the whole batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from tests.kit.layers import LAYERS

#: The CUDA devices of this machine.
DEVICES = [f"cuda:{i}" for i in range(torch.cuda.device_count())]


def skip_file_without(number: int) -> None:
    """Skips a whole test file on a machine with fewer CUDA devices."""
    if len(DEVICES) < number:
        pytest.skip(f"needs CUDA devices, at least {number}", allow_module_level=True)


class Precision(NamedTuple):
    """The dtype of inputs, and of parameters and buffers."""

    inputs: torch.dtype
    weights: torch.dtype


DOUBLE = Precision(torch.float64, torch.float64)
PRECISIONS = [
    Precision(torch.float32, torch.float32),
    *(Precision(half, w) for half in (torch.float16, torch.bfloat16) for w in (half, torch.float)),
]


class Samples(NamedTuple):
    """The shape of one sample, ``(C, ...)``, and the memory format of batches."""

    shape: tuple[int, ...]
    format: torch.memory_format = torch.contiguous_format

    @property
    def dims(self) -> int:
        return max(1, len(self.shape) - 1)


SAMPLES = [
    Samples((6,)),
    Samples((6, 5)),
    Samples((6, 4, 5)),
    Samples((6, 4, 5), torch.channels_last),
    Samples((6, 2, 3, 2)),
    Samples((6, 2, 3, 2), torch.channels_last_3d),
]

#: Of layers.
OPTIONS: list[dict[str, Any]] = [
    {},
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.0},
]

#: The sizes of the shards of k copies, which a case may choose freely.
SIZES: dict[str, Callable[[int], list[int]]] = {
    "even": lambda k: [4] * k,
    "uneven": lambda k: [2 + i for i in range(k)],
    "very uneven": lambda k: [1] * (k - 1) + [9],
    "last empty": lambda k: [4] * (k - 1) + [0],
    "first empty": lambda k: [0] + [4] * (k - 1),
    "all but the last empty": lambda k: [0] * (k - 1) + [5],
}


def layer(samples: Samples, options: Mapping[str, Any], precision: Precision) -> nn.Module:
    """A `torch.nn.BatchNorm` with random parameters."""
    kind, _ = LAYERS[samples.dims]
    made = kind(samples.shape[0], **options)
    for parameter in made.parameters():
        nn.init.normal_(parameter, 1, 0.3)
    return made.to(precision.weights)


def network(samples: Samples, options: Mapping[str, Any]) -> nn.Module:
    """Two layers in float64, so that the second one's gradient depends on all copies."""
    return nn.Sequential(
        layer(samples, options, DOUBLE), nn.Tanh(), layer(samples, options, DOUBLE)
    )


def convolutions(channels: int = 6) -> nn.Module:
    """A network in float64 with convolutions around its layers."""
    return nn.Sequential(
        nn.Conv2d(channels, channels, 3, padding=1, bias=False),
        *network(Samples((channels, 4, 5)), {}),
        nn.Conv2d(channels, channels, 1),
    ).double()


def batch(
    samples: Samples, number: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor]:
    """A batch on the CPU, and the gradient of an output of this shape."""
    x, dy = torch.randn(2, number, *samples.shape, dtype=torch.float64)
    x, dy = (2 * x + 1).to(dtype), dy.to(dtype)
    return x.contiguous(memory_format=samples.format), dy


#: What a step gives and leaves behind, by name.
Step = dict[str, Tensor]


def step(model: Callable[[Tensor], Tensor], net: nn.Module, x: Tensor, dy: Tensor) -> Step:
    """Runs forward and backward of a model around a network, on the device of x."""
    x = x.detach().clone().requires_grad_()
    net.zero_grad()
    y = model(x)
    y.backward(dy.to(y))
    assert x.grad is not None
    return {"y": y.detach(), "x.grad": x.grad, **gradients_of(net), **state_of(net)}


def gradients_of(net: nn.Module) -> Step:
    return {f"{n}.grad": p.grad.clone() for n, p in net.named_parameters() if p.grad is not None}


def state_of(net: nn.Module) -> Step:
    return {name: tensor.clone() for name, tensor in net.state_dict().items()}


def assert_close(found: Step, expected: Step, tolerance: float = 1e-9) -> None:
    """Asserts that no value differs by more than a share of the largest one of its tensor."""
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        one, right = found[name].detach().cpu().double(), right.detach().double()
        assert one.shape == right.shape, name
        if right.numel():
            error = (one - right).abs().max() / right.abs().max().clamp(min=1e-3)
            assert error <= tolerance, f"{name} differs by {error:.2g}, relative to its largest"


def assert_as_accurate(found: Step, expected: Step, torchs: Step, x: Tensor) -> None:
    """Asserts that an error is at most twice the error of torch's layer, plus one ulp.

    ``torchs`` is what `torch.nn.BatchNorm` gives in the same precision, from the whole batch x.
    """
    assert found.keys() == expected.keys()
    for name, right in expected.items():
        assert found[name].dtype == torchs[name].dtype, name
        one, own, right = (t.cpu().double() for t in (found[name], torchs[name], right))
        # For a mean near zero, the ulp of the values that it is the mean of counts.
        scale = x.double() if name == "running_mean" else right
        if not right.numel():
            continue
        eps = torch.finfo(torchs[name].dtype).eps if found[name].is_floating_point() else 0.0
        allowed = 2 * (own - right).abs().max() + eps * scale.abs().max()
        error = (one - right).abs().max()
        assert error <= allowed, f"{name} has an error of {error:.2g}, allowed: {allowed:.2g}"


@contextlib.contextmanager
def side_streams() -> Iterator[None]:
    """Makes a new stream current on every device, ordered after and before the default ones."""
    here = torch.cuda.current_device()  # which a stream of another device changes
    streams = [torch.cuda.Stream(device) for device in DEVICES]
    with contextlib.ExitStack() as stack:
        for stream in streams:
            for device in DEVICES:
                stream.wait_stream(torch.cuda.current_stream(device))
            stack.enter_context(torch.cuda.stream(stream))
        stack.enter_context(torch.cuda.device(here))
        yield
    for stream in streams:
        for device in DEVICES:
            torch.cuda.current_stream(device).wait_stream(stream)
