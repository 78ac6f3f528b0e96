"""The undocumented names of torch, without kernels: a test names those that a release moves."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from datetime import timedelta
from functools import lru_cache, wraps
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor, distributed, nn
from torch._compile import _disable_dynamo
from torch.autograd import forward_ad, profiler
from torch.fx import GraphModule
from torch.nn.parallel.data_parallel import _check_balance as check_balance
from torch.torch_version import TorchVersion
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode_temporarily
from torch.utils._pytree import SUPPORTED_NODES as pytree_nodes
from torch.utils._pytree import GetAttrKey, MappingKey, SequenceKey
from torch.utils.checkpoint import _CachedTorchDispatchMode, _CachingTorchDispatchMode

P = ParamSpec("P")
T = TypeVar("T")

__all__ = ["GetAttrKey", "MappingKey", "SequenceKey", "check_balance", "pytree_nodes"]

_SELECTIVE_CHECKPOINTS = (_CachingTorchDispatchMode, _CachedTorchDispatchMode)

#: The dictionaries in which a module keeps the hooks of its calls and their options.
HOOKS = tuple(name for name in vars(nn.Module()) if "hooks" in name and "state_dict" not in name)
IS_REPLICA = "_is_replica"
#: The method that ``module(...)`` runs: hooks, then ``forward``.
CALL_IMPL = "_call_impl"
#: The attribute that ``module(...)`` runs instead after ``module.compile()``. It is bound to the
#: original module.
COMPILED_CALL_IMPL = "_compiled_call_impl"


def shared_by_replicas(module: nn.Module) -> object:
    """Returns an object that a module has in common with its replicas, torch's own included."""
    # Replicas are shallow copies. They copy the dictionaries of their parameters, buffers, modules
    # and hooks of calls, and share the others. Copies of a module have others.
    return vars(module)["_state_dict_hooks"]


#: A graph module's own would lose its hooks, and compile its code for each replica.
_SHELLS = nn.Module._replicate_for_data_parallel, GraphModule._replicate_for_data_parallel


def make_shell(module: Any) -> Any:
    """Returns a shallow copy of a module without parameters, which becomes a replica."""
    method = module._replicate_for_data_parallel
    if getattr(method, "__func__", None) not in _SHELLS:
        return method()  # RNNs, for example, also copy their list of weights
    # What torch's method does, in a fifth of the time: it sets each attribute by `setattr`.
    shell = object.__new__(type(module))
    state = vars(shell)
    state.update(vars(module))
    state["_parameters"] = {}
    state[IS_REPLICA] = True
    return shell


def uncompiled(function: Callable[P, T]) -> Callable[P, T]:
    """Excludes a function from `torch.compile`."""
    disabled = _disable_dynamo(function)

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        # Only while compiling, because the disabled function imports the compiler, which takes
        # seconds.
        return (disabled if torch.compiler.is_dynamo_compiling() else function)(*args, **kwargs)

    return call


def constant_in_graphs(function: Callable[P, T]) -> Callable[P, T]:
    """Lets `torch.compile` call a function while it traces, and keep the result as a constant."""
    # What `torch.compiler.assume_constant_result` does, without the import of the compiler.
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


#: Whether collectives between processes stay in the graphs of `torch.compile`. Older releases were
#: not tried.
COMPILES_COLLECTIVES = TorchVersion(torch.__version__) >= "2.13"

#: Unknown to older releases of torch.
_is_exporting: Callable[[], bool] = getattr(torch.compiler, "is_exporting", bool)


def is_exporting() -> bool:
    """Whether the operations of this thread are exported, or traced by `torch.jit.trace`."""
    return _is_exporting() or torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]


def device_of_group(process_group: Any) -> torch.device:
    """The device for objects in a process group: the CPU if its backend supports it."""
    kinds = [device.type for device in process_group._device_types]
    if "cpu" in kinds:
        return torch.device("cpu")
    return torch.device(kinds[0], torch.get_device_module(kinds[0]).current_device())


