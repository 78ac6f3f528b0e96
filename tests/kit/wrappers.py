"""Wrappers, each of which runs a network in replicas, as ours does, or torch, or a user."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper

from replication import (
    DataParallel,
    data_parallel,
    gather,
    parallel_apply,
    patch_replication_callback,
    replicate,
    scatter_kwargs,
)
from tests.kit.devices import several
from tests.kit.threads import join_all, together, values


class CustomDataParallel(nn.DataParallel):
    """A user's DataParallel: the four steps are overridden, nothing else is ours."""

    def __init__(self, module: nn.Module, n: int) -> None:
        nn.Module.__init__(self)  # torch's constructor wants an accelerator
        self.module = module
        self.dim = 0
        self.device_ids = several(n)
        self.output_device = self.device_ids[0]
        self.src_device_obj = torch.device(self.output_device)

    def replicate(self, module: Any, device_ids: Any) -> Any:
        return replicate(module, device_ids, not torch.is_grad_enabled())

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, self.dim)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        return parallel_apply(replicas, inputs, kwargs)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, self.dim)


class Stock(nn.DataParallel):
    """torch's own, except for the steps that refuse the CPU."""

    __init__, replicate = CustomDataParallel.__init__, CustomDataParallel.replicate
    scatter, gather = CustomDataParallel.scatter, CustomDataParallel.gather


class AsTorchDoes(CustomDataParallel):
    """Runs the replicas as `torch.nn.parallel.parallel_apply` does, which refuses the CPU.

    One new thread for each; all are joined; the error of the first replica *by index* is raised
    again, as an error of the same type with the traceback in its text.
    """

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        results: dict[int, Any] = {}  # of a thread that something else has ended it has nothing
        grad_enabled = torch.is_grad_enabled()

        def work(i: int) -> None:
            torch.set_grad_enabled(grad_enabled)
            try:
                results[i] = replicas[i](*inputs[i], **kwargs[i])
            except Exception:
                results[i] = ExceptionWrapper(where=f"in replica {i} on device cpu")

        join_all([threading.Thread(target=work, args=(i,)) for i in range(len(replicas))])
        outputs = []
        for i in range(len(replicas)):
            if isinstance(results[i], ExceptionWrapper):
                results[i].reraise()
            outputs.append(results[i])
        return outputs


class ByPlainThreads(CustomDataParallel):
    """Runs each replica in a plain thread; raises the error of the first by index, as it is."""

    def call(self, replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replica(*args, **kwargs)

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        calls = zip(replicas, inputs, kwargs, strict=True)
        return values(together(*(partial(self.call, r, *x, **o) for r, x, o in calls)))


class ByForward(ByPlainThreads):
    """Calls ``replica.forward`` instead of ``replica``."""

    def call(self, replica: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return replica.forward(*args, **kwargs)


class SwallowingErrors(ByPlainThreads):
    """Keeps errors to itself; where a replica has raised, the output is None."""

    def parallel_apply(self, replicas: Any, inputs: Any, kwargs: Any) -> Any:
        calls = zip(replicas, inputs, kwargs, strict=True)
        self.outcomes = together(*(partial(self.call, r, *x, **o) for r, x, o in calls))
        return [outcome.value for outcome in self.outcomes]

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return outputs


#: How many replicas there are.
N = 3

#: What runs a network's replicas, as a function of the batch.
Run = Callable[[Tensor], Tensor]


def ours(net: nn.Module, n: int = N, **options: Any) -> DataParallel[Any]:
    return DataParallel(net, several(n), **options)


def patched(kind: Callable[[nn.Module, int], nn.Module]) -> Callable[..., Any]:
    def make(net: nn.Module, n: int = N) -> nn.Module:
        model = kind(net, n)
        patch_replication_callback(model)
        return model

    return make


as_torch_does = patched(AsTorchDoes)


class Customized(DataParallel):
    """Ours, with the user's own way to make the replicas and to run them."""

    call = ByPlainThreads.call
    parallel_apply = ByPlainThreads.parallel_apply

    def __init__(self, net: nn.Module, n: int) -> None:
        super().__init__(net, several(n))

    def replicate(self, module: Any, device_ids: Any) -> Any:
        return replicate(module, device_ids)


customized = patched(Customized)


def as_a_function(net: nn.Module) -> Run:
    return lambda x: data_parallel(net, x, several(N))


WRAPS = (ours, as_torch_does, customized, as_a_function)
