"""Synchronized layers in the hands of other people's trainers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel
from tests.processes import run_python

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize(
    ("package", "launcher"),
    [
        ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        ("lightning", []),  # which launches the second process itself
    ],
)
def test_two_processes_train_the_network_of_one(package, launcher, tmp_path):
    pytest.importorskip(package, reason=f"pip install '.[{package}]'")
    done = run_python(*launcher, str(EXAMPLES / f"with_{package}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # the example checks its weights itself
    assert done.stdout.count("2 processes: off by") == 1


# -- the Trainer of transformers, in one process ------------------------------------------------


class Classifier(nn.Module):
    """Divides its loss by the number of items, which the Trainer passes once per replica."""

    def __init__(self) -> None:
        super().__init__()
        layers = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)
        self.layers = nn.Sequential(*layers)

    def forward(self, pixel_values: Tensor, labels: Tensor, num_items_in_batch: Any = None) -> Any:
        logits = self.layers(pixel_values)
        losses = nn.functional.cross_entropy(logits, labels, reduction="none")
        count = len(labels) if num_items_in_batch is None else num_items_in_batch
        return {"loss": losses.sum() / count, "logits": logits}

    accepts_loss_kwargs = True


def resnet() -> nn.Module:
    """Ignores the number of items, and returns the mean loss of its shard."""
    models = pytest.importorskip("transformers", reason="pip install '.[models]'")
    sizes = {"embedding_size": 4, "hidden_sizes": [8], "depths": [2], "num_labels": 3}
    return models.ResNetForImageClassification(models.ResNetConfig(num_channels=2, **sizes))


def trained(net: nn.Module, data: list[Any], replicas: int, options: Any, folder: Path) -> Any:
    """Trains a copy by the class on the migration page; returns its weights and the final loss."""
    transformers = pytest.importorskip("transformers", reason="pip install '.[models]'")
    net = copy.deepcopy(net).double()
    page = (ROOT / "docs" / "migration.md").read_text("utf-8")
    scope: dict[str, Any] = {}
    exec(re.findall(r"Hugging.*?^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0], scope)
    args = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=8 // replicas,
        per_device_eval_batch_size=8 // replicas,
        learning_rate=0.1,
        optim="sgd",
        max_steps=5,
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )
    assert args.n_gpu == 0
    args._n_gpu = replicas  # as on a machine with so many GPUs
    trainer = scope["ReplicaTrainer"](net, args, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert isinstance(trainer.model_wrapped, DataParallel) == (replicas > 1)
    return net.state_dict(), trainer.evaluate()["eval_loss"]


@pytest.mark.parametrize(
    ("build", "shape", "samples", "options"),
    [
        (Classifier, [6], 31, {}),  # the last batch has shards of 4 and 3
        (resnet, [2, 16, 16], 32, {"average_tokens_across_devices": False}),
    ],
)
def test_trainer_of_transformers_trains_on_replicas_as_on_one_device(
    build, shape, samples, options, tmp_path, monkeypatch
):
    pytest.importorskip("accelerate", reason="pip install '.[accelerate]'")

    def with_cpus(model: Any, module: nn.Module) -> None:
        """Makes torch's wrapper as on a machine with two accelerators, but of CPUs."""
        nn.Module.__init__(model)
        model.module, model.dim, model.device_ids = module, 0, ["cpu"] * 2
        model.output_device = model.src_device_obj = torch.device("cpu")

    monkeypatch.setattr(nn.DataParallel, "__init__", with_cpus)
    net = build()
    data = [
        {"pixel_values": torch.randn(shape, dtype=torch.float64), "labels": torch.tensor(i % 3)}
        for i in range(samples)
    ]
    expected, actual = (trained(net, data, n, options, tmp_path) for n in (1, 2))
    # The Trainer passes the number of items in float32, which makes the loss of a replica float32.
    torch.testing.assert_close(actual, expected, rtol=1e-6, atol=1e-6)
