"""Tables of results, as text and as HTML."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest
import torch
from torch import nn

from replication import WaitReport
from replication.diagnosis.table import Table, as_html, as_text
from syncbn import convert_model, summary, verify

TABLE = Table(["layer", "n"], [["`a`", "10"], ["`long.er`", "9"]], ["head"], ["end"], 1)


def words_of(html: str) -> list[list[str]]:
    """The words in each line of HTML whose tags are closed in order."""
    lines = [tag for tag in ElementTree.fromstring(html).iter() if tag.tag in ("tr", "p")]
    cells = [[*line] if line.tag == "tr" else [line] for line in lines]
    return [" ".join("".join(cell.itertext()) for cell in line).split() for line in cells]


def test_text_is_aligned_and_numbers_are_aligned_to_the_right():
    expected = ["head", "layer       n", "`a`        10", "`long.er`   9", "end"]
    assert as_text(TABLE).splitlines() == expected
    cells = ElementTree.fromstring(as_html(TABLE)).iter("td")
    assert [cell.get("style") for cell in cells] == ["text-align: left", "text-align: right"] * 2


class Norm(nn.BatchNorm1d):
    """A layer that is left alone."""


Norm.__name__ = "<script>alert(1)</script>"


def results() -> list[object]:
    net = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)))
    plain = nn.Sequential()
    plain.add_module("<b>&", Norm(3))
    report, x = WaitReport(), torch.randn(6, 3)
    report.add_forward(2)
    report.add("<b>&", 0, 0.5)
    summaries = [summary(model) for model in (net, plain, nn.ReLU())]
    return [*summaries, verify(net, x), verify(plain, x), report, WaitReport()]


@pytest.mark.parametrize("result", results(), ids=lambda result: type(result).__name__)
def test_results_show_as_tables_with_the_words_of_the_text(result):
    assert repr(result) == str(result)
    text = [line.replace("`", "").split() for line in str(result).splitlines()]
    assert words_of(result._repr_html_()) == text
