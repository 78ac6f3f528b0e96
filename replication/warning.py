"""Warnings that point at the user's line, and flags that are raised once."""

from __future__ import annotations

import sys
import warnings
from types import FrameType
from weakref import WeakKeyDictionary

from torch import nn

from replication.errors import path_or_root

__all__ = ["UnsynchronizedWarning"]


#: Captured here, as programs put other classes under these names.
_PLAIN = frozenset((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm))

#: The number of layers that the warning names.
_NAMED = 3


def warn_of_plain_batch_norm(model: nn.Module, module: nn.Module) -> None:
    """Warns once for each ``model`` if plain batch norm in its ``module`` is about to train.

    Called in each forward, before there are replicas.
    """
    if not _trains_plain_batch_norm(module) or not once_for(model)():
        return
    paths = [
        f"`{path_or_root(path)}` ({type(layer).__name__})"
        for path, layer in module.named_modules()
        if layer.training and type(layer) in _PLAIN
    ]
    others = len(paths) - _NAMED
    warn(
        "each replica normalizes over its own part of the batch in "
        f"{', '.join(paths[:_NAMED])}{f' and {others} more' if others > 0 else ''}; "
        "syncbn.convert_model(model) makes them use the whole batch, or filter "
        "replication.UnsynchronizedWarning",
        UnsynchronizedWarning,
    )


def _trains_plain_batch_norm(module: nn.Module) -> bool:
    pending, seen = [module], {id(module)}
    while pending:  # several times faster than `modules()`
        layer = pending.pop()
        if type(layer) in _PLAIN and layer.training:
            return True
        for child in layer._modules.values():
            if child is not None and id(child) not in seen:
                seen.add(id(child))
                pending.append(child)
    return False


#: Frames of these packages lie between a warning and the line that it is about.
_SKIPPED = frozenset(
    (
        *("replication", "syncbn", "torch", "contextlib", "threading"),
        *("importlib", "_frozen_importlib", "_frozen_importlib_external"),
    )
)


class UnsynchronizedWarning(UserWarning):
    """A layer computes with its replica's part of the batch alone.

    If that is what you want, filter the category::

        warnings.filterwarnings("ignore", category=replication.UnsynchronizedWarning)
    """


class WarnOnce:
    """Returns True on the first call, in whichever thread. Copies start afresh."""

    def __init__(self) -> None:
        self._pending = [True]

    def __call__(self) -> bool:
        try:
            # Atomic. A lock could be met again in a signal handler.
            return self._pending.pop()
        except IndexError:
            return False

    def __reduce__(self) -> tuple[type[WarnOnce], tuple[()]]:
        return WarnOnce, ()


_flags: WeakKeyDictionary[object, WarnOnce] = WeakKeyDictionary()


def once_for(owner: object) -> WarnOnce:
    """The flag of an object, which is kept beside the object and not on it."""
    return _flags.setdefault(owner, WarnOnce())


def warn(message: str, category: type[Warning] = UserWarning, caller: int | None = None) -> None:
    """Warns at the innermost line outside of torch and this toolkit.

    Args:
        message: The text.
        category: The category.
        caller: The thread in which to look if the current one has no such line, as a replica's
            thread in which a container of torch calls a layer.
    """
    here = sys._getframe(1)
    frame = _users(here) or _users(sys._current_frames().get(caller or 0)) or here
    warnings.warn_explicit(
        message,
        category,
        frame.f_code.co_filename,
        frame.f_lineno,
        frame.f_globals.get("__name__", "<unknown>"),
        frame.f_globals.setdefault("__warningregistry__", {}),
    )


def _users(frame: FrameType | None) -> FrameType | None:
    """The innermost frame of other packages, from ``frame`` outwards."""
    while frame is not None:
        name = frame.f_globals.get("__name__")
        if str(name).partition(".")[0] not in _SKIPPED:
            return frame
        frame = frame.f_back
    return None
