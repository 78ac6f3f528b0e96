"""All settings of the audit. Nothing here, nor in the files it reads, uses this toolkit."""

from __future__ import annotations

import torch
import torch.distributed.nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.audit.common import Arguments
from benchmarks.audit.contrastive import (
    of_open_clip,
    of_pytorch_metric_learning,
    of_sentence_transformers,
)
from benchmarks.audit.quantizers import of_vector_quantize_pytorch
from benchmarks.audit.self_supervised import of_lightly, of_stable_pretraining

SETTINGS = {
    setting.key: setting
    for settings in (
        of_lightly,
        of_stable_pretraining,
        of_open_clip,
        of_pytorch_metric_learning,
        of_vector_quantize_pytorch,
        of_sentence_transformers,
    )
    for setting in settings()
}

#: The distributions, in the order of the table.
LIBRARIES = list(dict.fromkeys(setting.library for setting in SETTINGS.values()))


def made(key: str, samples: int) -> Arguments:
    """The model, the batch, the loss and the targets of a setting, and DDP."""
    torch.manual_seed(0)
    return SETTINGS[key].make(samples) | {"wrap": DistributedDataParallel}
