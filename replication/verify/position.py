"""Where a process is in `verify`, for the message about a rank that hangs, or has died.

What a signal ends can't answer. So a rank keeps its position in a file, and Python's handler of
faults writes the stack into another one.
"""

from __future__ import annotations

import faulthandler
import re
import sys
import threading
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

#: Files whose calls are not the user's: of torch and of this toolkit, and of Python.
_LIBRARIES = tuple(str(Path(file).parent) for file in (torch.__file__, Path(__file__).parent))
_PYTHON = str(Path(threading.__file__).parent)

#: A line of what the handler of faults writes, and how long what a rank keeps may be.
_FRAME, _KEPT = re.compile(r'File "(.*)", line (\d+) in (.*)'), 600


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
        sizes: The parts of an uneven batch, such as "5 samples are 3 and 2".
    """

    doing: str = "before the first step"
    layers: list[str] = field(default_factory=list)
    in_rank: bool = False
    sizes: str = ""
    _files: list[IO[Any]] = field(default_factory=list)

    def keeps(self, folder: Path, rank: int) -> None:
        """Keeps the position of this process in files from now on, for `last_position`."""
        box = (folder / f"position {rank}").open("wb", buffering=0)
        stack = (folder / f"stack {rank}").open("w")
        self._files = [box, stack]
        if not faulthandler.is_enabled():
            faulthandler.enable(stack)

    def _save(self) -> None:
        if self._files:
            self._files[0].seek(0)
            text = f"{self._place()}\n{self.sizes}\n"
            self._files[0].write(text.encode()[:_KEPT].ljust(_KEPT))

    def _place(self) -> str:
        return f"{self.doing}, layer {self.layers[-1]}" if self.layers else self.doing

    def splits(self, sizes: list[int]) -> None:
        """Notes how many samples each rank has."""
        parts = f"{', '.join(map(str, sizes[:-1]))} and {sizes[-1]}"
        self.sizes = f"{sum(sizes)} samples are {parts}" if len({*sizes}) > 1 else ""
        self._save()

    def enters(self, part: str) -> None:
        self.doing, self.layers = part, []
        self._save()

    def reaches(self, layer: str) -> None:
        self.layers.append(layer)
        self._save()

    def leaves(self, layer: str) -> None:
        if layer in self.layers:  # and those inside, which may have raised
            del self.layers[self.layers.index(layer) :]
            self._save()

    def passes(self, layer: str, grad: Tensor) -> None:
        """Notes as a hook that backward has reached the outputs of a layer."""
        self.layers = [layer]
        self._save()

    def text(self) -> str:
        """Where the main thread is: the part of the step, the layer, and the call."""
        frame = sys._current_frames()[threading.main_thread().ident or 0]
        return f"{self._place()}, {_call(traceback.extract_stack(frame))}"


def _call(stack: list[traceback.FrameSummary]) -> str:
    """The call that a stack, whose last frame is the innermost, has reached."""
    own = [frame for frame in stack if _is_own(frame.filename)]
    called = stack[-1].name
    if own and (after := stack[stack.index(own[-1]) + 1 :]):
        # A decorator of torch around the call has another name, and says nothing.
        called = next((f.name for f in after if "wrapper" not in f.name), after[0].name)
    call = f"in {called}"
    if own:
        last = own[-1]
        call += f", {Path(last.filename).name}, line {last.lineno}: {last.line}"
    return call


def last_position(folder: Path, rank: int) -> tuple[str, str]:
    """Where a rank was that has died, and the parts of its batch if they are uneven."""
    place, sizes, *_ = (*_read(folder / f"position {rank}").split("\n"), "", "")
    for thread in _read(folder / f"stack {rank}").split("\n\n"):
        frames = [
            traceback.FrameSummary(file, int(line), name)
            for file, line, name in _FRAME.findall(thread)[::-1]
        ]
        if any(_is_own(frame.filename) for frame in frames):
            place = f"{place}, {_call(frames)}"
    return place, sizes


def _read(path: Path) -> str:
    return path.read_text("utf-8", "replace") if path.exists() else ""


#: Of this process.
position = Position()
