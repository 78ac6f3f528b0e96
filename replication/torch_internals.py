"""The names of torch that it does not document and that this package relies on.

All of them are here, so that a test can say which one a new release of torch has moved.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

import torch
from torch import distributed
from torch.nn.parallel.data_parallel import _check_balance as check_balance
from torch.utils._pytree import (
    SUPPORTED_NODES,
    MappingKey,
    SequenceKey,
    TreeSpec,
    register_pytree_node,
    tree_flatten_with_path,
    tree_map,
    tree_unflatten,
)

try:
    from torch.utils._pytree import tree_is_leaf
except ImportError:  # torch 2.4
    from torch.utils._pytree import _is_leaf as tree_is_leaf

functional_collectives: Any = None
collective_functions: Any = None
if distributed.is_available():
    functional_collectives = import_module("torch.distributed._functional_collectives")
    collective_functions = import_module("torch.distributed.nn.functional")

__all__ = [
    "MappingKey",
    "SequenceKey",
    "TreeSpec",
    "check_balance",
    "pytree_node",
    "register_pytree_node",
    "tree_flatten_with_path",
    "tree_is_leaf",
    "tree_map",
    "tree_unflatten",
]

#: Called by torch on each module to make its shell of a replica; classes override it (RNNs).
MAKE_SHELL = "_replicate_for_data_parallel"
#: True on a replica.
IS_REPLICA = "_is_replica"
#: What ``module(...)`` runs: hooks, then ``forward``.
CALL_IMPL = "_call_impl"
#: What ``module(...)`` runs instead after ``module.compile()``; bound to the original module.
COMPILED_CALL_IMPL = "_compiled_call_impl"


def has_differentiable_collectives() -> bool:
    """Whether this torch's functional collectives have derivatives; they took over from Functions.

    Those Functions warn that they are deprecated where the others are complete.
    """
    return all(
        hasattr(functional_collectives, name)
        for name in ("all_reduce_backward", "all_gather_single", "all_to_all_single")
    )


def is_compiled_wrapper(module: object) -> bool:
    """Whether this is the wrapper that ``torch.compile(module)`` returns."""
    # By name: to import its class takes longer than to import torch.
    return (type(module).__module__, type(module).__name__) == (
        "torch._dynamo.eval_frame",
        "OptimizedModule",
    )


def in_functorch_transform() -> bool:
    """Whether a `torch.func` transform (``grad``, ``vmap``, ...) is going on in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


def pytree_node(kind: type) -> Any:
    """How pytree walks objects of exactly this class; None if it does not."""
    return SUPPORTED_NODES.get(kind)
