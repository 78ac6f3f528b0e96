"""`Scattered`: what is spread over the replicas, one entry for each."""

from __future__ import annotations

from typing import Any

__all__ = ["Scattered"]


class Scattered(tuple[Any, ...]):
    """One entry per replica, in replica order.

    `DataParallel` returns it where it does not gather, and takes it apart again among the
    arguments of the next network: entry i goes to replica i, as it is. It may stand for any
    argument, or anywhere inside one. Otherwise it is a tuple; a part of it, or a sum, is a plain
    one::

        features = extract(images)            # gather_to_one_device=False
        doubled = Scattered(2 * f for f in features)
        scores = classify(doubled)

    As ``collate_fn`` of a `torch.utils.data.DataLoader` it makes of n items of a data set, each a
    batch for one replica, the argument for n replicas.
    """

    __slots__ = ()

    def __repr__(self) -> str:
        return f"Scattered{super().__repr__()}"
