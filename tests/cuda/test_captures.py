"""Training steps between ranks are captured by `torch.cuda.graph`, and replays compute them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.cuda import capture_cases
from tests.cuda.launched import Ranks
from tests.cuda.matrix import OPTIONS, SIZES, skip_file_without

skip_file_without(2)
pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    started = Ranks(2)
    yield started
    started.close()


@pytest.mark.parametrize("split", SIZES)
def test_a_step_is_captured_with_shards_of_any_size(ranks, split):
    ranks.run(capture_cases.replays_a_step, "alone", split, {}, "syncbn")


@pytest.mark.parametrize("options", [options for options in OPTIONS if "affine" not in options])
def test_a_step_is_captured_with_any_options(ranks, options):
    ranks.run(capture_cases.replays_a_step, "alone", "last empty", options, "syncbn")


@pytest.mark.parametrize("split", ["even", "last empty"])
def test_a_step_is_captured_in_ddp(ranks, split):
    ranks.run(capture_cases.replays_a_step, "DDP", split, {}, "syncbn")


def test_torchs_layer_is_captured_as_well(ranks):
    ranks.run(capture_cases.replays_a_step, "alone", "even", {}, "nn.SyncBatchNorm")


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_step_with_autocast_is_captured(ranks, dtype):
    ranks.run(capture_cases.captures_with_autocast, dtype)


@pytest.mark.parametrize(
    "name", ["all_reduce", "mean", "broadcast", "all_gather", "reduce_scatter"]
)
def test_a_collective_is_captured(ranks, name):
    ranks.run(capture_cases.captures_a_collective, name)
