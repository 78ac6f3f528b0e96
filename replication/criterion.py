"""`DataParallelCriterion`: a loss on the devices of the outputs, with one device's value."""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from torch import Tensor, nn

from replication.checks import check_module
from replication.data_parallel import DataParallel
from replication.devices import DeviceLike
from replication.groups.base import describe_argument

__all__ = ["DataParallelCriterion"]

#: Losses whose mean is weighted by the classes of the targets, and leaves out ``ignore_index``.
_OF_CLASSES = (nn.CrossEntropyLoss, nn.NLLLoss)


class DataParallelCriterion(DataParallel[nn.Module]):
    """Computes a loss where the outputs are, so that no device has to hold all outputs.

    The loss and its gradients match those of one device that sees the whole batch.

    >>> import torch
    >>> from torch import nn
    >>> from replication import DataParallel, DataParallelCriterion
    >>> net = DataParallel(nn.Linear(3, 2), ["cpu"] * 2, gather_to_one_device=False)
    >>> criterion = DataParallelCriterion(nn.CrossEntropyLoss(), ["cpu"] * 2)
    >>> x, labels = torch.randn(5, 3), torch.tensor([0, 1, 1, 0, 1])
    >>> loss = criterion(net(x), labels)  # the labels are split like the outputs
    >>> torch.testing.assert_close(loss, nn.functional.cross_entropy(net.module(x), labels))

    Args:
        criterion: A loss of torch with ``reduction="mean"`` or ``"sum"``, or your own module that
            returns two scalar tensors: the sum of the losses of its samples, and the weight of
            these samples, such as their number. The loss is the sum of the first over the
            replicas, divided by the sum of the second, or undivided if the second is None.
        device_ids: The devices of the outputs (see `DataParallel`).
        output_device: The device of the loss, by default ``device_ids[0]``.
        dim: The batch dimension of outputs and targets.

    Raises:
        ValueError: See `DataParallel`, or a loss of torch has another reduction.
        TypeError: See `DataParallel`. In a call: your own module returns something else.
    """

    def __init__(
        self,
        criterion: nn.Module,
        device_ids: Sequence[DeviceLike] | None = None,
        output_device: DeviceLike | None = None,
        dim: int = 0,
    ) -> None:
        check_module(criterion)
        super().__init__(_Share(criterion), device_ids, output_device, dim)

    def forward(self, *inputs: Any, **kwargs: Any) -> Tensor:
        total, weight = super().forward(*inputs, **kwargs)
        if isinstance(weight, list):  # which cannot be joined
            got = " and ".join(map(describe_argument, weight))
            raise TypeError(
                f"{type(self.module.criterion).__name__} must return a weight in every replica, "
                f"or None in every replica (got {got})"
            )
        return total.sum() if weight is None else total.sum() / weight.sum()  # type: ignore[no-any-return]


class _Share(nn.Module):
    """Computes the sum and the weight of the losses of one replica."""

    def __init__(self, criterion: nn.Module) -> None:
        super().__init__()
        #: None if the criterion returns both itself. One of torch returns one loss per sample.
        self.reduction: str | None = None
        if type(criterion).__module__ == "torch.nn.modules.loss":
            self.reduction = getattr(criterion, "reduction", None)
            known = ("sum",) if isinstance(criterion, nn.CTCLoss) else ("mean", "sum")
            if self.reduction not in known:
                raise ValueError(
                    f"reduction of {type(criterion).__name__} must be "
                    f"{' or '.join(map(repr, known))} (got {self.reduction!r}); for another, pass "
                    "a module that returns the sum and the weight of the losses of its samples"
                )
            criterion = copy(criterion)
            criterion.reduction = "none"  # type: ignore[assignment]
        self.criterion: Any = criterion

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        share: Any = self.criterion(*args, **kwargs)
        if self.reduction is not None:
            # A sum of float16 may overflow.
            total = share.sum(dtype=torch.promote_types(share.dtype, torch.float32))
            return total, None if self.reduction == "sum" else self._divisor(share, args, kwargs)
        match share:
            case tuple((Tensor(ndim=0), None | Tensor(ndim=0))):
                return share
        got = map(describe_argument, share if isinstance(share, tuple) and share else [share])
        raise TypeError(
            f"{type(self.criterion).__name__} must return a pair of scalar tensors: the sum of "
            f"the losses, and the weight of the samples or None (got {' and '.join(got)})"
        )

    def _divisor(self, losses: Tensor, args: Any, kwargs: Any) -> Tensor:
        is_of_classes = isinstance(self.criterion, _OF_CLASSES)
        target = (kwargs["target"] if "target" in kwargs else args[1]) if is_of_classes else None
        if target is None or target.is_floating_point():  # probabilities of classes
            return losses.new_full((), losses.numel(), dtype=torch.int64)
        counted: Tensor = target.ne(self.criterion.ignore_index)
        weight: Tensor | None = self.criterion.weight
        if weight is None:
            return counted.sum()
        # As int64, because torch takes an index in uint8 for a mask.
        return (weight[target.long() * counted] * counted).sum()
