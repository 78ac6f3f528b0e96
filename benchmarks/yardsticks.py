"""What the packages are compared with, written again for the CPU. Nothing here uses them.

Three schemes, from their published descriptions:

*   `DataParallel` is torch's: shells whose parameters are plain tensors from one broadcast node,
    a new thread per replica, and a concatenation of the outputs.
*   `SynchronizedBatchNorm` is the older toolkits': each replica sends its sum and sum of squares
    through a queue, the first replica's callback adds them up and replies, and each of the other
    replicas acknowledges its reply. The statistics are plain tensor expressions, and autograd
    derives their gradients.
*   `ProcessBatchNorm` is the one in `torch.nn.SyncBatchNorm`, which refuses the CPU: each process
    gathers mean and variance of all others in forward, and adds up two sums in backward.

All are correct, and all hang if a replica fails.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial, reduce
from operator import add
from queue import Queue
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, distributed, nn


class Broadcast(torch.autograd.Function):
    """Give each replica an alias of each tensor, and add up the gradients of the aliases."""

    @staticmethod
    def forward(ctx: Any, replicas: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.tensors = len(tensors)
        return tuple(tensor.detach() for _ in range(replicas) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *(reduce(add, grads[i :: ctx.tensors]) for i in range(ctx.tensors))


def replicate(module: nn.Module, replicas: int) -> list[nn.Module]:
    """Return ``replicas`` copies of ``module``; the first shares the buffers of the original."""
    modules, parameters = list(module.modules()), list(module.parameters())
    aliases = Broadcast.apply(replicas, *parameters)
    copies = []
    for rank in range(replicas):
        shells: dict[nn.Module, Any] = {m: m._replicate_for_data_parallel() for m in modules}
        own = aliases[rank * len(parameters) : (rank + 1) * len(parameters)]
        tensors = dict(zip(parameters, own, strict=True))
        for original, shell in shells.items():
            for name, child in original._modules.items():
                setattr(shell, name, shells.get(child))
            for name, parameter in original._parameters.items():
                setattr(shell, name, tensors.get(parameter))
            for name, buffer in original._buffers.items():
                if rank and buffer is not None:
                    setattr(shell, name, buffer.clone())
        copies.append(shells[module])
    return copies


def connect(copies: Sequence[nn.Module]) -> None:
    """Call the callbacks of all copies, with one context per position in the module tree."""
    positions = [list(copy.modules()) for copy in copies]
    contexts = [SimpleNamespace() for _ in positions[0]]
    for copy_id, modules in enumerate(positions):
        for context, module in zip(contexts, modules, strict=True):
            if hasattr(module, "__data_parallel_replicate__"):
                module.__data_parallel_replicate__(context, copy_id)


def parallel_apply(copies: Sequence[nn.Module], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Run each copy on its input, in a new thread each; raise the first error."""
    outcomes: list[Any] = [None] * len(copies)
    grad_enabled = torch.is_grad_enabled()

    def run(rank: int) -> None:
        try:
            with torch.set_grad_enabled(grad_enabled):
                outcomes[rank] = copies[rank](inputs[rank])
        except Exception as error:
            outcomes[rank] = error

    threads = [threading.Thread(target=run, args=(i,), daemon=True) for i in range(len(copies))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for outcome in outcomes:
        if isinstance(outcome, Exception):
            raise outcome
    return outcomes


class DataParallel(nn.Module):
    """Split the batch, run a copy of the module on each part, and concatenate the outputs."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module = module
        self.replicas = replicas

    def forward(self, x: Tensor) -> Tensor:
        inputs = x.chunk(self.replicas)
        copies = replicate(self.module, len(inputs))
        connect(copies)
        return torch.cat(parallel_apply(copies, inputs))


#: What a replica sends, per channel: the sums of its values and of their squares, and how many.
Statistics = tuple[Tensor, Tensor, int]


class Master:
    """The first replica's end of the pipes."""

    def __init__(self, callback: Callable[[list[Any]], Any]) -> None:
        self._callback = callback
        self._messages: Queue[tuple[int, Any]] = Queue()
        # In a separate queue, because a replica that calls the layer again may send its next
        # message before another replica has acknowledged.
        self._acknowledgements: Queue[int] = Queue()
        self._replies: dict[int, Queue[Any]] = {}

    def register_slave(self, copy_id: int) -> Callable[[Any], Any]:
        """Return the function that sends a message of this replica and waits for the reply."""
        replies = self._replies[copy_id] = Queue(maxsize=1)

        def run_slave(message: Any) -> Any:
            self._messages.put((copy_id, message))
            reply = replies.get()
            self._acknowledgements.put(copy_id)
            return reply

        return run_slave

    def run_master(self, message: Any) -> Any:
        """Collect the messages, send the callback's reply to all, and wait until they have it."""
        received = dict(self._messages.get() for _ in self._replies)
        reply = self._callback([message, *(received[copy_id] for copy_id in self._replies)])
        for replies in self._replies.values():
            replies.put(reply)
        for _ in self._replies:
            self._acknowledgements.get()
        return reply


def merge(
    buffers: Mapping[str, Any], momentum: float, eps: float, messages: list[Statistics]
) -> tuple[Tensor, Tensor]:
    """Compute the mean and the inverse deviation, and update the running statistics."""
    home = buffers["running_mean"].device
    sums, squares = ([m[i].to(home) for m in messages] for i in (0, 1))
    count = sum(m[2] for m in messages)
    mean = reduce(add, sums) / count
    scatter = reduce(add, squares) - count * mean * mean
    with torch.no_grad():
        buffers["num_batches_tracked"].add_(1)
        buffers["running_mean"].lerp_(mean, momentum)
        buffers["running_var"].lerp_(scatter / (count - 1), momentum)
    return mean, (scatter / count + eps).rsqrt()


class OfAnyDimension(nn.modules.batchnorm._BatchNorm):
    """BatchNorm of inputs ``(N, C, ...)``."""

    def _check_input_dim(self, input: Tensor) -> None:
        pass


class SynchronizedBatchNorm(OfAnyDimension):
    """BatchNorm over all replicas, by sums and sums of squares."""

    _exchange: Callable[[Any], Any] | None = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        if copy_id == 0:
            ctx.sync_master = Master(partial(merge, self._buffers, self.momentum, self.eps))
            self._exchange = ctx.sync_master.run_master
        else:
            self._exchange = ctx.sync_master.register_slave(copy_id)

    def forward(self, input: Tensor) -> Tensor:
        if self._exchange is None or not self.training:
            return super().forward(input)
        x = input.reshape(input.size(0), input.size(1), -1)
        own = x.sum((0, 2)), (x * x).sum((0, 2)), x.size(0) * x.size(2)
        mean, inverse = (moment.to(x.device) for moment in self._exchange(own))
        y = (x - mean[:, None]) * (inverse * self.weight)[:, None] + self.bias[:, None]
        return y.reshape(input.shape)


class Gathered(torch.autograd.Function):
    """Normalize with the moments of all processes, by the kernels that torch has for the CPU."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor,
        buffers: Mapping[str, Any],
        momentum: float,
        eps: float,
    ) -> Tensor:
        own = torch.stack(torch.batch_norm_update_stats(x, None, None, 0.0)).flatten()
        own = torch.cat((own, own.new_full((1,), x.numel() // x.size(1))))
        gathered = [torch.empty_like(own) for _ in range(distributed.get_world_size())]
        distributed.all_gather(gathered, own)
        means, variances, counts = torch.stack(gathered).split(x.size(1), dim=1)
        total = counts.sum()
        mean = (counts * means).sum(0) / total
        var = (counts * (variances + (means - mean) ** 2)).sum(0) / total
        buffers["num_batches_tracked"].add_(1)
        buffers["running_mean"].lerp_(mean, momentum)
        buffers["running_var"].lerp_(var * total / (total - 1), momentum)
        ctx.eps = eps
        ctx.save_for_backward(x, weight, mean, var, total)
        return torch.native_batch_norm(x, weight, bias, mean, var, False, 0.0, eps)[0]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Any, ...]:
        x, weight, mean, var, total = ctx.saved_tensors
        args = (dy, x, weight, mean, var, None, None, False, ctx.eps, [True, True, True])
        # The gradients in evaluation mode: the kernel takes mean and variance as constants.
        dx, dweight, dbias = torch.ops.aten.native_batch_norm_backward(*args)
        sums = torch.stack((dweight, dbias))
        distributed.all_reduce(sums)
        inverse = (var + ctx.eps).rsqrt()
        slope, shift = sums * (weight * inverse / -total)
        slope *= inverse
        shift -= slope * mean
        shape = (-1, *[1] * (x.dim() - 2))
        dx.addcmul_(x, slope.view(shape)).add_(shift.view(shape))
        return dx, dweight, dbias, None, None, None


class ProcessBatchNorm(OfAnyDimension):
    """BatchNorm over all processes, by means and variances."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training:
            return super().forward(input)
        return Gathered.apply(  # type: ignore[no-any-return, no-untyped-call]
            input, self.weight, self.bias, self._buffers, self.momentum, self.eps
        )


def convert(module: nn.Module, kind: type[Any] = SynchronizedBatchNorm) -> nn.Module:
    """Replace each BatchNorm in ``module``, in place, and keep its parameters and buffers."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                layer = kind(child.num_features, child.eps, child.momentum)
                layer._parameters, layer._buffers = child._parameters, child._buffers
                layer.train(child.training)
                setattr(parent, name, layer)
    return module
