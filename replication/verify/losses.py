"""What `verify` needs of a loss: one number, in its dtype, of parameters that it can compare."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from replication.errors import add_note
from replication.texts import first_of


def check_scalar(value: Any, what: str) -> None:
    if not isinstance(value, Tensor) or value.numel() != 1:
        got = tuple(value.shape) if isinstance(value, Tensor) else type(value).__name__
        raise ValueError(
            f"{what} must be a tensor of one number (got {got}); return its mean or its sum, or a "
            "mapping of named terms"
        )


@contextmanager
def noting_dtypes(dtype: torch.dtype) -> Iterator[None]:
    """Notes at an error about dtypes in a ``with`` block, in which a loss runs, what to do."""
    try:
        yield
    except Exception as error:
        # Such as "expected m1 and m2 to have the same dtype" and "expected scalar type Double".
        if re.search("dtype|scalar type", str(error)):
            name = str(dtype).removeprefix("torch.")
            add_note(
                error,
                f"verify computes in {name}: make constants of the loss with "
                "`.to(outputs.dtype)`, or pass its module as `loss=`, not a function around it",
            )
        raise


def check_parameters(value: Tensor, known: Iterable[Tensor]) -> None:
    """Raises ValueError if a loss depends on parameters that are not among the known ones.

    Nothing wraps those of a module that a function calls, and nothing would compare them.
    """
    ids = {id(tensor) for tensor in known}
    others = [
        leaf for leaf in _leaves(value) if isinstance(leaf, nn.Parameter) and id(leaf) not in ids
    ]
    if others:
        shapes = first_of([str(tuple(leaf.shape)) for leaf in others])
        raise ValueError(
            f"the loss has parameters of shapes {shapes} that are not compared: pass its module "
            "as `loss=`, not a function around it, or call requires_grad_(False) if nothing "
            "trains them. What the loss uses of the model must be among its outputs"
        )


def _leaves(value: Tensor) -> list[Tensor]:
    """The tensors that backward accumulates gradients of."""
    found, nodes, seen = list[Tensor](), [value.grad_fn], set[Any]()
    while nodes:
        node: Any = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() == "torch::autograd::AccumulateGrad":
            found.append(node.variable)
        nodes += [following for following, _ in node.next_functions]
    return found[::-1]
