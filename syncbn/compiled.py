"""The sum over processes for the textbook, as `torch.compile` can see it.

Problem: what exchanges values outside of a compiled graph cuts it in two. A network falls
apart into about as many graphs as it has layers, and takes longer compiled than not.

Idea: the textbook exchanges nothing but one sum, forward and backward, for which torch has an
operator that stays in the graph. Everything else is plain operations, which the compiler fuses and
differentiates.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from replication.groups.processes import Collective
from syncbn.channels import in_float64


def add_in_graph(name: str, tag: Tensor, tensor: Tensor) -> Tensor:
    """Returns the sum of a vector over the ranks of a group, given its name in operators."""
    added: Any = partial(_sum, name, tag)
    return Collective.apply(added, added, tensor)  # type: ignore[no-any-return, no-untyped-call]


def _sum(name: str, tag: Tensor, tensor: Tensor) -> Tensor:
    # The compiler makes one collective of two that sum the same expression, perhaps on one rank
    # only, where two layers have the same input. So each sum also has a tag: one value of a buffer
    # of its layer, which each call changes. In backward the calls of one layer have the same tag,
    # but gradients that depend on different sums.
    collectives = torch.ops._c10d_functional
    tagged = torch.cat((tensor, in_float64(tag)))
    return collectives.wait_tensor(collectives.all_reduce(tagged, "sum", name))[: len(tensor)]  # type: ignore[no-any-return]
