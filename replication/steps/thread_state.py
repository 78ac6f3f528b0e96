"""The state of threads: the threads of replicas are like new ones that their caller has made.

Problem: a thread serves many forwards. The caller may change its own state between two of them,
and the code of a replica may leave other state behind, which later models would see.

Idea: state that can be set is set at the beginning of each forward, where it differs
(`ThreadState`). Other state is compared. A thread serves a forward only if new threads of the
caller would begin as it has begun (`state_of_new_threads`), and if the replicas before have left
nothing in it (`state_of_this_thread`). All of it takes some microseconds.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from ctypes import PYFUNCTYPE, c_size_t, pythonapi
from threading import Thread

import torch

from replication._torch import count_nodes_up_to, has_modes, set_grad_modes, settings_of_thread
from replication.devices import accelerator, current_stream, use_device

#: Return the CPUs and the blocked signals of this thread. Not every system has them.
_affinity: Callable[[int], object] = getattr(os, "sched_getaffinity", bool)
_mask: Callable[[int, Sequence[int]], object] = getattr(
    signal, "pthread_sigmask", lambda how, signals: None
)
_BLOCK: int = getattr(signal, "SIG_BLOCK", 0)

#: Returns the stack size of new threads. Not `threading.stack_size`, which sets the default when
#: it is asked: of threads that ask at once and set it again, one may set what another has left.
#: `PYFUNCTYPE` keeps the GIL.
_stack_size: Callable[[], int] = PYFUNCTYPE(c_size_t)(("PyThread_get_stacksize", pythonapi))


def state_of_this_thread() -> tuple[object, ...]:
    """What a replica may leave in its thread, except for what `ThreadState` sets."""
    return _affinity(0), _mask(_BLOCK, ()), settings_of_thread()


def state_of_new_threads() -> tuple[object, ...]:
    """What the threads begin with that this thread makes, except for what `ThreadState` sets."""
    hooks = threading.getprofile(), threading.gettrace()
    return _stack_size(), hooks, _affinity(0), _mask(_BLOCK, ())


def _flushes_denormals() -> bool:
    return sys.float_info.min * 0.5 == 0.0  # torch can set it, but not tell


class ThreadState:
    """The state of the caller of one forward."""

    def __init__(self, devices: Sequence[torch.device], torch_threads: int, nodes: int) -> None:
        self.devices = devices
        #: The number of intra-op threads of a replica and of the caller.
        self.torch_threads, self.callers_torch_threads = torch_threads, torch.get_num_threads()
        #: The number of autograd nodes from which the thread counts.
        self.nodes = nodes
        self.flushes = _flushes_denormals()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        #: None if it is the default of new threads.
        self.default_device = torch.empty(0).device if has_modes() else None
        kinds = {"cpu", accelerator() or "cpu", *[device.type for device in devices]}
        self.autocast = {
            kind: _autocast_state(kind) for kind in kinds if torch.amp.is_autocast_available(kind)
        }
        self.streams = {device: current_stream(device) for device in dict.fromkeys(devices)}
        # Tensors from other replicas are on their devices, in the caller's streams.
        self.side_streams = {
            d: s for d, s in self.streams.items() if s is not None and s.stream_id
        }

    def enter(self, stack: ExitStack, device: torch.device) -> None:
        """Sets the state of this thread, of a replica on ``device``.

        Modes and streams last until ``stack`` is closed, the rest until the next forward.
        """
        if torch.get_num_threads() != self.torch_threads:
            torch.set_num_threads(self.torch_threads)
            # Threads begin with the number that was set last, in any thread.
            restores = Thread(target=torch.set_num_threads, args=[self.callers_torch_threads])
            restores.start()
            restores.join()
        if _flushes_denormals() != self.flushes:
            torch.set_flush_denormal(self.flushes)
        count_nodes_up_to(self.nodes)
        set_grad_modes(stack, grad=self.grad, inference=self.inference)
        if (default := self.default_device) is not None:
            # A default of "cuda" means the replica's own device, not the caller's.
            default = device if default.type == device.type else default
            if torch.empty(0).device != default:
                stack.enter_context(default)
        for kind, state in self.autocast.items():
            if _autocast_state(kind) != state:
                stack.enter_context(torch.autocast(kind, *state))
        for other, stream in self.side_streams.items():
            if other != device:
                use_device(stack, other, stream)
        use_device(stack, device, self.streams[device])


def _autocast_state(kind: str) -> tuple[torch.dtype, bool, bool]:
    """The arguments of `torch.autocast` that give the state of this thread."""
    dtype, is_enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return dtype, is_enabled, torch.is_autocast_cache_enabled()
