"""Draws the pictures of the site, `docs/drawings/*.svg`: `python docs/drawings.py`.

They are 360 units wide, so that they are legible on a phone. They have a white background,
because a page's light and dark modes do not reach into an image.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path
from statistics import mean

FOLDER = Path(__file__).with_suffix("")

WIDTH = 360
MARGIN = 12
LINE = 16  # the height of a line of text

INK, GRAY, BLUE, ORANGE = "#1f2328", "#57606a", "#005f94", "#b54f00"
WHITE, PALE = "#ffffff", "#eef0f2"
#: A tint per replica.
TINTS = "#cfe6f7", "#fde2cc", "#d3efdf", "#eadff5"

Point = tuple[float, float]


class Drawing:
    """Shapes on a white card. Lengths are in units, and y grows downwards."""

    def __init__(self, height: int) -> None:
        self.height = height
        self.shapes: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, fill: str = PALE, line: str = GRAY
    ) -> None:
        """Draw a rectangle with its upper left corner at (x, y)."""
        self.shapes.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="4" '
            f'fill="{fill}" stroke="{line}"/>'
        )

    def text(
        self, x: float, y: float, text: str, anchor: str = "middle", color: str = INK, **style: str
    ) -> None:
        """Write one line, centered at height y."""
        styles = "".join(f' {name}="{value}"' for name, value in style.items())
        self.shapes.append(
            f'<text x="{x:g}" y="{y + 4:g}" text-anchor="{anchor}" fill="{color}"{styles}>'
            f"{escape(text)}</text>"
        )

    def left(self, y: float, text: str, color: str = INK, **style: str) -> None:
        """Write one line at the left margin."""
        self.text(MARGIN, y, text, "start", color, **style)

    def title(self, y: float, text: str) -> None:
        """Write a bold line at the left margin."""
        self.left(y, text, **{"font-weight": "bold"})

    def box(
        self, x: float, y: float, width: float, height: float, *lines: str, fill: str = PALE
    ) -> None:
        """Draw a rectangle with lines of text in it."""
        self.rect(x, y, width, height, fill)
        first = y + height / 2 - LINE * (len(lines) - 1) / 2
        for number, line in enumerate(lines):
            self.text(x + width / 2, first + LINE * number, line)

    def line(self, *points: Point, color: str = GRAY, head: bool = True) -> None:
        """Draw an arrow along points; orange ones are dashed, so that color is not all."""
        dashes = ' stroke-dasharray="5 3"' if color == ORANGE else ""
        marker = f' marker-end="url(#{color[1:]})"' if head else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.shapes.append(
            f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"'
            f"{dashes}{marker}/>"
        )

    def legend(self, y: float, text: str, color: str) -> None:
        """Explain the arrows of a color."""
        self.line((MARGIN, y), (MARGIN + 32, y), color=color)
        self.text(MARGIN + 42, y, text, "start", color)

    def svg(self) -> str:
        """The drawing as a file."""
        heads = "".join(
            f'<marker id="{color[1:]}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" '
            f'markerHeight="8" markerUnits="userSpaceOnUse" orient="auto">'
            f'<path d="M0,0 L8,4 L0,8 z" fill="{color}"/></marker>'
            for color in (GRAY, BLUE, ORANGE)
        )
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self.height}" '
                f'width="{WIDTH * 1.25:g}" height="{self.height * 1.25:g}" '
                'font-family="system-ui, sans-serif" font-size="12">',
                f"<defs>{heads}</defs>",
                f'<rect width="{WIDTH}" height="{self.height}" rx="8" fill="{WHITE}"/>',
                *self.shapes,
                "</svg>\n",
            ]
        )


def replicas() -> Drawing:
    """Draw n replicas against one device."""
    drawing = Drawing(438)
    batch = [2, 4, 1, 3, 6, 8, 7, 9]
    shards = [batch[i : i + 2] for i in range(0, len(batch), 2)]
    cell, height, gap = 38, 26, 10

    def panel(
        top: float, title: str, note: str, shards: Sequence[Sequence[int]], means: Sequence[float]
    ) -> None:
        """Draw the samples, what is subtracted from them, and the results."""
        drawing.title(top, title)
        drawing.left(top + LINE, note, GRAY)
        x = float(MARGIN)
        for shard, center, tint in zip(shards, means, TINTS, strict=False):
            drawing.text(x + len(shard) * cell / 2, top + 75, f"− {center}")
            for sample in shard:
                result = f"{sample - center:+}".replace("-", "−")
                drawing.box(x, top + 30, cell, height, f"{sample}", fill=tint)
                drawing.box(x, top + 94, cell, height, result, fill=tint)
                x += cell
            x += gap

    whole = "the mean of the whole batch"
    panel(18, "One device", f"subtracts {whole}", [batch], [mean(batch)])
    panel(
        162,
        "Four replicas, plain BatchNorm",
        "each subtracts its own mean",
        shards,
        [*map(mean, shards)],
    )
    panel(306, "Four replicas, synchronized", f"each subtracts {whole}", shards, [mean(batch)] * 4)
    return drawing


def forward() -> Drawing:
    """Draw the four steps of a forward."""
    drawing = Drawing(392)
    columns, width = (120, 196, 272), 68
    right = columns[-1] + width - columns[0]

    def row(y: float, *lines: str, height: float = 28) -> None:
        for number, (x, tint) in enumerate(zip(columns, TINTS, strict=False)):
            texts = [line.format(number) for line in lines]
            drawing.box(x, y, width, height, *texts, fill=tint)

    def arrows(top: float, bottom: float) -> None:
        for x in columns:
            drawing.line((x + width / 2, top), (x + width / 2, bottom))

    def step(y: float, name: str, note: str) -> None:
        drawing.title(y, name)
        drawing.left(y + LINE, note, GRAY)

    drawing.box(columns[0], 14, right, 28, "batch")
    arrows(42, 72)
    step(50, "scatter", "splits it")
    row(72, "shard {}")
    arrows(100, 138)
    drawing.rect(columns[0] - 8, 138, right + 16, 114, WHITE)
    step(116, "replicate", "copies it")
    drawing.box(MARGIN, 148, 72, 40, "module")
    drawing.line((MARGIN + 72, 168), (columns[0] - 8, 168))
    row(148, "replica {}", "device {}", height=40)
    for x in columns:
        drawing.line((x + 30, 188), (x + 30, 212), color=BLUE)
        drawing.line((x + 42, 212), (x + 42, 188), color=ORANGE)
    drawing.box(columns[0], 212, right, 28, "messages and replies")
    step(214, "parallel_apply", "runs threads")
    arrows(252, 282)
    row(282, "output {}")
    arrows(310, 340)
    step(318, "gather", "joins them")
    drawing.box(columns[0], 340, right, 28, "output of the batch")
    return drawing


def messages() -> Drawing:
    """Draw a master with its slaves, and a group."""
    drawing = Drawing(474)
    drawing.title(20, "Pipes")
    drawing.left(20 + LINE, "Peer 0 is the master. It replies to all.", GRAY)
    drawing.box(100, 54, 160, 42, "peer 0: run_master", "callback merges", fill=TINTS[0])
    for number, x in enumerate((MARGIN, 130, 248), 1):
        drawing.box(x, 158, 100, 42, f"peer {number}", "run_slave", fill=TINTS[number])
        end = 180 + (number - 2) * 46
        drawing.line((x + 42, 158), (end - 8, 96), color=BLUE)
        drawing.line((end + 8, 96), (x + 58, 158), color=ORANGE)

    drawing.title(232, "A group")
    drawing.left(232 + LINE, "The last peer to arrive merges for all.", GRAY)
    for number, tint in enumerate(TINTS):
        x = MARGIN + number * 86
        drawing.box(x, 266, 78, 42, f"peer {number}", "all_reduce", fill=tint)
        drawing.line((x + 39, 308), (x + 39, 336), color=BLUE)
        drawing.line((x + 39, 364), (x + 39, 392), color=ORANGE)
        drawing.box(x, 392, 78, 28, "the sum", fill=tint)
    drawing.box(MARGIN, 336, WIDTH - 2 * MARGIN, 28, "merged in the order of the replicas")
    drawing.legend(438, "message of a peer", BLUE)
    drawing.legend(438 + LINE, "reply to a peer", ORANGE)
    return drawing


DRAWINGS: tuple[Callable[[], Drawing], ...] = (replicas, forward, messages)


def files() -> dict[Path, str]:
    """The content of each file."""
    return {FOLDER / f"{draw.__name__}.svg": draw().svg() for draw in DRAWINGS}


if __name__ == "__main__":
    for path, content in files().items():
        path.write_text(content, "utf-8")
