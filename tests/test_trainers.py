"""Synchronized layers in the hands of other people's trainers."""

from __future__ import annotations

import copy
import os
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from replication import DataParallel
from syncbn import convert_model
from tests.kit.programs import package, run_python
from tests.kit.ranks import needs_gloo

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("library", "launcher"),
    [
        ("accelerate", ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]),
        ("lightning", []),  # which launches the second process itself
    ],
)
def test_two_processes_train_the_network_of_one(library, launcher, tmp_path):
    pytest.importorskip(library, reason=f"pip install '.[{library}]'")
    done = run_python(*launcher, str(EXAMPLES / f"with_{library}.py"), cwd=tmp_path)
    assert done.returncode == 0, done.stderr  # the example checks its weights itself
    assert done.stdout.count("2 processes: off by") == 1


# -- the Trainer of transformers ----------------------------------------------------------------


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
    models = package("transformers")
    sizes = {"embedding_size": 4, "hidden_sizes": [8], "depths": [2], "num_labels": 3}
    return models.ResNetForImageClassification(models.ResNetConfig(num_channels=2, **sizes))


def trainer_of_the_page() -> Any:
    page = (ROOT / "docs" / "libraries.md").read_text("utf-8")
    scope: dict[str, Any] = {}
    exec(re.findall(r"## Hugging.*?^```py\n(.*?)^```$", page, re.DOTALL | re.MULTILINE)[0], scope)
    return scope["ReplicaTrainer"]


def arguments(folder: Path, samples: int, **options: Any) -> Any:
    """Options of the Trainer for few steps on the CPU, with so many samples per device."""
    return package("transformers").TrainingArguments(
        str(folder),
        per_device_train_batch_size=samples,
        per_device_eval_batch_size=samples,
        learning_rate=0.1,
        optim="sgd",
        use_cpu=True,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
        **options,
    )


def trained(net: nn.Module, data: list[Any], replicas: int, options: Any, folder: Path) -> Any:
    """Trains a copy by the class on the page; returns its weights and the final loss."""
    net = copy.deepcopy(net).double()
    args = arguments(folder, 8 // replicas, max_steps=5, **options)
    assert args.n_gpu == 0
    args._n_gpu = replicas  # as on a machine with so many GPUs
    trainer = trainer_of_the_page()(net, args, train_dataset=data, eval_dataset=data)
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
    package("accelerate", "accelerate")

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


def train_under_torchrun(folder: Path) -> None:
    """The program that each rank runs: all ways to convert a network for the Trainer."""
    transformers = package("transformers")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    data = [
        {"pixel_values": torch.tensor([i, i**2, 1, -i, 3, i % 5]).double(), "labels": i % 3}
        for i in range(32)
    ]
    args = arguments(folder, 8 // world, max_steps=4)
    for way in ("before", "page"):
        torch.manual_seed(0)
        net = Classifier().double()
        if way == "before":
            transformers.Trainer(convert_model(net), args, train_dataset=data).train()
        else:
            trainer_of_the_page()(net, args, train_dataset=data).train()
        if args.process_index == 0:
            torch.save(net.state_dict(), folder / f"{way}, {world}.pt")
    if world > 1:  # else a thread of gloo may abort the process at its end
        torch.distributed.barrier()
        torch.distributed.destroy_process_group()


@pytest.mark.slow
@needs_gloo
def test_trainer_of_transformers_trains_under_torchrun_as_in_one_process(tmp_path):
    package("transformers")
    package("accelerate", "accelerate")
    program = tmp_path / "program.py"
    program.write_text(
        "import sys\nfrom pathlib import Path\nfrom tests import test_trainers\n"
        "test_trainers.train_under_torchrun(Path(sys.argv[1]))\n"
    )
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    for options in ([], launcher):
        done = run_python(*options, str(program), str(tmp_path), cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    for way in ("before", "page"):
        expected, actual = (torch.load(tmp_path / f"{way}, {n}.pt") for n in (1, 2))
        torch.testing.assert_close(actual, expected)
