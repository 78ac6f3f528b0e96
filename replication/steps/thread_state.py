"""The thread-local state of torch, which the threads of replicas take over from their caller.

It is set at the beginning of each forward, where it differs: a thread serves many forwards, and
the code of a replica may have changed it.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from threading import Thread

import torch

from replication._torch import count_nodes_up_to, set_grad_modes
from replication.devices import accelerator, current_stream, use_device


class ThreadState:
    """The state of the caller of one forward."""

    def __init__(self, devices: Sequence[torch.device], torch_threads: int, nodes: int) -> None:
        self.devices = devices
        #: The number of intra-op threads of a replica and of the caller.
        self.torch_threads, self.callers_torch_threads = torch_threads, torch.get_num_threads()
        #: The number of autograd nodes from which the thread counts.
        self.nodes = nodes
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = torch.empty(0).device
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
        """Sets the state of this thread, of a replica on ``device``, until ``stack`` is closed."""
        if torch.get_num_threads() != self.torch_threads:
            torch.set_num_threads(self.torch_threads)
            # Threads begin with the number that was set last, in any thread.
            restores = Thread(target=torch.set_num_threads, args=[self.callers_torch_threads])
            restores.start()
            restores.join()
        count_nodes_up_to(self.nodes)
        set_grad_modes(stack, grad=self.grad, inference=self.inference)
        # A default of "cuda" means the replica's own device, not the caller's.
        default = device if self.default_device.type == device.type else self.default_device
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
    """Returns the arguments of `torch.autocast` that give the state of this thread."""
    dtype, is_enabled = torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)
    return dtype, is_enabled, torch.is_autocast_cache_enabled()
