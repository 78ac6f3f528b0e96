"""Headers, in which the ranks of a process group describe their calls to each other.

Ranks compare their calls before tensors travel. A received header may come from an untrusted
process, so it has a fixed size and is never unpickled. Its texts are for messages. The one number
that a rank acts upon, the length of a tensor, is first checked by `check_lengths`.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from struct import Struct
from typing import NamedTuple

import torch

from replication.devices import memory_of
from replication.errors import ReplicationError
from replication.groups.base import Call

__all__: list[str] = []

#: The length, the digest, the layer and the text. Texts that are too long are cut.
_LAYOUT = Struct("<q32s128s344s")

_CPU = torch.device("cpu")


class CallHeader(NamedTuple):
    """The description of a rank's call."""

    #: The first dimension of the tensor, if it may differ between the ranks.
    length: int
    #: The hash of everything that must match.
    digest: bytes
    #: The layer and the number of its call.
    where: str
    #: The call, for messages.
    text: str

    @classmethod
    def of(cls, call: Call) -> CallHeader:
        """Describes a call."""
        shape = call.layouts[0][1] if call.any_length else ()
        digest = sha256(repr(call.matching_key()).encode()).digest()
        return cls(shape[0] if shape else 0, digest, call.where, str(call))

    def matching_key(self) -> bytes:
        """Returns a key that is equal for matching calls."""
        return self.digest

    def __str__(self) -> str:
        return self.text

    def pack(self) -> bytes:
        """Returns the header as bytes, always of the same length."""
        return _LAYOUT.pack(self.length, self.digest, self.where.encode(), self.text.encode())

    @classmethod
    def unpack(cls, packed: bytes) -> CallHeader:
        """Reads a header from any bytes of that length."""
        length, digest, where, text = _LAYOUT.unpack(packed)
        return cls(length, digest, _text(where), _text(text))


def _text(encoded: bytes) -> str:
    """Decodes a text; characters that could deceive the reader of a log are replaced."""
    text = encoded.rstrip(b"\0").decode(errors="replace")
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


def check_lengths(
    lengths: Sequence[float], item_bytes: int, where: str, device: torch.device = _CPU
) -> None:
    """Raises ReplicationError if a rank announces an impossible number of items.

    Each rank gathers as many items from all ranks as the longest has, in the memory of ``device``.
    """
    most = memory_of(device) // (max(item_bytes, 1) * len(lengths))
    for rank, length in enumerate(lengths):
        if not (0 <= length <= most and length == int(length)):  # false for NaN
            raise ReplicationError(
                f"{where}: a length must be a whole number from 0 to {most} here, and rank {rank} "
                f"announces {length}; do all ranks run the same program, and no other process?"
            )
