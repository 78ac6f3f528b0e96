"""The arguments of a synchronized layer and of its calls, checked before another replica waits."""

from __future__ import annotations

from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from replication.extending import has_other_processes, is_dtensor, is_int
from syncbn.channels import HALF
from syncbn.statistics import Arguments, Epsilon

_DTYPES = (*HALF, torch.float32, torch.float64)
_LOCAL = (Tensor, nn.Parameter, type(None))
_TENSORS = ("weight", "bias", "running_mean", "running_var")


def check_group_size(size: int | None) -> None:
    """Raises TypeError or ValueError unless ``size`` is None or a positive int."""
    if size is not None and (not is_int(size) or size < 1):
        error, got = ValueError if is_int(size) else TypeError, f"(got {size!r})"
        by_name = "" if is_int(size) else "; pass a group of torch.distributed as process_group="
        raise error(f"group_size must be an int of at least 1, or None {got}{by_name}")


def checked_arguments(layer: Any, input: Tensor, clamps: bool = False) -> Arguments:
    """Returns the arguments of a call. Raises on those that torch's kernels would refuse.

    ``clamps`` is the eps mode: whether ``eps`` is the least variance, instead of added to it.
    """
    layer._check_input_dim(input)
    # Looked up once, because a parametrization computes a parameter at each access.
    parameters, buffers = layer._parameters, layer._buffers
    if "weight" in parameters and "bias" in parameters:
        weight, bias = parameters["weight"], parameters["bias"]
    else:  # what takes longer
        weight, bias = layer.weight, layer.bias
    dtype, features, eps, momentum = input.dtype, layer.num_features, layer.eps, layer.momentum
    for tensor in (input, weight):
        if type(tensor) not in _LOCAL and is_dtensor(tensor):
            raise TypeError(
                f"{named(layer)} takes local tensors (got a DTensor); pass x.to_local(), and "
                "for a batch sharded over one dimension of a mesh, process_group=mesh['dp']"
            )
    if input.size(1) != features:
        parallel = "; after a ColwiseParallel layer, give that output_layouts=Replicate()"
        raise ValueError(
            f"{named(layer)} expected {features} channels in dimension 1 (got size "
            f"{input.size()}){parallel if has_other_processes() else ''}"
        )
    if dtype not in _DTYPES:
        raise NotImplementedError(f"{named(layer)} is not implemented for inputs of {dtype}")
    if type(eps) is not float or not eps > 0 or not (momentum is None or type(momentum) is float):
        _check_numbers(layer)
    mean, var = buffers.get("running_mean"), buffers.get("running_var")
    device, kinds = input.device, (dtype, torch.float32) if dtype in HALF else (dtype,)
    for tensor, name in zip((weight, bias, mean, var), _TENSORS, strict=True):
        if tensor is None:
            continue
        if tensor.numel() != features:
            raise RuntimeError(f"{name} should contain {features} elements not {tensor.numel()}")
        if tensor.device != device or tensor.dtype not in kinds:
            raise RuntimeError(
                f"{named(layer)} expected an input in {tensor.dtype} on {tensor.device}, as "
                f"its {name} (got {dtype} on {device}); convert one by .to()"
            )
    return Arguments(input, weight, bias, Epsilon(eps, clamps))


def _check_numbers(layer: Any) -> None:
    """Raises unless torch's layer would take ``eps`` and ``momentum``."""
    for name in ("eps", "momentum"):
        number: Any = getattr(layer, name)
        if name == "momentum" and number is None:
            continue
        is_scalar = isinstance(number, Tensor) and not (
            number.dim() or number.is_complex() or number.requires_grad
        )
        if not isinstance(number, Real) and not is_scalar:
            raise TypeError(f"{named(layer)}: {name} must be a number (got {number!r})")
        if name == "eps" and float(number) <= 0:
            raise ValueError(f"{named(layer)}: eps must be positive (got {number!r})")
        float(number)  # an int may be too large, and a tensor may have no value


def padding_of(layer: Any, input: Tensor, mask: Tensor) -> Tensor:
    """Returns where values do not count, ``(N, 1, ...)``. Raises if the mask does not fit."""
    layer._check_input_dim(input)
    if not isinstance(mask, Tensor) or mask.dtype is not torch.bool or is_dtensor(mask):
        got = f"{type(mask).__name__}{f' of {mask.dtype}' if isinstance(mask, Tensor) else ''}"
        raise TypeError(
            f"{named(layer)} takes a mask in torch.bool, true where a value counts (got "
            f"{got}); pass mask.bool(), or ~key_padding_mask, or of lengths, "
            "torch.arange(L) < lengths[:, None]"
        )
    expected = input.shape[:1] + input.shape[2:]
    if mask.shape != expected:
        raise ValueError(
            f"{named(layer)} takes a mask of the input's size without dimension 1, "
            f"{list(expected)} (got {list(mask.shape)} for an input of {list(input.shape)}); "
            "drop a dimension of channels by mask.squeeze(1), or fill others by mask.expand"
        )
    if mask.device != input.device:
        raise RuntimeError(
            f"{named(layer)} takes a mask on {input.device}, as its input (got "
            f"{mask.device}); move it by mask.to(x.device)"
        )
    return ~mask.unsqueeze(1)


def named(layer: Any) -> str:
    """Returns the name and the class of the layer, for messages."""
    # Nothing else reads the name: `torch.compile` would compile each layer again.
    kind = type(layer).__name__
    return kind if layer._layer_name is None else f"`{layer._layer_name}` ({kind})"
