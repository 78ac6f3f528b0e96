"""Tables of results, as text and as HTML."""

from __future__ import annotations

from html.parser import HTMLParser

import pytest
import torch
from torch import nn

from replication import WaitReport
from replication.diagnosis.table import Table, as_html, as_text
from syncbn import convert_model, summary, verify


class Reader(HTMLParser):
    """Reads cells and paragraphs, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.lines: list[list[str]] = []
        self.styles: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        assert tag in ("div", "p", "table", "thead", "tbody", "tr", "th", "td", "code")
        self.open.append(tag)
        self.styles += [value for _, value in attrs]
        assert {name for name, _ in attrs} <= {"style"}
        if tag in ("tr", "p"):
            self.lines.append([])
        if tag in ("td", "th", "p"):
            self.lines[-1].append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.lines[-1][-1] += data


def test_text_is_aligned_and_numbers_are_aligned_to_the_right():
    table = Table(["layer", "n"], [["`a`", "10"], ["`long.er`", "9"]], ["head"], ["end"], 1)
    assert as_text(table).splitlines() == [
        "head",
        "layer       n",
        "`a`        10",
        "`long.er`   9",
        "end",
    ]


def test_html_has_the_cells_of_the_text():
    table = Table(["layer", "n"], [["`a`", "10"], ["b", "9"]], ["head"], ["first", "last"], 1)
    found = Reader(as_html(table))
    rows = [["layer", "n"], ["a", "10"], ["b", "9"]]
    assert found.lines == [["head"], *rows, ["first"], ["last"]]
    assert found.styles == ["text-align: left", "text-align: right"] * 3
    assert as_html(table).count("<code>a</code>") == 1


class Norm(nn.BatchNorm1d):
    """A layer that is left alone."""


Norm.__name__ = "<script>alert(1)</script>"


def results() -> list[object]:
    net = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)))
    plain = nn.Sequential()
    plain.add_module("<b>&", Norm(3))
    report = WaitReport()
    report.add_forward(2)
    report.add("<b>&", 0, 0.5)
    x = torch.randn(6, 3)
    return [
        summary(net),
        summary(plain),
        summary(nn.ReLU()),
        verify(net, x),
        verify(plain, x),
        report,
        WaitReport(),
    ]


@pytest.mark.parametrize("result", results(), ids=lambda result: type(result).__name__)
def test_results_show_as_tables(result):
    assert repr(result) == str(result)
    found = Reader(result._repr_html_())
    assert {style.partition(":")[0] for style in found.styles} <= {"text-align"}  # no colors
    text = [line.replace("`", "").split() for line in str(result).splitlines()]
    assert [" ".join(cells).split() for cells in found.lines] == text
