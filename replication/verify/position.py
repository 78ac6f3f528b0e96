"""Where a process is in `verify`, for the message about a rank that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

#: Files whose calls are not the user's: of torch and of this toolkit, and of Python.
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent))
_PYTHON = str(Path(threading.__file__).parent)


def _is_own(file: str) -> bool:
    if file.startswith(("<", *_LIBRARIES)):
        return False
    return "site-packages" in file or not file.startswith(_PYTHON)


@dataclass
class Position:
    """What a process computes at the moment.

    Attributes:
        doing: The part of the step, such as "backward on rank 0 of 2".
        layers: The layers whose forward runs, or the one that backward has reached.
        in_rank: Whether `verify_ranks` has started this process.
    """

    doing: str = "before the first step"
    layers: list[str] = field(default_factory=list)
    in_rank: bool = False

    def enters(self, part: str) -> None:
        self.doing, self.layers = part, []

    def leaves(self, layer: str) -> None:
        if layer in self.layers:  # and those inside, which may have raised
            del self.layers[self.layers.index(layer) :]

    def passes(self, layer: str, grad: Tensor) -> None:
        """Notes as a hook that backward has reached the outputs of a layer."""
        self.layers = [layer]

    def text(self) -> str:
        """Where the main thread is: the part of the step, the layer, and the call."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        own = [frame for frame in stack if _is_own(frame.filename)]
        called = stack[-1].name
        if own and (after := stack[stack.index(own[-1]) + 1 :]):
            # A decorator of torch around the call has another name, and says nothing.
            called = next((f.name for f in after if "wrapper" not in f.name), after[0].name)
        call = f"in {called}"
        if own:
            last = own[-1]
            call += f", {Path(last.filename).name}, line {last.lineno}: {last.line}"
        layer = f", layer {self.layers[-1]}" if self.layers else ""
        return f"{self.doing}{layer}, {call}"


#: Of this process.
position = Position()
