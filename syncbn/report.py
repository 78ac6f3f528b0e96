"""A table of the layers of a network: which are synchronized, which are not, and why."""

from __future__ import annotations

from collections import Counter
from typing import NamedTuple, get_args

from torch import nn

from replication.checks import check_module
from replication.wording import path_or_root
from syncbn.layers import Kind, KindName, class_name, kind_of, out_of_sight

__all__ = ["Summary", "summary"]


class LayerSummary(NamedTuple):
    """One layer."""

    #: In the network; empty for the network itself.
    path: str
    #: The name of its class.
    layer: str
    kind: Kind


class Summary:
    """The result of `summary`; ``print`` it.

    Attributes:
        layers: All layers that normalize, and all that run replicas, in the order of
            ``named_modules()``: ``path``, ``layer`` (the name of its class), and ``kind``, of
            which ``kind.name`` is ``"synchronized"``, ``"plain"`` (not converted),
            ``"left alone"``, ``"by sample"`` (nothing to synchronize), or ``"wrapper"``, and
            ``kind.note`` says why.
    """

    def __init__(self, layers: tuple[LayerSummary, ...]) -> None:
        self.layers = layers

    def __repr__(self) -> str:
        return f"<{type(self).__name__} of {len(self.layers)} layers>"

    def paths(self, kind: KindName) -> list[str]:
        """The paths of all layers of one kind.

        Raises:
            ValueError: ``kind`` is not one of the kinds.
        """
        if kind not in get_args(KindName):
            raise ValueError(f"expected a kind of {get_args(KindName)} (got {kind!r})")
        return [layer.path for layer in self.layers if layer.kind.name == kind]

    def __str__(self) -> str:
        rows: list[tuple[str, ...]] = [
            (f"`{path_or_root(path)}`", layer, kind.name, kind.note)
            for path, layer, kind in self.layers
            if kind.name != "by sample"
        ]
        by_sample = Counter(la.layer for la in self.layers if la.kind.name == "by sample")
        rows += [
            (f"{count} of them", layer, "by sample", "nothing to synchronize")
            for layer, count in sorted(by_sample.items())
        ]
        if not rows:
            return "No layer normalizes over the batch."
        table = [("path", "layer", "", "note"), *rows]
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        lines = ["  ".join(map(str.ljust, row, widths)).rstrip() for row in table]
        counts = Counter(layer.kind.name for layer in self.layers)
        lines.append(
            f"{counts['synchronized']} synchronized, {counts['plain']} not converted, "
            f"{counts['left alone']} left alone."
        )
        return "\n".join(lines)


def summary(module: nn.Module) -> Summary:
    """Lists the layers of a network that normalize, and says which of them are synchronized.

    Layers in plain lists, tuples and dicts are listed under the path of the attribute: neither
    `convert_model` nor replication finds them.

    >>> from syncbn import convert_model
    >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.GroupNorm(2, 8))
    >>> print(summary(convert_model(net)))
    path       layer                                  note
    `1`        SynchronizedBatchNorm2d  synchronized
    1 of them  GroupNorm                by sample     nothing to synchronize
    1 synchronized, 0 not converted, 0 left alone.

    Args:
        module: A layer or a network, converted or not, wrapped or not.

    Returns:
        The list, to be printed.

    Raises:
        TypeError: ``module`` is not a module.
    """
    check_module(module)
    kinds = [(path, part, kind_of(part)) for path, part in module.named_modules()]
    hidden = Kind("left alone", "in a plain list or dict: use nn.ModuleList or nn.ModuleDict")
    kinds += [(path, layer, hidden) for path, layer in out_of_sight(module)]
    return Summary(
        tuple(
            LayerSummary(path, class_name(part), kind)
            for path, part, kind in kinds
            if kind is not None
        )
    )
