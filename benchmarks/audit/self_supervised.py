"""Losses of lightly and of stable-pretraining."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.audit.common import Setting, imported, normalized_over_ranks, views

BALANCED = "normalized with the statistics of all ranks"


def lightly(file: str, name: str, **options: Any) -> Callable[[], Any]:
    def make() -> Any:
        loss = getattr(imported(f"lightly.loss.{file}"), name)(**options)
        if hasattr(loss, "memory_bank"):  # has no size here, so nothing else sets its pointer
            loss.memory_bank.bank_ptr.zero_()
        return loss

    return make


def regions(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    """Each image has two regions, the halves of its embedding."""
    masks = torch.tensor([[0, 1]]).expand(len(a), 2)
    return loss(a.unflatten(1, (2, 3)), b.unflatten(1, (2, 3)), masks, masks)


def joint(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    both = torch.stack((a, b))
    return loss(local_proj=both, global_proj=both)


def joint_with_seed(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    torch.manual_seed(0)
    return joint(loss, a, b)


def with_prototypes(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    drawn = torch.randn(4, 6, generator=torch.Generator().manual_seed(1))
    return loss(a, b.detach(), drawn.to(a))


def swapped(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    return loss([a, b], [])


def of_teacher(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    """The network is its own teacher."""
    return loss([a.detach(), b.detach()], [a, b], epoch=0)


def normalized_barlow() -> Any:
    loss = lightly("barlow_twins_loss", "BarlowTwinsLoss", gather_distributed=True)()
    file: Any = imported("lightly.loss.barlow_twins_loss")
    file._normalize = partial(normalized_over_ranks, correction=0, eps_of_variance=1e-5)
    return loss


def weights_over_ranks(a: Tensor, b: Tensor, sigma: float = 0.5) -> Tensor:
    """Weights by negative von Mises-Fisher densities, whose mean over all ranks is 1.

    They are equation 6 of "Decoupled contrastive learning" (Yeh et al., 2021).
    """
    similarities = (a * b).sum(1).detach() / sigma
    whole = torch.cat(distributed.nn.functional.all_gather(similarities))
    return 2 - len(whole) * (similarities - whole.logsumexp(0)).exp()


def weighted_over_ranks() -> Any:
    loss = lightly("dcl_loss", "DCLWLoss", gather_distributed=True)()
    loss.weight_fn = weights_over_ranks
    return loss


def of_lightly() -> list[Setting]:
    """Settings that gather, and some with one thing changed."""
    settings = []

    def add(
        file: str,
        name: str,
        promise: str,
        call: Any = lambda loss, a, b: loss(a, b),
        changed: str = "",
        make: Callable[[], Any] | None = None,
        **more: Any,
    ) -> None:
        option = "sinkhorn_gather_distributed" if name == "SwaVLoss" else "gather_distributed"
        made = make or lightly(file, name, **{option: True}, **more)
        of_views = views(made, call, normalizes=name == "SwaVLoss")
        settings.append(Setting("lightly", f"{name}({option}=True)", promise, of_views, changed))

    negatives, summed = "negatives of all GPUs are gathered", "correlations are summed"
    targets, whole = "targets of all GPUs are gathered", "statistics of the global batch"
    add("ntx_ent_loss", "NTXentLoss", negatives)
    add("dcl_loss", "DCLLoss", negatives)
    add("dcl_loss", "DCLWLoss", f"{negatives}; of the weights, nothing")
    weights = "weights with the sum of all ranks"
    add("dcl_loss", "DCLWLoss", "", changed=weights, make=weighted_over_ranks)
    add("directclr_loss", "DirectCLRLoss", negatives, loss_dim=4)
    add("detcon_loss", "DetConSLoss", "the similarities are those of all GPUs", regions)
    add("vicreg_loss", "VICRegLoss", summed)
    add("tico_loss", "TiCoLoss", summed)
    add("barlow_twins_loss", "BarlowTwinsLoss", f"{summed}; of the normalization, nothing")
    add("barlow_twins_loss", "BarlowTwinsLoss", "", changed=BALANCED, make=normalized_barlow)
    add("lejepa_loss", "LeJEPALoss", whole, joint)
    add("visreg_loss", "VISRegLoss", f"{whole}; of drawn directions, nothing", joint)
    same = "the same directions on all ranks"
    add("visreg_loss", "VISRegLoss", "", joint_with_seed, same)
    add("swav_loss", "SwaVLoss", "features of all GPUs are balanced", swapped)
    add("msn_loss", "MSNLoss", f"{targets}; of the regularizer, nothing", with_prototypes)
    without = "regularization_weight=0"
    add("msn_loss", "MSNLoss", "", with_prototypes, without, regularization_weight=0)
    add("pmsn_loss", "PMSNLoss", f"{targets}; of the regularizer, nothing", with_prototypes)
    dino = lightly("dino_loss", "DINOLoss", output_dim=6, warmup_teacher_temp_epochs=1)
    settings.append(Setting("lightly", "DINOLoss()", "nothing", views(dino, of_teacher)))
    return settings


# -- stable-pretraining --------------------------------------------------------------------------


def stable(name: str, file: str = "joint_embedding") -> Callable[[], Any]:
    return lambda: getattr(imported(f"stable_pretraining.losses.{file}"), name)()


def normalized_stable_barlow() -> Any:
    loss = stable("BarlowTwinsLoss")()
    loss._normalize = partial(normalized_over_ranks, correction=1, eps=1e-5)
    return loss


def distilled(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    """The network is its own teacher, whose probabilities are balanced over all samples."""
    both = torch.stack((a, b))
    count = torch.tensor(2.0 * len(a))
    return loss(both, loss.sinkhorn_knopp_teacher(both.detach(), 0.5, num_samples=count))


def assigned(loss: Any, a: Tensor, b: Tensor) -> Tensor:
    layer = nn.utils.skip_init(nn.Linear, 6, 4, bias=False).to(a).requires_grad_(False)
    nn.init.normal_(layer.weight, generator=torch.Generator().manual_seed(1))
    return loss(a, b, layer)


def of_stable_pretraining() -> list[Setting]:
    library, spans = "stable-pretraining", "negatives span all ranks"
    correlation = "the true global cross-correlation"
    balanced = views(stable("DINOv1Loss", "dino"), distilled, dtype=torch.float32)
    return [
        Setting(library, "NTXEntLoss()", spans, views(stable("NTXEntLoss"))),
        Setting(library, "CLIPLoss()", spans, views(stable("CLIPLoss", "multimodal"))),
        Setting(library, "VICRegLoss()", "nothing", views(stable("VICRegLoss"))),
        Setting(library, "BYOLLoss()", "nothing", views(stable("BYOLLoss"))),
        Setting(library, "BarlowTwinsLoss()", correlation, views(stable("BarlowTwinsLoss"))),
        Setting(library, "BarlowTwinsLoss()", "", views(normalized_stable_barlow), BALANCED),
        Setting(library, "DINOv1Loss()", "samples of all GPUs are balanced", balanced),
        Setting(library, "SwAVLoss()", "nothing", views(stable("SwAVLoss"), assigned)),
    ]
