"""Where a process is in `verify`, for the message about a rank that hangs."""

from __future__ import annotations

import sys
import threading
import traceback
from dataclasses import dataclass
from pathlib import Path

import torch

#: Files of torch and of this toolkit, whose calls are not the user's.
_LIBRARIES = tuple(str(Path(f).parent) for f in (torch.__file__, Path(__file__).parent))


@dataclass
class Position:
    """What a process computes at the moment.

    Attributes:
        doing: The part of the step, such as "backward on rank 0 of 2".
        layer: The layer that computes, such as "`1.norm` (BatchNorm2d)". Empty outside.
        in_rank: Whether `verify_ranks` has started this process.
    """

    doing: str = "before verify"
    layer: str = ""
    in_rank: bool = False

    def text(self) -> str:
        """Where the main thread is: the part of the step, the layer, and the call."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        stack = traceback.extract_stack(frame)
        own = [f for f in stack if not f.filename.startswith((*_LIBRARIES, "<"))]
        called = stack[-1].name
        if own and (after := stack[stack.index(own[-1]) + 1 :]):
            # A decorator of torch around the call has another name, and says nothing.
            called = next((f.name for f in after if "wrapper" not in f.name), after[0].name)
        call = f"in {called}"
        if own:
            last = own[-1]
            call += f", {Path(last.filename).name}, line {last.lineno}: {last.line}"
        layer = f", layer {self.layer}" if self.layer else ""
        return f"{self.doing}{layer}, {call}"


#: Of this process.
position = Position()
