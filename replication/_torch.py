"""The names of torch that it does not document and that this package relies on.

All of them are here, so that a test can say which one a new release of torch has moved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from datetime import timedelta
from functools import wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo
from torch.autograd import profiler
from torch.nn.parallel.data_parallel import _check_balance as check_balance
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import (
    SUPPORTED_NODES,
    GetAttrKey,
    MappingKey,
    SequenceKey,
)
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")

__all__ = [
    "GetAttrKey",
    "MappingKey",
    "SequenceKey",
    "beside_selective_checkpoints",
    "check_balance",
    "compiled_module",
    "count_nodes_up_to",
    "current_backward",
    "device_of_group",
    "is_batched",
    "is_profiling",
    "make_shell",
    "nodes_made",
    "pytree_node",
    "sees_saved_tensors",
    "timeout_of",
    "uncompiled",
    "will_run",
]

_SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

#: Called by torch on each module to make its shell of a replica; classes override it (RNNs).
MAKE_SHELL = "_replicate_for_data_parallel"
#: The dictionaries in which a module keeps hooks of its calls, and what it notes of them.
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name)
#: True on a replica.
IS_REPLICA = "_is_replica"
#: What ``module(...)`` runs: hooks, then ``forward``.
CALL_IMPL = "_call_impl"
#: What ``module(...)`` runs instead after ``module.compile()``; bound to the original module.
COMPILED_CALL_IMPL = "_compiled_call_impl"


_TORCHS_SHELL = nn.Module._replicate_for_data_parallel


def make_shell(method: Callable[[], Any]) -> Any:
    """What a module's `MAKE_SHELL` makes: a copy of its attributes, without the parameters."""
    if getattr(method, "__func__", None) is not _TORCHS_SHELL:
        return method()
    module = method.__self__  # type: ignore[attr-defined]
    kind: Any = type(module)
    shell = kind.__new__(kind)
    state = vars(module).copy()
    state["_parameters"] = type(state["_parameters"])()
    state["_buffers"] = state["_buffers"].copy()
    state["_modules"] = state["_modules"].copy()
    state[IS_REPLICA] = True
    object.__setattr__(shell, "__dict__", state)  # a module's own looks for parameters in it
    return shell


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Makes `torch.compile` leave a function as it is."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Only then: what torch offers for it imports the compiler, which takes seconds.
        return (disabled if torch.compiler.is_compiling() else function)(*args, **kwargs)

    return call


def device_of_group(process_group: Any) -> torch.device:
    """Where objects travel between the processes of a group: on the CPU if its backend does."""
    kinds = [device.type for device in process_group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def timeout_of(process_group: Any) -> timedelta | None:
    """That of a group of `torch.distributed`; None (the backend's own) if torch does not tell."""
    for device in getattr(process_group, "_device_types", ()):
        options = getattr(process_group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout  # type: ignore[no-any-return]
    return None


def is_compiled_wrapper(module: object) -> bool:
    """Whether this is the wrapper that ``torch.compile(module)`` returns."""
    # By name: to import its class takes longer than to import torch.
    return (type(module).__module__, type(module).__name__) == (
        "torch._dynamo.eval_frame",
        "OptimizedModule",
    )


def compiled_module(module: Any) -> nn.Module:
    """What the wrapper that ``torch.compile(module)`` returns wraps; or else ``module``."""
    return module._orig_mod if is_compiled_wrapper(module) else module  # type: ignore[no-any-return]


def in_functorch_transform() -> bool:
    """Whether a `torch.func` transform (``grad``, ``vmap``, ...) is going on in this thread."""
    return bool(torch._C._are_functorch_transforms_active())


#: That of `current_backward`, where there is none.
NO_BACKWARD = -1


def current_backward() -> int:
    """The number of the backward that this thread is in: in the recomputation of an activation
    checkpoint, say."""
    return torch._C._current_graph_task_id()


def nodes_made() -> int:
    """How many nodes of autograd graphs this thread has made; autograd goes by these numbers."""
    return torch._C._autograd._get_sequence_nr()


def is_batched(tensor: Tensor) -> bool:
    """Whether this stands for several tensors, as the gradients of a vectorized Jacobian do."""
    functorch = torch._C._functorch
    return bool(functorch.is_batchedtensor(tensor) or functorch.is_legacy_batchedtensor(tensor))


def count_nodes_up_to(number: int) -> None:
    """Makes nodes until this thread has made so many. Each takes about a microsecond."""
    missing = number - nodes_made()
    if missing > 0:
        with torch.enable_grad():
            # One for each tensor of a list, and all in one call.
            torch.atleast_1d([torch.zeros((), requires_grad=True)] * missing)


def is_profiling() -> bool:
    """Whether a profile is being made; not of all threads, as a rule."""
    return profiler._is_profiler_enabled


def sees_saved_tensors() -> bool:
    """Whether something in this thread looks at what is saved for backward, or at operations."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    hooks = top is None or top(True) is not None  # an older torch does not tell
    return bool(hooks or torch._C._len_torch_dispatch_stack())


def will_run(node: Any) -> bool:
    """Whether the backward that this thread is in comes to a node of the graph."""
    return bool(torch._C._will_engine_execute_node(node))


def beside_selective_checkpoints() -> AbstractContextManager[object]:
    """Hides what runs inside from a selective activation checkpoint around it, if there is one.

    It counts the operations in the forward, and wants as many in the recomputation. Other modes,
    such as counters of operations, do not see them either then.
    """
    if not torch._C._len_torch_dispatch_stack():
        return nullcontext()
    modes = _get_current_dispatch_mode_stack()
    stack = ExitStack()
    if any(isinstance(mode, _SELECTIVE_CHECKPOINTS) for mode in modes):
        for _ in modes:
            stack.enter_context(_pop_mode_temporarily())
    return stack


def pytree_node(kind: type) -> Any:
    """How torch's pytree opens objects of exactly this class; None if it does not."""
    return SUPPORTED_NODES.get(kind)
