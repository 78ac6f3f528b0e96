"""`Collective`: a call that a rank makes, and how ranks find out whether their calls match.

Problem: if one rank makes another call than the others, the backend waits for its timeout, or
crashes, or adds numbers that do not belong together. But a text with each call would cost more
than a small call itself.

Idea: each call has a fingerprint, a number that is equal on all ranks if their calls match. It
travels where the host reads what arrives anyway. Only if the fingerprints of the ranks differ do
they exchange the texts of their calls.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import string_at
from functools import lru_cache
from hashlib import sha256
from typing import Any

import torch
from torch import distributed

from replication._torch import device_of_group, gathered, is_profiling, named_range
from replication.errors import ReplicationError, add_note
from replication.groups.base import Signature, check_same_call

_REMEDY = (
    "First check the other ranks' logs for an earlier error. If there is none, at least one rank "
    "did not make this call. Common causes: a layer is in eval() there; the rank ran out of data "
    "(see replication.JoinableStep); it skipped backward; it used another shape, dtype or layer; "
    "only some ranks are compiled; or DDP has find_unused_parameters=True and the ranks use "
    "different parameters (then pass process_group=torch.distributed.new_group() to the layers)."
)


class Collective:
    """A call that this rank makes.

    The ``signature`` must match on all ranks, and so must the name, which is that of the layer.
    The ``ordinal``, counted from 1 in the group, is only told in messages: a backend connects the
    first call of one rank with the first of the others, the second with the second, and so on.
    """

    # A class, because `contextlib.contextmanager` sets attributes of an error that passes through,
    # which some classes of errors do not allow.

    #: In profiles.
    _range: Any = None

    def __init__(self, process_group: Any, name: str, signature: Signature, ordinal: int) -> None:
        self.process_group, self.name, self.signature = process_group, name, signature
        self.ordinal = ordinal

    def __str__(self) -> str:
        return f"`{self.name}`, call {self.ordinal}: {self.signature}"

    @property
    def fingerprint(self) -> int:
        """A number of 48 bits that is equal on all ranks if their calls match."""
        return _digest(self.name, self.signature)

    @property
    def number(self) -> int:
        """As many bits of the fingerprint as leave its sum over the ranks exact in float32."""
        size: int = self.process_group.size()
        return self.fingerprint >> (24 + (size - 1).bit_length())

    def __enter__(self) -> Collective:
        """Names the call in profiles, and in errors of the ``with`` block."""
        if is_profiling():
            self._range = named_range(f"exchange {self.name}, rank {self.process_group.rank()}")
            self._range.__enter__()
        if compares_all_calls():
            # Python closes no block whose `__enter__` raises.
            try:
                self.compare_lengths()
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
            advice = " Set TORCH_DISTRIBUTED_DEBUG=INFO in the environment to compare the calls."
            add_note(error, f"in {self}, rank {group.rank()} of {group.size()}")
            add_note(error, _REMEDY + advice * (not compares_all_calls()))

    def compare_lengths(self, length: int = 0) -> list[int]:
        """Returns the lengths of all ranks. Raises `ReplicasDiverged` if their calls differ.

        It is a separate collective, for which the host waits.
        """
        fingerprints, lengths = self._gather_integers(self.fingerprint, length)
        self.check(fingerprints)
        return lengths

    def check(self, fingerprints: Sequence[float]) -> None:
        """Raises `ReplicasDiverged`, on every rank, if any two fingerprints of ranks differ."""
        if fingerprints.count(fingerprints[0]) == len(fingerprints):
            return
        text = str(self).encode()
        (lengths,) = self._gather_integers(len(text))
        # As plain bytes, because unpickling could run any code.
        texts = [part.decode(errors="replace") for part in self.gather_bytes(text, lengths)]
        calls = list(zip(fingerprints, texts, strict=True))
        check_same_call(calls, f"`{self.name}`", range(len(calls)), "rank")

    def gather_bytes(self, data: bytes, lengths: Sequence[int]) -> list[bytes]:
        """Returns the bytes of all ranks, given how many each has."""
        padded = bytearray(data.ljust(max(lengths), b"\0"))
        vector = torch.frombuffer(padded, dtype=torch.uint8)
        rows = gathered(vector.to(device_of_group(self.process_group)), self.process_group).cpu()
        # By their addresses, because `Tensor.numpy` needs NumPy, and `tolist` takes much longer.
        return [string_at(row.data_ptr(), n) for row, n in zip(rows, lengths, strict=True)]

    def _gather_integers(self, *own: int) -> list[list[int]]:
        vector = torch.tensor(own, device="cpu").to(device_of_group(self.process_group))
        return gathered(vector, self.process_group).t().tolist()


@lru_cache(maxsize=1024)
def _digest(name: str, signature: Signature) -> int:
    return int.from_bytes(sha256(f"{name}: {signature}".encode()).digest()[:6], "big")


def compares_all_calls() -> bool:
    """Whether ranks compare each call before they make it, by ``TORCH_DISTRIBUTED_DEBUG``."""
    # By its value, because every call returns a new object, which takes long to compare.
    return distributed.get_debug_level().value > 0  # type: ignore[attr-defined, no-any-return]
