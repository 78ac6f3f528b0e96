"""Layers of vector-quantize-pytorch, each with a loss of its own."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, distributed, nn

from benchmarks.audit.common import Arguments, Setting

ENTROPY = {"codebook_size": 16, "entropy_loss_weight": 0.1, "diversity_gamma": 1.0}


class Quantized(nn.Module):
    def __init__(self, quantizer: nn.Module) -> None:
        super().__init__()
        self.encoder, self.quantizer = nn.Linear(5, 4), quantizer

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        quantized, _, loss = self.quantizer(self.encoder(x))[:3]
        return quantized, loss


def quantizer(name: str, **options: Any) -> Callable[[int], Arguments]:
    def made(samples: int) -> Arguments:
        layer = getattr(import_module("vector_quantize_pytorch"), name)(dim=4, **options)
        return {
            "model": Quantized(layer),
            "batch": torch.randn(samples, 3, 5),
            "loss": lambda out: {"outputs": out[0].square().mean(), "auxiliary": out[1].sum()},
        }

    return made


def entropy_with_result(samples: int) -> Arguments:
    file: Any = import_module("vector_quantize_pytorch.lookup_free_quantization")
    functional, size = distributed.nn.functional, distributed.get_world_size()
    file.maybe_distributed_mean = lambda tensor: functional.all_reduce(tensor) / size
    return quantizer("LFQ", **ENTROPY)(samples)


def of_vector_quantize_pytorch() -> list[Setting]:
    library, name = "vector-quantize-pytorch", "VectorQuantize"
    promise = "codebooks synchronize by themselves"
    sizes = {"codebook_size": 8, "threshold_ema_dead_code": 0}
    learned = {"codebook_size": 8, "learnable_codebook": True, "ema_update": False}
    cosine = quantizer(name, use_cosine_sim=True, **sizes)
    entropy = "LFQ(entropy_loss_weight=0.1)"
    dropped = "the result of its all_reduce is used"
    return [
        Setting(library, f"{name}()", promise, quantizer(name, **sizes)),
        Setting(library, f"{name}(use_cosine_sim=True)", promise, cosine),
        Setting(library, f"{name}(learnable_codebook=True)", promise, quantizer(name, **learned)),
        Setting(
            library, "ResidualVQ()", promise, quantizer("ResidualVQ", num_quantizers=2, **sizes)
        ),
        Setting(library, "SimVQ()", "nothing", quantizer("SimVQ", codebook_size=8)),
        Setting(library, entropy, "a mean over ranks, in the code", quantizer("LFQ", **ENTROPY)),
        Setting(library, entropy, "", entropy_with_result, dropped),
    ]
