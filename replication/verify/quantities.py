"""What `verify` records and compares: tensors, with their kind and their name."""

from __future__ import annotations

from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from replication._torch import is_dtensor
from replication.tree import flatten

#: The kinds that are compared, in the order in which they are computed. If the output of a layer
#: differs, the output of the model differs as well if it matters.
BEGIN, LAYERS, OUTPUTS = "values before the step", "outputs of layers", "outputs"
GRADIENTS, BUFFERS = "gradients", "buffers"
#: Not compared, because a rank's may be its share, its mean, or the loss of the whole batch.
LOSSES = "losses"
#: Whether the step has changed a buffer.
CHANGES = "changes of buffers"
#: Which layers draw random numbers. There is one if anything does.
DRAWS = "random numbers"


def of_term(name: str) -> str:
    """The kind of the gradients of one term of a loss."""
    return f"{GRADIENTS} of term `{name}`"


class Quantity(NamedTuple):
    """What a recorded tensor is."""

    kind: str
    #: Its name in results, such as "output of `norm` (BatchNorm1d)".
    where: str
    #: Whether it is a gradient of a parameter, to which all ranks contribute.
    of_parameter: bool = False
    #: Whether a layer has computed it that treats each sample alone.
    of_samples: bool = False


#: A quantity in each replica or rank.
Parts = dict[int, Tensor]
#: The outputs of layers are in the order of calls.
Quantities = dict[Quantity, Parts]


def joined(parts: Parts, shape: torch.Size) -> Tensor | None:
    """Joins parts in the dimension, if there is one, in which they add up to a shape."""
    for dim in range(len(shape)):
        with suppress(RuntimeError, IndexError):  # the parts differ in another dimension
            whole = torch.cat([parts[index] for index in sorted(parts)], dim)
            if whole.shape == shape:
                return whole
    return None


def has_fractions(tensor: Tensor) -> bool:
    return tensor.is_floating_point() or tensor.is_complex()


def tensors_of(tree: Any) -> dict[str, Tensor]:
    return {str(path): leaf for path, leaf in flatten(tree)[0] if isinstance(leaf, Tensor)}


def plain(tensor: Tensor) -> Tensor:
    """Copies a tensor to the CPU. All ranks must do so with one that `fully_shard` has split."""
    whole: Any = tensor.full_tensor() if is_dtensor(tensor) else tensor  # type: ignore[attr-defined]
    return whole.detach().to_dense().to("cpu", copy=True)  # type: ignore[no-any-return]
