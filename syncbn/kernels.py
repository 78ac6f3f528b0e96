"""Per-device tensor kernels of batch normalization. Torch only; they know no replicas.

Notation. ``x`` is ``(N, C, ...)``; a channel has ``n = x.numel() / C`` values. Per-channel
quantities are vectors of length C in float64, which costs nothing at their size, on the device of
``x``, or on the CPU if that device has no float64. What has the size of ``x`` is computed in the
*accumulation dtype*: float64 for float64, float32 for everything else.

Numerical promises
    * Moments are centered sums (two-pass, corrected; Chan, Golub & LeVeque, «Algorithms for
      Computing the Sample Variance», The American Statistician 37, 1983, eq. 1.7), never
      ``E[x^2] - E[x]^2``: the variance is not negative and does not suffer from a large mean.
    * Nor does anything else: ``x - mean`` is formed before it is scaled, and the mean enters in
      two parts, its rounding to the accumulation dtype and the rest (see `two_parts`).
    * float16 and bfloat16 inputs are summed in float32.
    * An empty ``x`` is fine everywhere (torch's native kernels crash on it).
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__: list[str] = []


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of ``dtype`` are summed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def has_float64(device: torch.device) -> bool:
    """Whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def statistics_device(device: torch.device) -> torch.device:
    """Where the per-channel quantities are of what is on ``device``."""
    return device if has_float64(device) else torch.device("cpu")


def values_per_channel(x: Tensor) -> int:
    """How many values each channel has."""
    return x.numel() // x.size(1) if x.size(1) else 0


def reduced_dims(x: Tensor) -> list[int]:
    """All dimensions but that of the channels."""
    return [0, *range(2, x.dim())]


def per_channel(vector: Tensor, like: Tensor) -> Tensor:
    """Shapes a vector of length C so that it broadcasts against ``like``, in its computations."""
    vector = vector.to(like.device, accumulation_dtype(like.dtype))
    return vector.view(1, -1, *[1] * (like.dim() - 2))


def two_parts(vector: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """A float64 vector as the sum of its rounding to ``dtype`` and a small rest, in float64."""
    head = vector.to(dtype).double()
    return head, vector - head


def channel_sums(x: Tensor) -> Tensor:
    """The sum of each channel: within samples in the accumulation dtype, over them in float64.

    Of ``(N, C)``, where a sample has one value, over them in the accumulation dtype, too.
    """
    dtype, home = accumulation_dtype(x.dtype), statistics_device(x.device)
    if x.dim() == 2:
        return x.sum(0, dtype=dtype).to(home).double()
    return x.sum(list(range(2, x.dim())), dtype=dtype).to(home).sum(0, dtype=torch.float64)


def moments(x: Tensor) -> Tensor:
    """Mean and biased variance of each channel.

    Returns:
        ``(2, C)`` in float64: means, variances; zeros if ``x`` is empty.
    """
    n = values_per_channel(x)
    if n == 0:
        home = statistics_device(x.device)
        return torch.zeros(2, x.size(1), dtype=torch.float64, device=home)
    head, _ = two_parts(channel_sums(x) / n, accumulation_dtype(x.dtype))
    centered = x - per_channel(head, x)
    # What the rounding of the mean has left in the centered values.
    rest = channel_sums(centered) / n
    variance = (channel_sums(centered.square_()) / n - rest.square()).clamp_(min=0)
    # Of infinite values the mean is infinite, and nothing else is a number.
    return torch.stack((torch.where(head.isinf(), head, head + rest), variance))


def normalize(x: Tensor, mean: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    """``(x - mean) * scale + bias``, in the dtype and layout of ``x``."""
    head, rest = two_parts(mean, accumulation_dtype(x.dtype))
    shift = -rest * scale if bias is None else bias.to(mean.device) - rest * scale
    y = x - per_channel(head, x)
    return y.mul_(per_channel(scale, x)).add_(per_channel(shift, x)).to(x.dtype)


def reduce(dy: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> Tensor:
    """The two sums of the backward pass.

    Returns:
        ``(2, C)`` in float64: the sums of ``dy`` and of ``dy * x_hat``, with
        ``x_hat = (x - mean) * inverse``.
    """
    if x.numel() == 0:
        return torch.zeros_like(mean).expand(2, -1)
    dtype = accumulation_dtype(x.dtype)
    head, rest = two_parts(mean, dtype)
    center = head.to(x.device, dtype)
    one = torch.ones_like(center)
    # As parameter gradients, torch's batch norm in evaluation mode returns the sums of
    # dy * (x - running_mean) / sqrt(running_var) and of dy, fused. Its CUDA kernel takes the
    # device and dtype of the sums from the weight, and may look for the saved moments.
    _, along_x, plain = torch.ops.aten.native_batch_norm_backward(
        dy.to(dtype),
        x.to(dtype),
        one,
        center,
        one,
        center,
        one,
        False,
        0.0,
        [False, True, True],
    )
    plain, along_x = (sums.to(mean.device) for sums in (plain, along_x))
    return torch.stack((plain, (along_x - rest * plain) * inverse))


def input_gradient(
    dy: Tensor | None, x: Tensor, mean: Tensor, scale: Tensor, slope: Tensor, offset: Tensor
) -> Tensor:
    """``scale * dy + slope * (x - mean) + offset``, in the dtype and layout of ``x``.

    ``dy`` is None where an output is unused.
    """
    head, rest = two_parts(mean, accumulation_dtype(x.dtype))
    dx = x - per_channel(head, x)
    dx.mul_(per_channel(slope, x)).add_(per_channel(offset - slope * rest, x))
    if dy is not None:
        dx.addcmul_(dy, per_channel(scale, x))
    return dx.to(x.dtype)


def merge(counts: Tensor, stats: Tensor) -> Tensor:
    """Mean and biased variance of the union of several sets, from those of the sets.

    Chan, Golub & LeVeque, «Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances», 1979. Sets may be empty; of all of them together mean and variance are then 0.

    Args:
        counts: ``(n, 1)``, values per channel of each set.
        stats: ``(n, 2, C)``, their means and variances.

    Returns:
        ``(2, C)``.
    """
    share = counts / counts.sum().clamp(min=1)
    means, variances = stats.unbind(1)
    mean = (share * means).sum(0)
    return torch.stack((mean, (share * (variances + (means - mean).square())).sum(0)))
