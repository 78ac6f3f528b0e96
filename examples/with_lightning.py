"""Synchronized batch normalization with Lightning: a plugin that converts, and reverts at the end.

    Trainer(strategy="ddp", devices=2, plugins=[SynchronizedBatchNorms()])

Without the plugin, ``convert_model(self.net)`` in the ``__init__`` of the module is enough, and
the layers stay synchronized. Unlike ``sync_batchnorm=True`` both also run on the CPU. Here two
processes train on their shares of each batch, and the network becomes the one that a single
process trains on the whole batches.

    python examples/with_lightning.py
"""

from __future__ import annotations

from collections.abc import Sequence

import lightning
import torch
from lightning.pytorch.plugins import LayerSync
from lightning.pytorch.utilities import rank_zero_only
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from syncbn import convert_model, revert_model


class SynchronizedBatchNorms(LayerSync):
    """Makes batch normalization span all processes while Lightning trains."""

    def apply(self, model: nn.Module) -> nn.Module:
        return convert_model(model)

    def revert(self, model: nn.Module) -> nn.Module:
        return revert_model(model)


class Regression(lightning.LightningModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        torch.manual_seed(0)
        self.data = TensorDataset(torch.randn(64, 4).double(), torch.randn(64, 1).double())
        self.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 1))
        self.double()

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        x, y = batch
        return (self.net(x) - y).square().mean()

    def train_dataloader(self) -> DataLoader:
        """This process' share, in an order that does not depend on how many there are."""
        count, rank = self.trainer.world_size, self.trainer.global_rank
        sampler = DistributedSampler(self.data, count, rank, shuffle=False)
        return DataLoader(self.data, self.batch_size // count, sampler=sampler)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def train(model: Regression, processes: int, plugins: Sequence[LayerSync] = ()) -> nn.Module:
    """Trains one epoch."""
    trainer = lightning.Trainer(
        accelerator="cpu",
        devices=processes,
        strategy="ddp" if processes > 1 else "auto",
        plugins=list(plugins),
        use_distributed_sampler=False,
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model)
    return model.net


if __name__ == "__main__":
    trained = train(Regression(batch_size=8), 2, [SynchronizedBatchNorms()])
    expected = train(Regression(batch_size=8), 1)
    assert type(trained[1]) is nn.BatchNorm1d  # reverted
    state = trained.state_dict()
    off = max((state[k] - v).abs().max().item() for k, v in expected.state_dict().items())
    rank_zero_only(print)(f"2 processes: off by {off:.0e}")
    raise SystemExit(int(off > 1e-10))
