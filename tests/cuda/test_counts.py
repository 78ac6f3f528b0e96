"""What a layer makes the host do, counted by the runtime, is what the page says."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks import host, launches, processes, simulated
from benchmarks.measuring import marked
from tests.cuda.matrix import DEVICES, skip_file_without
from tests.cuda.runtime import LAZY, needs_simulation

skip_file_without(2)
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    needs_simulation,
    # The counts are made in another process, with its own devices.
    pytest.mark.skipif(LAZY or len(DEVICES) != 2, reason="counted once: with two devices"),
]

OURS = f"syncbn, each of {launches.RANKS} ranks"


@pytest.fixture(scope="module")
def counts() -> Any:
    return simulated.call("benchmarks.launches:everything", devices=4, computes=False)


def test_the_page_has_what_is_counted(counts, monkeypatch):
    """If this fails: ``python -m benchmarks.launches --write``."""
    monkeypatch.setattr(simulated, "call", lambda *arguments, **options: counts)
    _, text, _ = marked(launches.PAGE.read_text("utf-8"), "launches")
    assert text == launches.table()


def test_a_rank_makes_one_collective_each_way_and_its_host_never_waits(counts):
    usual = counts[f"each of {launches.RANKS} ranks"]["syncbn"]
    for both in (usual, *counts[OURS].values()):
        for found in both:
            assert found["collectives"] == 1
            assert found["waits"] == found["host"] == found["copies"] == 0


def test_replicas_never_let_the_host_wait(counts):
    for number in launches.REPLICAS:
        for found in counts[f"{number} replicas"]["syncbn in DataParallel"]:
            assert found["waits"] == found["host"] == found["collectives"] == 0


def test_a_layer_launches_less_than_torchs(counts):
    usual = counts[f"each of {launches.RANKS} ranks"]
    (forward, backward), (torchs_forward, torchs_backward) = (
        [found["launches"] for found in usual[way]] for way in ("syncbn", "nn.SyncBatchNorm")
    )
    assert forward < torchs_forward / 2
    assert backward <= torchs_backward
    assert usual["nn.SyncBatchNorm"][0]["waits"] == 3


def test_the_hosts_time_is_measured():
    for table, ways in zip(
        host.tables(0, [2]), (host.WAYS, processes.ON_ACCELERATORS), strict=True
    ):
        (row,) = table.rows
        assert list(row.figures) == list(ways)
        assert all(value > 0 for own in row.figures.values() for value in own)


@pytest.mark.parametrize("case", ["momentum=None", "all in bfloat16"])
def test_what_the_merging_kernel_does_not_take_costs_four_launches(counts, case):
    """Both ways together: a momentum that is a tensor, and buffers in half precision."""
    usual, other = (
        sum(found["launches"] for found in both)
        for both in (counts[f"each of {launches.RANKS} ranks"]["syncbn"], counts[OURS][case])
    )
    assert usual < other <= usual + 4


@pytest.mark.parametrize("number", launches.REPLICAS)
def test_vectors_travel_to_each_other_device_in_one_copy_each_way(counts, number):
    forward, backward = counts[f"{number} replicas"]["syncbn in DataParallel"]
    assert forward["copies"] == backward["copies"] == 2 * (number - 1)


def test_a_shard_is_read_twice_each_way(counts):
    """By the four kernels that pass over it; the others compute with vectors."""
    forward, backward = counts[f"each of {launches.RANKS} ranks"]["syncbn"]
    for found, kernels in (
        (forward, ("batch_norm_collect_statistics_kernel", "batch_norm_transform_input_kernel")),
        (backward, ("batch_norm_backward_reduce_kernel", "batch_norm_backward_elemt_kernel")),
    ):
        assert [found[name] for name in kernels] == [1, 1]
