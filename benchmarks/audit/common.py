"""What a setting is, and how the package of its loss is imported."""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.machinery import ModuleSpec
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

#: Folders of which no ``__init__`` runs, by the package whose losses are in them. It imports
#: torchvision, or tools for training, which these losses don't use.
WITHOUT_INIT = {
    "lightly": ("lightly.loss", "lightly.models", "lightly.models.modules"),
    "open_clip": ("open_clip",),
    "stable_pretraining": (
        "stable_pretraining",
        "stable_pretraining.losses",
        "stable_pretraining.utils",
    ),
}

Arguments = dict[str, Any]


class Setting(NamedTuple):
    """A loss with its options, as its users call it on several ranks."""

    #: The name of its distribution, as pip knows it.
    library: str
    #: As users write it.
    name: str
    #: What its documentation says of several ranks, in our words.
    promise: str
    #: From the number of samples to ``model``, ``batch``, ``loss``, and perhaps ``targets``.
    make: Callable[[int], Arguments]
    #: What was changed, to show where a difference comes from.
    changed: str = ""

    @property
    def key(self) -> str:
        return f"{self.library}: {self.name}" + (f", {self.changed}" if self.changed else "")


# -- imports -------------------------------------------------------------------------------------


def imported(name: str) -> ModuleType:
    """A module of a package, without what `WITHOUT_INIT` leaves out."""
    folders = WITHOUT_INIT.get(name.partition(".")[0], ())
    if folders:
        _see_to_torchvision()
    for folder in folders:
        if folder not in sys.modules:
            _add_without_init(folder)
    return import_module(name)


def _unavailable(*_: Any) -> NoReturn:
    raise NotImplementedError("the audit replaces torchvision, because it can't be imported here")


def _see_to_torchvision() -> None:
    """Files beside the losses take two names from torchvision, which may not be installed."""
    try:
        import_module("torchvision.ops")
    except (ImportError, RuntimeError):  # the latter if it was built for another torch
        for name in ("torchvision", "torchvision.ops"):
            sys.modules[name] = ModuleType(name)
        names = dict.fromkeys(("StochasticDepth", "roi_align"), _unavailable)
        vars(sys.modules["torchvision.ops"]).update(names)


def _add_without_init(folder: str) -> None:
    parent, _, own = folder.rpartition(".")
    if parent:
        locations = [f"{path}/{own}" for path in import_module(parent).__path__]
    else:
        found = find_spec(folder)
        if found is None:
            raise ModuleNotFoundError(f"No module named {folder!r}", name=folder)
        locations = list(found.submodule_search_locations or ())
    spec = ModuleSpec(folder, None, is_package=True)
    spec.submodule_search_locations = locations
    sys.modules[folder] = module_from_spec(spec)
    if folder == "stable_pretraining.utils":  # the losses import functions from the folder itself
        functions = vars(import_module(f"{folder}.distributed"))
        vars(sys.modules[folder]).update({k: v for k, v in functions.items() if k[0] != "_"})


# -- settings with two views ---------------------------------------------------------------------


class Embedding(nn.Module):
    """``(..., 5)`` to embeddings ``(..., 6)``."""

    def __init__(self, normalizes: bool = False) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6))
        self.normalizes = normalizes

    def forward(self, x: Tensor) -> Tensor:
        z = self.body(x)
        return F.normalize(z, dim=-1) if self.normalizes else z


class OfViews(nn.Module):
    """A loss of two views as one of the model's output, so that its buffers are compared."""

    def __init__(self, inner: Any, call: Callable[..., Tensor]) -> None:
        super().__init__()
        self.inner, self.call = inner, call

    def forward(self, z: Tensor) -> Tensor:
        return self.call(self.inner, z[:, 0], z[:, 1])


def views(
    make: Callable[[], Any],
    call: Callable[..., Tensor] = lambda loss, a, b: loss(a, b),
    *,
    normalizes: bool = False,
    **options: Any,
) -> Callable[[int], Arguments]:
    """Two views of each sample, and a loss of their embeddings."""

    def made(samples: int) -> Arguments:
        model, loss = Embedding(normalizes), OfViews(make(), call)
        return {"model": model, "batch": torch.randn(samples, 2, 5), "loss": loss, **options}

    return made


def normalized_over_ranks(
    z: Tensor, *, correction: int, eps_of_variance: float = 0.0, eps: float = 0.0
) -> Tensor:
    """What the normalization of the whole batch gives a rank, with its derivative."""
    whole = torch.cat(distributed.nn.functional.all_gather(z))
    scale = (whole.var(0, correction=correction) + eps_of_variance).sqrt() + eps
    return (z - whole.mean(0)) / scale
