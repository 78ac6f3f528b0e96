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
    """Reads cells, paragraphs and styles, and checks that tags are closed in order."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.rows: list[list[str]] = []
        self.paragraphs: list[str] = []
        self.styles: list[str] = []
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.tags.add(tag)
        assert {name for name, _ in attrs} <= {"style"}
        self.styles += [value for _, value in attrs]
        if tag == "tr":
            self.rows.append([])
        elif tag in ("td", "th"):
            self.rows[-1].append("")
        elif tag == "p":
            self.paragraphs.append("")

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if "p" in self.open:
            self.paragraphs[-1] += data
        else:
            self.rows[-1][-1] += data


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
    assert found.rows == [["layer", "n"], ["a", "10"], ["b", "9"]]
    assert found.paragraphs == ["head", "first", "last"]
    assert found.styles == ["text-align: left", "text-align: right"] * 3
    assert as_html(table).count("<code>a</code>") == 1


def test_without_rows_there_are_lines_only():
    table = Table((), (), ["nothing"])
    assert as_text(table) == "nothing"
    assert as_html(table) == "<div><p>nothing</p></div>"


class Norm(nn.BatchNorm1d):
    """A layer that is left alone."""


Norm.__name__ = "<script>alert(1)</script>"


def results() -> list[object]:
    net = convert_model(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.GroupNorm(2, 4)))
    plain = nn.Sequential()
    plain.add_module("<b>&`", Norm(3))
    report = WaitReport()
    report.add_forward(2)
    report.add("<b>&`", 0, 0.5)
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
    found = Reader(result._repr_html_())
    assert found.tags <= {"div", "p", "table", "thead", "tbody", "tr", "th", "td", "code"}
    assert {style.partition(":")[0] for style in found.styles} <= {"text-align"}  # no colors

    def words(text: str) -> list[str]:
        return text.replace("`", "").split()

    html = [*found.rows, *([line] for line in found.paragraphs)]
    shown = sorted(words(" ".join(cells)) for cells in html)
    assert shown == sorted(map(words, str(result).splitlines()))


@pytest.mark.parametrize("result", results(), ids=lambda result: type(result).__name__)
def test_interpreters_and_ipython_show_the_text(result):
    assert repr(result) == str(result)
