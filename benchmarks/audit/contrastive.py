"""Losses of open_clip, pytorch-metric-learning and sentence-transformers."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional as F

from benchmarks.audit.common import Arguments, Embedding, Setting, imported, views


class Clip(nn.Module):
    """Two encoders with a learned temperature, and a bias where the loss takes one."""

    def __init__(self, has_bias: bool) -> None:
        super().__init__()
        self.visual, self.text = nn.Linear(5, 6), nn.Linear(5, 6)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))
        self.logit_bias = nn.Parameter(torch.tensor(-1.0)) if has_bias else None

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        images = F.normalize(self.visual(x[:, 0]), dim=-1)
        texts = F.normalize(self.text(x[:, 1]), dim=-1)
        bias = () if self.logit_bias is None else (self.logit_bias,)
        return images, texts, self.logit_scale.exp(), *bias


def clip(name: str, **options: Any) -> Callable[[int], Arguments]:
    def made(samples: int) -> Arguments:
        rank, size = distributed.get_rank(), distributed.get_world_size()
        loss = getattr(imported("open_clip.loss"), name)(rank=rank, world_size=size, **options)
        model = Clip(has_bias=name == "SigLipLoss")
        batch = torch.randn(samples, 2, 5)
        return {"model": model, "batch": batch, "loss": lambda z: loss(*z)}

    return made


def of_open_clip() -> list[Setting]:
    library, numbers = "open_clip_torch", "the naive method's results, one to one"
    written = "ClipLoss(local_loss=True, gather_with_grad=True)"
    both = clip("ClipLoss", local_loss=True, gather_with_grad=True)
    with_grad = clip("ClipLoss", gather_with_grad=True)
    return [
        Setting(library, "ClipLoss()", "nothing", clip("ClipLoss")),
        Setting(
            library, "ClipLoss(local_loss=True)", "nothing", clip("ClipLoss", local_loss=True)
        ),
        Setting(library, "ClipLoss(gather_with_grad=True)", "nothing", with_grad),
        Setting(library, written, numbers, both),
        *(
            Setting(library, f'SigLipLoss(dist_impl="{how}")', "nothing", made)
            for how in ("bidir", "shift", "reduce", "gather")
            for made in (clip("SigLipLoss", dist_impl=how),)
        ),
    ]


# -- pytorch-metric-learning ---------------------------------------------------------------------


def wrapped(name: str, efficient: bool) -> Callable[[int], Arguments]:
    def made(samples: int) -> Arguments:
        losses = import_module("pytorch_metric_learning.losses")
        wrapper = import_module("pytorch_metric_learning.utils.distributed").DistributedLossWrapper
        inner = wrapper(getattr(losses, name)(), efficient=efficient)
        return {
            "model": Embedding(),
            "batch": torch.randn(samples, 5),
            "targets": torch.tensor([0, 1, 0, 1, 1, 0, 2, 2])[:samples],
            "loss": lambda z, labels: inner(z, labels),
        }

    return made


def of_pytorch_metric_learning() -> list[Setting]:
    library = "pytorch-metric-learning"
    promises = {False: "the gradients of one process", True: "other gradients"}
    return [
        Setting(library, f"{name}(), wrapped, efficient={efficient}", promise, made)
        for efficient, promise in promises.items()
        for name in ("NTXentLoss", "ContrastiveLoss", "SupConLoss", "TripletMarginLoss")
        for made in (wrapped(name, efficient),)
    ]


# -- sentence-transformers -----------------------------------------------------------------------


def ranking(**options: Any) -> Callable[[int], Arguments]:
    def make() -> Any:
        logging.getLogger("sentence_transformers").setLevel(logging.ERROR)
        losses = import_module("sentence_transformers.sentence_transformer.losses")
        return losses.MultipleNegativesRankingLoss(None, **options)

    return views(make, lambda loss, a, b: loss.compute_loss_from_embeddings([a, b], None))


def of_sentence_transformers() -> list[Setting]:
    library, name = "sentence-transformers", "MultipleNegativesRankingLoss"
    gathers = {"gather_across_devices": True}
    written, promise = f"{name}(gather_across_devices=True", "embeddings of all devices"
    two = ("query_to_doc", "doc_to_query")
    four = (*two, "query_to_query", "doc_to_doc")
    return [
        Setting(library, f"{name}()", "candidates of the same device", ranking()),
        Setting(library, f"{written})", promise, ranking(**gathers)),
        Setting(library, f"{written}), 2 directions", promise, ranking(directions=two, **gathers)),
        Setting(
            library, f"{written}), 4 directions", promise, ranking(directions=four, **gathers)
        ),
    ]