def apply_of(function: type[torch.autograd.Function]) -> Any:
    """Returns ``function.apply`` without its handling of `torch.func`, for callers that refuse it.

    ``Function.apply`` is Python code that looks for transforms, and then calls the same method of
    its base class, which is written in C++.
    """
    return super(torch.autograd.Function, function).apply  # type: ignore[misc]


def is_usable(process_group: Any) -> bool:
    """Whether this process is in a group, and the group is not destroyed."""
    # `get_backend` would tell as well, but takes 20 us.
    return process_group in distributed.distributed_c10d._world.pg_map


# By methods of the group, which all releases of torch have, without the checks of arguments in
# Python that the functions of `torch.distributed` make before they call them.
def gathered(tensor: Tensor, process_group: Any) -> Tensor:
    """Stacks contiguous tensors of all ranks, of one shape, to ``(size, ...)``."""
    if tensor.is_complex():
        return torch.view_as_complex(gathered(torch.view_as_real(tensor), process_group))
    size: int = process_group.size()
    vector, shape = tensor.view(-1) if tensor.dim() != 1 else tensor, tensor.shape
    values = tensor.new_empty(size * vector.numel())
    rows = values.view(size, *shape)
    if vector.numel():
        options = _options("AllgatherOptions")
        if tensor.is_cpu:  # gloo's `_allgather_base` does the same, and takes longer
            work = process_group.allgather([[*rows.unbind()]], [tensor], options)
        else:
            # A list of rows would be copied row by row. Flat, because gloo, which takes tensors of
            # GPUs as well, compares the shapes.
            work = process_group._allgather_base(values, vector, options)
        if work is not None:
            work.wait()
    return rows


def all_reduce_in_place(tensor: Tensor, process_group: Any) -> None:
    """Adds contiguous tensors of all ranks."""
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    work = process_group.allreduce([real], _options("AllreduceOptions"))
    if work is not None:
        work.wait()


def wait_for_all(process_group: Any) -> None:
    """Returns when all ranks have called it."""
    # Not by `torch.distributed.barrier`: NCCL then takes the GPU that has the rank's number, which
    # may be another one than the rank's.
    vector = torch.zeros(1, device=device_of_group(process_group))
    all_reduce_in_place(vector, process_group)
    vector.item()  # on an accelerator, the host does not wait before


@lru_cache
def _options(kind: str) -> Any:
    """The options of a collective that runs on the current stream, where torch has this option."""
    options = getattr(distributed.distributed_c10d, kind)()
    if hasattr(options, "asyncOp"):
        options.asyncOp = False
    return options


#: Whether the end of a gloo group may hang: torch 2.4 holds the GIL while it joins the threads of
#: the group, which need it to drop the tensors of the last collective. 2.5 to 2.8 were not tried.
ENDS_WITH_GIL = TorchVersion(torch.__version__) < "2.9"


def destroy_group(process_group: Any) -> None:
    """Ends a process group whose collectives are done. None ends all groups."""
    if ENDS_WITH_GIL:
        time.sleep(0.3)  # without the GIL, so that these threads drop their tensors
    distributed.destroy_process_group(process_group)


def timeout_of(process_group: Any) -> timedelta | None:
    """The timeout of a process group, or None for the backend's default."""
    for device in getattr(process_group, "_device_types", ()):
        options = getattr(process_group._get_backend(device), "options", None)
        timeout = getattr(options, "_timeout", None)
        if timeout is not None:
            return timeout  # type: ignore[no-any-return]
    return None


def compiled_module(module: Any) -> nn.Module:
    """The module that ``torch.compile(module)`` wrapped, or else ``module`` itself."""
    # By name, because importing the class takes longer than importing torch.
    wrapper = "torch._dynamo.eval_frame", "OptimizedModule"
    while (type(module).__module__, type(module).__name__) == wrapper:
        module = module._orig_mod
    return module  # type: ignore[no-any-return]


