"""Each line that the page gives in place of another toolkit's does what that one did."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import replication
import syncbn
from replication import DataParallel, Scattered, SoloGroup

PAGE = Path(__file__).parent.parent / "docs" / "porting.md"


def rows() -> list[tuple[str, str]]:
    """What is there and what is here, of each row in the tables of toolkits."""
    found = re.findall(r"^\| (.*) \| (.*) \|$", PAGE.read_text("utf-8"), re.MULTILINE)
    return [row for row in found if row[0] not in ("there", "---")]


def codes(item: str) -> list[str]:
    """The code in an item that can be run here, on the CPU."""
    spans = [span for span in re.findall(r"`([^`]+)`", item) if re.search(r"[({]", span)]
    on_cpu = [span.replace("[0, 1]", '["cpu"] * 2').replace("[0])", '["cpu"])') for span in spans]
    on_cpu = [re.sub(r"\((\w+, )?0\)", r'(\1"cpu")', span) for span in on_cpu]
    return [span for span in on_cpu if not span.endswith(":")]


class Net(nn.Sequential):
    """A network that computes its loss if it gets labels, also in a dict as CenterNet's."""

    def forward(self, x, labels=None):
        if isinstance(x, dict):
            x, labels = x["input"], x["hm"]
        scores = super().forward(x)
        if labels is None:
            return scores
        return nn.functional.cross_entropy(scores, labels, reduction="none")


def names() -> dict[str, Any]:
    """What the lines refer to."""
    layer = syncbn.SynchronizedBatchNorm1d(3)
    x, labels = torch.randn(6, 3), torch.randint(3, (6,))
    outputs = Scattered(x.split([2, 4]))
    return {
        **{name: getattr(replication, name) for name in replication.__all__},
        **{name: getattr(syncbn, name) for name in syncbn.__all__},
        **{"torch": torch, "nn": nn, "DataLoader": DataLoader},
        **{"net": Net(nn.Linear(3, 3), layer), "layer": layer, "state": layer.state_dict()},
        **{"x": x, "z": torch.randn(6, 3), "labels": labels, "loss": nn.CrossEntropyLoss()},
        **{
            "batch": {"input": x, "hm": labels},
            "batches": [x, x],
            "boxes": x,
            "outputs": outputs,
            "group": None,
        },
        "parts": Scattered([torch.randn(2, 3, 4), torch.randn(1, 5, 4)]),
        "self": SimpleNamespace(group=SoloGroup()),
        "train_one_batch": lambda x, labels: None,
    }


def run(there: str, **known: Any) -> dict[str, Any]:
    """Runs the lines for the row that begins so; ``_`` is the value of the last."""
    (here,) = {here for begin, here in rows() if begin.startswith(there)}
    scope = {**names(), **known}
    for code in codes(here):
        exec(code if re.match(r"\w+ = ", code) else f"_ = {code}", scope)
    return scope


@pytest.mark.parametrize("there", [there for there, here in rows() if codes(here)])
def test_lines_run(there):
    run(there)


def test_every_toolkit_has_a_table():
    titles = re.findall(r"^##+ (.*)$", PAGE.read_text("utf-8"), re.MULTILINE)
    for toolkit in ("jactorch", "CSAIL", "Encoding", "Detectron", "CenterNet", "apex", "abn"):
        assert any(toolkit in title for title in titles), toolkit
    assert len(rows()) > 25


def test_tensors_of_different_lengths_are_joined_with_their_lengths():
    class Boxes(nn.Module):
        def forward(self, counts):
            return run('`"concat"`', boxes=torch.ones(int(counts.sum()), 4))["_"]

    found = DataParallel(Boxes(), ["cpu"] * 2)(torch.tensor([2, 1, 1, 3]))
    assert found["boxes"].shape == (7, 4)
    assert found["boxes_length"].tolist() == [3, 4]


def test_tensors_of_different_sizes_are_padded():
    parts = [torch.randn(2, 3, 4), torch.randn(1, 5, 4)]
    padded = run('`"pad"`', parts=parts)["_"]
    assert padded.shape == (3, 5, 4)
    assert torch.equal(padded[:2, :3], parts[0]) and torch.equal(padded[2:], parts[1])
    assert not padded[:2, 3:].any()


def test_outputs_that_stay_are_the_list_of_each_replicas_own():
    x = torch.arange(6.0)[:, None].expand(6, 3)
    outputs = run("`batch_outputs=False`", net=nn.Identity(), x=x)["_"]
    assert [part.tolist() for part in outputs] == [x[:3].tolist(), x[3:].tolist()]

    class Two(nn.Module):
        def forward(self, x):
            return x, -x

    outputs = DataParallel(Two(), ["cpu"] * 2, gather_to_one_device=False)(x)
    pairs = run("`DataParallelModel(net)`", outputs=outputs)["_"]
    assert [(a.tolist(), b.tolist()) for a, b in pairs] == [
        (x[:3].tolist(), (-x[:3]).tolist()),
        (x[3:].tolist(), (-x[3:]).tolist()),
    ]


def test_chunks_of_chosen_sizes():
    seen = []

    class Recorded(Net):
        def forward(self, batch):
            seen.append((len(batch["input"]), len(batch["hm"])))
            return super().forward(batch)

    batch = {"input": torch.randn(6, 3), "hm": torch.randint(3, (6,))}
    losses = run("`DataParallel(net, [0, 1], chunk", net=Recorded(), batch=batch)["_"]
    assert sorted(seen) == [(2, 2), (4, 4)]
    torch.testing.assert_close(losses, Net()(batch))


def test_weights_of_inplace_abn():
    state = syncbn.SynchronizedBatchNorm1d(3).state_dict()
    state["weight"] = torch.tensor([0.5, -2.0, 0.0])
    layer = run("weights, used as", state=state)["layer"]
    torch.testing.assert_close(layer.weight.data, torch.tensor([0.50001, 2.00001, 0.00001]))
