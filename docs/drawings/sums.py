"""Draws the two orders of summation: the ordered sum and the tree sum."""

from __future__ import annotations

from drawings import svg

CHUNK, LANES, ROWS = 32, 256, 16


def drawings() -> dict[str, str]:
    """The drawings, by file name."""
    return {"ordered_sum.svg": _ordered(), "tree_sum.svg": _tree()}


def _cells(left: float, top: float, labels: list[str], width: float, colour: str = "hf-box") -> list[str]:
    parts = []
    for number, label in enumerate(labels):
        x = left + number * width
        parts.append(svg.box(x + 1, top, width - 2, 26, colour, radius=3))
        ink = "hf-ink" if colour == "hf-box" else "hf-paper"
        parts.append(svg.text(x + width / 2, top + 17, label, anchor="middle", size=11, colour=ink))
    return parts


def _ordered() -> str:
    """Chunks of 32 terms, each summed from first to last, then the sums of the chunks."""
    width, height = 760.0, 268.0
    parts = [svg.text(16, 24, "terms, in ascending order of where they come from", bold=True)]
    lefts = (16.0, 264.0, 512.0)
    for number, left in enumerate(lefts):
        first = number * CHUNK
        labels = [f"t{first}", f"t{first + 1}", f"t{first + 2}", "…", f"t{first + CHUNK - 1}"]
        parts += _cells(left, 36, labels, 46)
        parts.append(svg.arrow((left + 8, 76), (left + 222, 76), "hf-line-a"))
        words = f"+0.0 + t{first} + t{first + 1} + … , one after another"
        parts.append(svg.text(left + 115, 94, words, anchor="middle", size=11, colour="hf-muted"))
        parts.append(svg.arrow((left + 115, 100), (left + 115, 122), "hf-axis"))
        parts += _cells(left + 80, 126, [f"sum of chunk {number}"], 100)
    parts.append(svg.text(746, 54, "…"))
    parts.append(
        svg.text(16, 180, "sums of chunks: the same again, in chunks of 32, until one is left", bold=True)
    )
    parts += _cells(16, 192, ["chunk 0", "chunk 1", "chunk 2", "…", "chunk 31"], 80)
    parts.append(svg.arrow((24, 232), (408, 232), "hf-line-a"))
    parts.append(
        svg.text(216, 250, "+0.0 + chunk 0 + chunk 1 + …", anchor="middle", size=11, colour="hf-muted")
    )
    parts.append(svg.arrow((420, 205), (478, 205), "hf-axis"))
    parts += _cells(484, 192, ["the sum, rounded once"], 170)
    return svg.drawing(width, height, "The ordered sum: chunks of 32, one after another", parts)


def _tree() -> str:
    """A block of 16 rows and 256 lanes: each lane sums its rows, then adjacent lanes are added pairwise."""
    left, cell = 110.0, 64.0
    parts = [svg.text(16, 24, f"one block: {ROWS * LANES} terms, {ROWS} rows of {LANES} lanes", bold=True)]
    lanes = ("lane 0", "lane 1", "lane 2", "lane 3", "…", f"lane {LANES - 2}", f"lane {LANES - 1}")
    starts = (0, 1, 2, 3, None, LANES - 2, LANES - 1)
    for number, lane in enumerate(lanes):
        x = left + number * cell + cell / 2
        parts.append(svg.text(x, 46, lane, anchor="middle", size=11, colour="hf-muted"))
    for row, offset in enumerate((0, 1, None, ROWS - 1)):
        top = 54.0 + 30 * row
        parts.append(svg.text(left - 12, top + 17, "…" if offset is None else f"row {offset}", anchor="end"))
        labels = ["…" if s is None or offset is None else f"t{offset * LANES + s}" for s in starts]
        parts += _cells(left, top, labels, cell)
    down = left + len(lanes) * cell + 18
    parts.append(svg.arrow((down, 56), (down, 172), "hf-line-a"))
    parts.append(svg.text(down + 8, 110, "1. each lane adds", size=11))
    parts.append(svg.text(down + 8, 125, "its rows in order,", size=11))
    parts.append(svg.text(down + 8, 140, "from +0.0", size=11))
    top = 196.0
    parts += _cells(left, top, ["L0", "L1", "L2", "L3", "…", f"L{LANES - 2}", f"L{LANES - 1}"], cell)
    parts.append(svg.text(left - 12, top + 17, "256 lanes", anchor="end"))
    for pair, words in ((0, "L0 + L1"), (2, "L2 + L3"), (5, "L254 + L255")):
        x = left + pair * cell
        for lane in (x + cell / 2, x + 1.5 * cell):
            parts.append(svg.line((lane, top + 26), (x + cell, top + 50), "hf-line-a", width=1.4))
        parts += _cells(x + cell * 0.35, top + 50, [words], cell * 1.3)
    parts.append(svg.text(left - 12, top + 67, "128 sums", anchor="end"))
    parts.append(svg.text(down + 8, top + 40, "2. neighbours are", size=11))
    parts.append(svg.text(down + 8, top + 55, "added: 256 to 128,", size=11))
    parts.append(svg.text(down + 8, top + 70, "64, …, 1", size=11))
    parts.append(
        svg.text(
            16,
            top + 110,
            "3. The sums of the blocks are terms again: 4096 of them make the next block, until one is left.",
        )
    )
    return svg.drawing(720, 322, "The tree sum: blocks of 16 rows and 256 lanes", parts)
