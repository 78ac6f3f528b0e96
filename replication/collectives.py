"""The differentiable collectives of `torch.distributed`, whichever this release of torch keeps.

Three are enough: sum, gather, and exchange. All take contiguous tensors of dtypes that the backend
knows; gradients are theirs, too, so a backward is a collective that all ranks must take part in.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, distributed

from replication.torch_internals import (
    collective_functions,
    collective_operators,
    has_differentiable_collectives,
)

__all__: list[str] = []


class Collectives(Protocol):
    """Between the ranks of a `torch.distributed.ProcessGroup`."""

    def all_reduce(self, tensor: Tensor, group: Any) -> Tensor:
        """The sum of all ranks' tensors."""

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """All ranks' tensors, of one shape, concatenated."""

    def all_to_all(self, tensor: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        """Rows from all ranks, concatenated, for rows that all ranks get.

        Args:
            tensor: Rows for rank 0, for rank 1, ...
            sent: How many for each.
            got: How many there are from each.
            group: The ranks.
        """


class CollectiveOperators:
    """By the operators of torch's functional collectives, differentiable since its release 2.11.

    The functions around them are left out: in their first call they import torch's compiler, which
    takes a second, and `torch.distributed.nn`, whose default arguments keep the process group, and
    its threads, until Python ends.
    """

    def all_reduce(self, tensor: Tensor, group: Any) -> Tensor:
        """See `Collectives`."""
        return _waited(collective_operators.all_reduce(tensor, "sum", group.group_name))

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """See `Collectives`."""
        gathered = collective_operators.all_gather_into_tensor(
            tensor, group.size(), group.group_name
        )
        return _waited(gathered)

    def all_to_all(self, tensor: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        """See `Collectives`."""
        received = collective_operators.all_to_all_single(tensor, got, sent, group.group_name)
        return _waited(received)


def _waited(tensor: Tensor) -> Tensor:
    return collective_operators.wait_tensor(tensor)  # type: ignore[no-any-return]


class CollectiveFunctions:
    """By the autograd Functions of `torch.distributed.nn.functional`, for older releases."""

    def __init__(self, functions: Any = collective_functions) -> None:
        self._functions = functions

    def all_reduce(self, tensor: Tensor, group: Any) -> Tensor:
        """See `Collectives`."""
        op = distributed.ReduceOp.SUM
        return self._functions._AllReduce.apply(op, group, tensor)  # type: ignore[no-any-return]

    def all_gather(self, tensor: Tensor, group: Any) -> Tensor:
        """See `Collectives`."""
        return torch.cat(self._functions._AllGather.apply(group, tensor))

    def all_to_all(self, tensor: Tensor, sent: list[int], got: list[int], group: Any) -> Tensor:
        """See `Collectives`."""
        output = tensor.new_empty(sum(got), *tensor.shape[1:])
        return self._functions._AlltoAllSingle.apply(group, output, got, sent, tensor)  # type: ignore[no-any-return]


def differentiable_collectives() -> Collectives:
    """Those of this torch."""
    return CollectiveOperators() if has_differentiable_collectives() else CollectiveFunctions()