def is_dtensor(tensor: object) -> bool:
    # By its name, because importing it takes a second.
    kind = type(tensor)
    return kind.__name__ == "DTensor" and kind.__module__.startswith("torch.distributed.")


#: Returns whether a `torch.func` transform (``grad``, ``vmap``, ...) is active in this thread.
in_functorch_transform: Callable[[], bool] = torch._C._are_functorch_transforms_active


def has_other_derivatives(tensors: Iterable[Tensor | None]) -> bool:
    """Whether a `torch.func` transform is active, or a tensor has a forward-mode derivative."""
    return in_functorch_transform() or (
        forward_ad._current_level >= 0  # tensors are searched only inside a dual_level()
        and any(t is not None and forward_ad.unpack_dual(t).tangent is not None for t in tensors)
    )


#: Returns the number of the backward that this thread is in, or `NO_BACKWARD`. A thread calls a
#: layer in a backward when it recomputes an activation checkpoint.
current_backward: Callable[[], int] = torch._C._current_graph_task_id
NO_BACKWARD = -1

#: Returns the number of autograd nodes that this thread has made, by which autograd orders them.
nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr


def count_nodes_up_to(number: int) -> None:
    """Makes autograd nodes until this thread has made ``number``."""
    # A node without an operation: operations cost tens of times as much, and let another thread
    # take the GIL.
    for _ in range(number - nodes_made()):
        torch._C._functions.UndefinedGrad()


def set_grad_modes(stack: ExitStack, *, grad: bool, inference: bool) -> None:
    """Sets grad mode and inference mode until ``stack`` is closed, where they differ."""
    if torch.is_inference_mode_enabled() != inference:  # first, because it sets the grad mode
        stack.enter_context(torch.inference_mode(inference))
    if torch.is_grad_enabled() != grad:
        stack.enter_context(torch.set_grad_enabled(grad))


def is_profiling() -> bool:
    """Whether `torch.profiler` is active. It usually records this thread only."""
    return profiler._is_profiler_enabled


_UNNAMED = nullcontext()


def named_range(name: str) -> AbstractContextManager[object]:
    """Names a ``with`` block in a profile."""
    return profiler.record_function(name) if profiler._is_profiler_enabled else _UNNAMED


@lru_cache
def has_kernels(kind: str, *operators: str) -> bool:
    """Whether a type of device has its own kernels for operators such as ``add.Tensor``."""
    key = torch._C._dispatch_key_for_device(kind)
    has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
    return all(has_kernel(f"aten::{name}", key) for name in operators)


#: Returns the number of dispatch modes that are active in this thread.
dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack

#: Returns the innermost hooks on saved tensors of this thread. Unknown to older releases of torch.
_top_hooks = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)


def has_modes() -> bool:
    """Whether this thread has function or dispatch modes. A default device is a function mode."""
    return torch._C._len_torch_function_stack() > 0 or dispatch_modes() > 0


def sees_saved_tensors() -> bool:
    """Whether this thread has hooks on saved tensors or a dispatch mode. True if it is unknown."""
    return _top_hooks is None or _top_hooks(True) is not None or dispatch_modes() > 0


def unseen_by_checkpoints() -> AbstractContextManager[object]:
    """Hides the operations of a ``with`` block from a selective checkpoint around it."""
    # The checkpoint expects the same operations in the recomputation as in the forward. Other
    # dispatch modes, such as counters of operations, do not see the operations either.
    modes = _get_current_dispatch_mode_stack()
    stack = ExitStack()
    if any(isinstance(mode, _SELECTIVE_CHECKPOINTS) for mode in modes):
        for _ in modes:
            stack.enter_context(_pop_mode_temporarily())
    return stack


@contextmanager
def run_eagerly() -> Iterator[None]:
    """Switches `torch.compile` off in a ``with`` block, also for what is compiled already."""
    # Nothing is compiled before the compiler is imported, which takes seconds.
    is_imported = "torch._dynamo" in sys.modules
    with torch.compiler.set_stance("force_eager") if is_imported else nullcontext():
        yield
