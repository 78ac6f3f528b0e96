"""The CPU's five kernels take what CUDA's take, refuse what they refuse, and return the same.

So a test on the CPU sees what a GPU would refuse. The same holds for the stand-ins of the tests,
`tests.kit.stand_in_kernels`, which may refuse more.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from syncbn.channels import accumulation_dtype
from syncbn.kernels import ON_CPU, Kernels, kernels_for
from tests.cuda.matrix import skip_file_without
from tests.kit.stand_in_kernels import AS_ON_ACCELERATORS

skip_file_without(1)
pytestmark = pytest.mark.gpu

C = 5

SHAPES: dict[str, tuple[tuple[int, ...], torch.memory_format]] = {
    "(N, C)": ((7, C), torch.contiguous_format),
    "(N, C, L)": ((3, C, 4), torch.contiguous_format),
    "(N, C, H, W)": ((3, C, 4, 2), torch.contiguous_format),
    "channels_last": ((3, C, 4, 2), torch.channels_last),
    "(N, C, D, H, W)": ((2, C, 3, 2, 2), torch.contiguous_format),
    "channels_last_3d": ((2, C, 3, 2, 2), torch.channels_last_3d),
}
DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]

#: The arguments of each kernel, by the name of its field.
ARGUMENTS = {
    "stats": ("x", "eps"),
    "gather_stats": (
        *("like", "means", "inverses", "running_mean", "running_var"),
        *("momentum", "eps", "counts"),
    ),
    "elemt": ("x", "weight", "bias", "mean", "inverse", "eps"),
    "backward_reduce": (
        *("dy", "x", "mean", "inverse", "weight"),
        *("wants_sums", "wants_dweight", "wants_dbias"),
    ),
    "backward_elemt": ("dy", "x", "mean", "inverse", "weight", "sum_dy", "sum_dy_xmu", "count"),
}


def arguments(shape: tuple[int, ...], layout: torch.memory_format, dtype: torch.dtype) -> Any:
    """Valid arguments of all kernels, by name."""
    dtype_of_vectors = accumulation_dtype(dtype)
    x, dy = (torch.randn(shape, dtype=torch.float64) + 1 for _ in range(2))
    x, dy = (t.to(dtype).contiguous(memory_format=layout) for t in (x, dy))
    vectors = torch.randn(7, C, dtype=torch.float64).to(dtype_of_vectors)
    weight, bias, mean, sum_dy, sum_dy_xmu, running_mean, other = vectors.unbind()
    inverse = 1 + other.abs()
    return {
        **{"x": x, "dy": dy, "weight": weight, "bias": bias, "mean": mean, "inverse": inverse},
        **{"sum_dy": sum_dy, "sum_dy_xmu": sum_dy_xmu, "eps": 1e-5, "momentum": 0.1},
        **{"count": torch.tensor([9, 12], dtype=torch.int32), "like": mean[:0]},
        **{"means": torch.stack((mean, bias)), "inverses": torch.stack((inverse, 2 * inverse))},
        **{"counts": torch.tensor([9.0, 12.0]).to(dtype_of_vectors)},
        **{"running_mean": running_mean, "running_var": inverse},
        **{"wants_sums": True, "wants_dweight": True, "wants_dbias": True},
    }


def replaced(name: str, change: Callable[[Any], Any]) -> Callable[[Any], None]:
    def apply(given: Any) -> None:
        given[name] = change(given[name])

    return apply


def without(*names: str) -> Callable[[Any], None]:
    return lambda given: given.update(dict.fromkeys(names))


def wanting(sums: bool, dweight: bool, dbias: bool, **others: Any) -> Callable[[Any], None]:
    wanted = {"wants_sums": sums, "wants_dweight": dweight, "wants_dbias": dbias}
    return lambda given: given.update(wanted | others)


def in_half(*names: str) -> Callable[[Any], None]:
    return lambda given: given.update({name: given[name].bfloat16() for name in names})


def in_the_inputs_dtype(*names: str) -> Callable[[Any], None]:
    return lambda given: given.update({name: given[name].to(given["x"].dtype) for name in names})


def with_buffers_in(dtype: torch.dtype, *others: str) -> Callable[[Any], None]:
    names = ("running_mean", "running_var", *others)
    return lambda given: given.update({name: given[name].to(dtype) for name in names})


def with_integers(given: Any) -> None:
    given.update({name: given[name].to(torch.int64) for name in ("x", "dy")})


def empty(given: Any) -> None:
    given.update({name: given[name][:0] for name in ("x", "dy")})


def double(tensor: Tensor) -> Tensor:
    return tensor.repeat(2, *[1] * (tensor.dim() - 1))


#: What is changed in valid arguments, by the kernels that have these arguments.
CHANGES: dict[str, dict[str, Callable[[Any], None]]] = {
    "every shard": {
        "nothing": lambda given: None,
        "an empty shard": empty,
        "integers": with_integers,
        "x of other strides": replaced("x", lambda x: torch.stack((x, x), -1)[..., 0]),
    },
    "gather_stats": {
        "nothing": lambda given: None,
        "no buffers": without("running_mean", "running_var"),
        "no running mean": without("running_mean"),
        "no running variance": without("running_var"),
        "buffers in half": with_buffers_in(torch.float16),
        "buffers and counts in half": with_buffers_in(torch.float16, "counts"),
        "all in half": with_buffers_in(torch.bfloat16, "counts", "means", "inverses"),
        "integer counts": replaced("counts", lambda t: t.int()),
        "one count too many": replaced("counts", double),
        "one mean too many": replaced("means", double),
        "a buffer too long": replaced("running_var", double),
        "one shard": lambda given: given.update(
            {name: given[name][:1] for name in ("means", "inverses", "counts")}
        ),
        "a momentum of one": replaced("momentum", lambda momentum: 1.0),
    },
    "elemt": {
        "no weight and bias": without("weight", "bias"),
        "no weight": without("weight"),
        "no bias": without("bias"),
        "parameters of the input's dtype": in_the_inputs_dtype("weight", "bias"),
        "a weight of the input's dtype": in_the_inputs_dtype("weight"),
        "a bias of the input's dtype": in_the_inputs_dtype("bias"),
        "parameters in half": in_half("weight", "bias"),
        "a mean in half": in_half("mean"),
        "a weight too long": replaced("weight", double),
        "a mean too long": replaced("mean", double),
    },
    "backward_reduce": {
        "only the sums": wanting(True, False, False),
        "only gradients": wanting(False, True, True),
        "only a bias's gradient": wanting(True, False, True),
        "only a weight's gradient": wanting(True, True, False),
        "nothing wanted": wanting(False, False, False),
        "no weight": wanting(True, True, True, weight=None),
        "no weight, only the sums": wanting(True, False, False, weight=None),
        "no weight, a bias's gradient": wanting(True, False, True, weight=None),
        "a weight of the input's dtype": in_the_inputs_dtype("weight"),
        "a weight in half": in_half("weight"),
        "a mean in half": in_half("mean"),
        "an inverse in half": in_half("inverse"),
        "dy of another dtype": in_half("dy"),
        "a longer dy": replaced("dy", double),
        "dy of other strides": replaced("dy", lambda dy: torch.stack((dy, dy), -1)[..., 0]),
        "a weight too long": replaced("weight", double),
    },
    "backward_elemt": {
        "no weight": without("weight"),
        "a weight of the input's dtype": in_the_inputs_dtype("weight"),
        "a weight in half": in_half("weight"),
        "a mean in half": in_half("mean"),
        "sums in half": in_half("sum_dy", "sum_dy_xmu"),
        "dy of another dtype": in_half("dy"),
        "a longer dy": replaced("dy", double),
        "dy of other strides": replaced("dy", lambda dy: torch.stack((dy, dy), -1)[..., 0]),
        "a count in int64": replaced("count", lambda count: count.long()),
        "a count in float32": replaced("count", lambda count: count.float()),
        "one count": replaced("count", lambda count: count[:1]),
        "a mean too long": replaced("mean", double),
    },
}

#: What CUDA's kernels take in some format, because they do not look: they read beyond the end of a
#: tensor, leave results as memory was, or promote the dtypes of a format that has no own kernel.
#: The CPU refuses it in all formats.
UNCHECKED_BY_CUDA = {
    ("stats", "an empty shard"),
    ("gather_stats", "one count too many"),
    ("gather_stats", "a buffer too long"),
    ("elemt", "a weight of the input's dtype"),
    ("elemt", "a bias of the input's dtype"),
    ("elemt", "parameters in half"),
    ("elemt", "a mean in half"),
    ("elemt", "a weight too long"),
    ("elemt", "a mean too long"),
    ("backward_reduce", "an empty shard"),
    ("backward_reduce", "a weight too long"),
    ("backward_reduce", "a longer dy"),
    ("backward_elemt", "a mean too long"),
    ("backward_elemt", "a longer dy"),
}

CASES = [
    (kernel, change)
    for kernel in ARGUMENTS
    for part in ("every shard", kernel)
    for change in CHANGES.get(part, {})
    if not (part == "every shard" and kernel == "gather_stats")
]


def moved(value: Any, device: str) -> Any:
    """A copy on a device, with the strides of its dense dimensions."""
    if not isinstance(value, Tensor):
        return value
    copy = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return copy.copy_(value)


def outcome(kernels: Kernels, kernel: str, given: Any, device: str) -> Any:
    """What a kernel returns, and the buffers afterwards, or the error that it raises."""
    args = [moved(given[name], device) for name in ARGUMENTS[kernel]]
    try:
        result = getattr(kernels, kernel)(*args)
    except (RuntimeError, NotImplementedError, AssertionError) as error:
        return error
    buffers = args[3:5] if kernel == "gather_stats" else []
    return [*(result if isinstance(result, (tuple, list)) else [result]), *buffers]


def difference(found: Any, cudas: Any, dtype: torch.dtype) -> str | None:
    """How an outcome differs from CUDA's."""
    if isinstance(found, Exception) or isinstance(cudas, Exception):
        if isinstance(found, Exception) and isinstance(cudas, Exception):
            return None
        return f"gives {brief(found)}, CUDA's gives {brief(cudas)}"
    rounding = {torch.float64: 1e-9, torch.float32: 2e-5}.get(dtype, 4 * torch.finfo(dtype).eps)
    for one, other in zip(found, cudas, strict=True):
        if (one is None) != (other is None) or (one is not None and one.shape != other.shape):
            return f"returns {brief(found)}, CUDA's returns {brief(cudas)}"
        if one is None:
            continue
        # Vectors of the CPU may stay in float64, so that their merge loses nothing.
        if one.dtype not in (other.dtype, torch.float64):
            return f"returns {one.dtype}, CUDA's returns {other.dtype}"
        scale = other.abs().max().double().item() if other.numel() else 0.0
        error = (one.double() - other.cpu().double()).abs().max().item() if other.numel() else 0.0
        if error > rounding * max(scale, 1.0):
            return f"differs by {error:.2g}"
    return None


