"""The state of threads: what a replica takes over from its caller, whichever thread runs it."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import ExitStack
from threading import Thread

import torch

from replication._torch import has_modes, set_grad_modes
from replication.devices import accelerator, current_stream, use_device


def _flushes_denormals() -> bool:
    return sys.float_info.min * 0.5 == 0.0  # torch can set it, but not tell


def _default_device() -> torch.device:
    return torch.empty(0).device if has_modes() else torch.device("cpu")


class ThreadState:
    """The state of the caller of one forward."""

    def __init__(self, devices: Sequence[torch.device], torch_threads: int) -> None:
        self.devices = devices
        #: The number of intra-op threads of a replica and of the caller.
        self.torch_threads, self.callers_torch_threads = torch_threads, torch.get_num_threads()
        self.flushes = _flushes_denormals()
        self.grad = torch.is_grad_enabled()
        self.inference = torch.is_inference_mode_enabled()
        self.default_device = _default_device()
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
        set_grad_modes(stack, grad=self.grad, inference=self.inference)
        if (default := self.default_device) != _default_device():
            # A default of "cuda" means the replica's own device, not the caller's.
            stack.enter_context(device if default.type == device.type else default)
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
