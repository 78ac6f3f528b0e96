"""The comparison of calls: ranks of a process group name calls that do not match.

Problem: if one rank makes another call than the others, the backend waits for its timeout, or
crashes, or adds numbers that do not belong together. But a text with each call costs more than a
small call itself.

Idea: each call has a digest of two numbers. It travels where the host reads what arrives anyway.
Only where the digests of the ranks differ do they exchange the texts of their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor, distributed

from replication._torch import (
    all_gather_rows,
    all_gather_single,
    device_of_group,
    is_profiling,
    named_range,
)
from replication.errors import ReplicationError, add_note
from replication.groups.base import Signature, check_same_call
from replication.groups.registry import state_of

#: The number of bytes of a text that ranks exchange, cut or filled up.
_TEXT_BYTES = 480

_REMEDY = (
    "if no other rank failed first (see their logs), some rank did not make this call: is one in "
    "eval(), compiled where others are not, out of data (see replication.JoinableStep), without a "
    "backward, with another shape or dtype, or in another layer?"
)


class RankCall:
    """A call that this rank makes in a process group, counted when it is constructed.

    The ``call`` must match on all ranks, and so must the ``name`` of the layer and the number of
    calls before.
    """

    #: In profiles.
    _range: Any = None

    def __init__(self, process_group: Any, name: str, call: Signature) -> None:
        self.process_group, self.name, self.call = process_group, name, call
        #: Whether the ranks have compared this call.
        self.is_compared = False
        calls, kind = state_of(process_group).calls, (name, call.name.endswith("_backward"))
        # Without a lock: calls of one layer in several threads at once would match in no order.
        self._number = calls[kind] = calls.get(kind, 0) + 1

    def __str__(self) -> str:
        return f"`{self.name}`, call {self._number}: {self.call}"

    # Not `contextlib.contextmanager`, for the reason that `ForwardScope` gives.
    def __enter__(self) -> RankCall:
        """Names the call in profiles, and in errors of the ``with`` block."""
        if is_profiling():
            self._range = named_range(f"exchange {self.name}, rank {self.process_group.rank()}")
            self._range.__enter__()
        if ranks_debug():
            try:
                self.compare()
            except BaseException as error:
                self.__exit__(type(error), error, error.__traceback__)
                raise
        return self

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if self._range is not None:
            self._range.__exit__(kind, error, traceback)
        # If another rank raises or dies, this one gets an error of the backend, or runs into the
        # timeout of the group.
        if isinstance(error, Exception) and not isinstance(error, ReplicationError):
            group = self.process_group
            add_note(error, f"in {self}, rank {group.rank()} of {group.size()}")
            add_note(error, _REMEDY + debugging_advice())

    @property
    def digest(self) -> list[int]:
        """Two numbers, exact in float64, that are equal on all ranks where their calls match."""
        return [_digest(self.name, self.call), self._number]

    def compare(self, length: int = 0) -> list[int]:
        """Raises `ReplicasDiverged` if the calls of the ranks differ. Returns their lengths.

        It is a collective of its own, for which the host waits.
        """
        header = torch.tensor([*self.digest, length], device="cpu")
        rows = gathered(header.to(device_of_group(self.process_group)), self.process_group)
        self.check(rows.tolist())
        return rows[:, 2].tolist()

    def check(self, digests: Sequence[Sequence[float]]) -> None:
        """Raises `ReplicasDiverged`, on every rank, if any two digests differ."""
        self.is_compared = True
        first = digests[0][:2]
        if all(digest[:2] == first for digest in digests):
            return
        # Not pickled, because unpickling could run any code.
        data = str(self).encode()[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")
        rows = gathered(to_tensor(data, self.process_group), self.process_group)
        calls = [
            (tuple(digest[:2]), _printable(to_bytes(row)))
            for digest, row in zip(digests, rows, strict=True)
        ]
        check_same_call(calls, f"`{self.name}`", range(len(calls)), "rank")


@lru_cache(maxsize=1024)
def _digest(name: str, call: Signature) -> int:
    return int.from_bytes(sha256(f"{name}: {call}".encode()).digest()[:6], "big")


def ranks_debug() -> bool:
    """Whether ranks compare all calls, by ``TORCH_DISTRIBUTED_DEBUG``."""
    # By its value, because every call returns a new object, which takes long to compare.
    return distributed.get_debug_level().value > 0  # type: ignore[attr-defined, no-any-return]


def debugging_advice() -> str:
    advice = " Set TORCH_DISTRIBUTED_DEBUG=INFO in the environment to compare the calls"
    return "" if ranks_debug() else advice


def gathered(tensor: Tensor, process_group: Any) -> Tensor:
    """Stacks contiguous tensors of all ranks, of one shape."""
    size = process_group.size()
    if not tensor.is_cpu and tensor.numel():  # a list would be copied row by row
        rows = tensor.new_empty(size * tensor.numel())
        all_gather_single(rows, tensor, process_group)
        return rows.view(size, *tensor.shape)
    rows = tensor.new_empty(size, *tensor.shape)
    if rows.numel():
        all_gather_rows(rows, tensor, process_group)
    return rows


def to_tensor(data: bytes, process_group: Any) -> Tensor:
    tensor = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    return tensor.to(device_of_group(process_group))


def to_bytes(tensor: Tensor) -> bytes:
    """Returns the values of a vector of bytes, without NumPy."""
    tensor = tensor.cpu()
    return string_at(tensor.data_ptr(), len(tensor))


def _printable(encoded: bytes) -> str:
    text = encoded.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "\ufffd" for c in text)