def brief(result: Any) -> str:
    if isinstance(result, Exception):
        return f"{type(result).__name__}: {str(result).partition(chr(10))[0][:80]}"
    return str([None if t is None else (tuple(t.shape), t.dtype) for t in result])


@pytest.mark.filterwarnings("ignore:var_mean")  # by the simulated kernel, of an empty shard
@pytest.mark.parametrize(("kernel", "change"), CASES)
def test_the_cpu_takes_refuses_and_returns_what_cuda_does(kernel, change):
    of_cuda = kernels_for("cuda")
    assert of_cuda is not None
    wrong, seen = [], []
    for (name, (shape, layout)), dtype in product(SHAPES.items(), DTYPES):
        given = arguments(shape, layout, dtype)
        {**CHANGES["every shard"], **CHANGES.get(kernel, {})}[change](given)
        cudas = outcome(of_cuda, kernel, given, "cuda")
        seen.append(cudas)
        ours = outcome(ON_CPU, kernel, given, "cpu")
        is_stricter = isinstance(ours, Exception) and (kernel, change) in UNCHECKED_BY_CUDA
        # The CPU takes float64 beside buffers of any dtype, because it makes such moments.
        is_wider = dtype == torch.float64 and change in (
            "buffers in half",
            "buffers and counts in half",
        )
        if not (is_stricter or is_wider) and (text := difference(ours, cudas, dtype)):
            wrong.append(f"{name}, {dtype}: the CPU's {text}")
        stand_in = outcome(AS_ON_ACCELERATORS, kernel, given, "cpu")
        if isinstance(cudas, Exception) and not isinstance(stand_in, Exception):
            wrong.append(f"{name}, {dtype}: the stand-in takes what raises {brief(cudas)}")
        elif not isinstance(stand_in, Exception) and (text := difference(stand_in, cudas, dtype)):
            wrong.append(f"{name}, {dtype}: the stand-in {text}")
        elif isinstance(stand_in, Exception) and change == "nothing":
            wrong.append(f"{name}, {dtype}: the stand-in refuses: {stand_in}")
    torch.cuda.synchronize()
    assert not wrong, "\n".join(wrong)
    if change == "nothing":
        assert not any(isinstance(result, Exception) for result in seen)
