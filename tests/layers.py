"""Layers, wrappers and threads that several test files share."""

from __future__ import annotations

import copy
import gc
import pickle
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._utils import ExceptionWrapper
from torch.utils.checkpoint import checkpoint

from replication import (
    DataParallel,
    SyncMaster,
    data_parallel,
    gather,
    parallel_apply,
    patch_replication_callback,
    replicate,
    scatter_kwargs,
)
from replication.sync.lifecycle import this_thread
from syncbn import SynchronizedBatchNorm1d, SynchronizedBatchNorm2d, SynchronizedBatchNorm3d
from tests.deadlines import DEADLINE as DEADLINE
from tests.deadlines import ends, soon
from tests.devices import several

#: torch's layer and the synchronized one, by the number of spatial dimensions.
LAYERS = {
    1: (nn.BatchNorm1d, SynchronizedBatchNorm1d),
    2: (nn.BatchNorm2d, SynchronizedBatchNorm2d),
    3: (nn.BatchNorm3d, SynchronizedBatchNorm3d),
}

#: Whether a replica knows that its thread has no hooks on saved tensors.
KNOWS_HOOKS = hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks")
knows_hooks = pytest.mark.skipif(
    condition=not KNOWS_HOOKS,
    reason="torch 2.6 does not say whether a thread has hooks on saved tensors",
)


class Fused(nn.BatchNorm2d):
    """A batch norm that does something more, as other libraries have."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).relu()


class SyncFused(Fused, SynchronizedBatchNorm2d):
    pass


class Recomputed(nn.Module):
    """Calls a network in an activation checkpoint, which computes it again in backward."""

    def __init__(self, net: nn.Module, use_reentrant: bool = False) -> None:
        super().__init__()
        self.net, self.use_reentrant = net, use_reentrant

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=self.use_reentrant)


class Stop(torch.autograd.Function):
    """Passes its input on, and no gradient back, not even zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


class Outcome(NamedTuple):
    """What a call has returned or raised."""

    value: Any = None
    error: BaseException | None = None


def outcome_of(call: Callable[[], Any]) -> Outcome:
    try:
        return Outcome(value=call())
    except BaseException as error:
        return Outcome(error=error)


#: Without it, messages do not say at which line another thread is.
HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


def join_all(threads: Sequence[threading.Thread]) -> None:
    """Starts and joins threads; fails where one of them hangs."""
    for thread in threads:
        thread.daemon = True
        thread.start()
    for thread in threads:
        assert ends(thread), f"{thread.name} hangs"


def together(*calls: Callable[[], Any]) -> list[Outcome]:
    """Runs each call in its own thread and returns what each returned or raised."""
    outcomes: list[Outcome] = [Outcome()] * len(calls)

    def run(index: int) -> None:
        outcomes[index] = outcome_of(calls[index])

    join_all([threading.Thread(target=run, args=(index,)) for index in range(len(calls))])
    return outcomes


def values(outcomes: Sequence[Outcome]) -> list[Any]:
    """The values; raises the first error, by index."""
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in outcomes]


def until_others_wait(count: int) -> None:
    """Returns, in a replica, when ``count`` other replicas wait for a message."""
    place = this_thread.current
    assert place is not None
    waits = place.rendezvous.waits
    assert soon(lambda: len(waits) >= count), "the others do not wait"


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """What is freed in the block was freed by its last reference, and so was in no cycle."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


@contextmanager
def profiled(profiler: Callable[..., None]) -> Iterator[None]:
    """Calls a function at each call of a function in the block, in this thread."""
    before = sys.getprofile()
    sys.setprofile(profiler)
    try:
        yield
    finally:
        sys.setprofile(before)


def freed(*references: Callable[[], Any]) -> bool:
    """Whether weakly referenced objects are gone, at the latest soon.

    A worker lets go of a call right *after* it has handed over its result, while the caller goes
    on already.
    """
    return soon(lambda: all(reference() is None for reference in references))


def pickled(thing: Any) -> Any:
    """A copy, as another process gets it."""
    return pickle.loads(pickle.dumps(thing))


copied_each_way = pytest.mark.parametrize(
    "copied", [copy.copy, copy.deepcopy, pickled], ids=["copy", "deepcopy", "pickle"]
)


class Centering(nn.Module):
    """Subtracts the mean of the whole batch. Written as layers for the older toolkits are."""

    def __init__(self) -> None:
        super().__init__()
        self._sync_master = SyncMaster(self._data_parallel_master)
        self._is_parallel = False
        self._parallel_id: int | None = None
        self._slave_pipe: Any = None

    def forward(self, x: Tensor) -> Tensor:
        message = (x.sum(0), len(x))
        if not self._is_parallel:
            return x - x.mean(0)
        if self._parallel_id == 0:
            return x - self._sync_master.run_master(message).to(x.device)
        return x - self._slave_pipe.run_slave(message).to(x.device)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self._is_parallel = True
        self._parallel_id = copy_id
        if copy_id == 0:
            ctx.sync_master = self._sync_master
        else:
            self._slave_pipe = ctx.sync_master.register_slave(copy_id)

    def _data_parallel_master(self, intermediates: Any) -> list[tuple[Any, Tensor]]:
        assert intermediates[0][0] == 0
        total = sum(message[0].to(intermediates[0][1][0].device) for _, message in intermediates)
        count = sum(message[1] for _, message in intermediates)
        return [(identifier, total / count) for identifier, _ in intermediates]


def echoed(*args: Any, **kwargs: Any) -> Any:
    """The only argument, or a dict of all arguments."""
    return args[0] if len(args) == 1 and not kwargs else {"args": args, **kwargs}


class Echo(nn.Module):
    """Returns its arguments, and remembers what each replica was given."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []  # the replicas share it

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        self.seen.append((args, kwargs))
        return echoed(*args, **kwargs)


class LayerError(Exception):
    """An error that only the tests raise."""


class Numbered(nn.Module):
    """Knows which copy it is; None for the original."""

    copy_id: int | None = None

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        self.copy_id = copy_id


class WithMaster(Numbered):
    """Has a master in the older style, and a slave of it in every other copy."""

    def __init__(self, callback: Callable[[Any], Any]) -> None:
        super().__init__()
        self.master = SyncMaster(callback)

    def __data_parallel_replicate__(self, ctx: Any, copy_id: int) -> None:
        super().__data_parallel_replicate__(ctx, copy_id)
        if copy_id == 0:
            ctx.master = self.master
        else:
            ctx.master.register_slave(copy_id)


class FailsAt(Numbered):
    """Raises in one replica; passes its input on in the others. Failing can be switched off."""

    def __init__(self, replica: int, error: Callable[[], BaseException]) -> None:
        super().__init__()
        self.replica = replica
        self.error = error
        self.active = True

    def forward(self, x: Tensor) -> Tensor:
        if self.active and self.copy_id == self.replica:
            raise self.error()
        return x


class Repeat(Numbered):
    """Calls a layer as often as ``counts`` says for each replica."""

    def __init__(self, layer: nn.Module, counts: Sequence[int]) -> None:
        super().__init__()
        self.layer = layer
        self.counts = counts

    def forward(self, x: Tensor) -> Tensor:
        for _ in range(1 if self.copy_id is None else self.counts[self.copy_id]):
            x = self.layer(x)
        return x


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


# -- what runs the replicas --------------------------------------------------------------------

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
