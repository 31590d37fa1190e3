"""Draws docs/images/architecture.svg from the table of imports in docs/architecture.md:

python docs/site/draw_architecture.py
"""

import re
from pathlib import Path

DOCS = Path(__file__).parents[1]
PAGE = DOCS / "architecture.md"
PICTURE = DOCS / "images" / "architecture.svg"

Arrows = dict[str, list[str]]  # a room → the rooms that it imports

BOX, GAP, ROW, MARGIN = (112, 34), 22, 84, 16


def read_table(text: str) -> Arrows:
    """The rows of the table under "| folder | imports |"."""
    table = text.partition("| folder | imports |\n")[2].partition("\n\n")[0]
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \|$", table, flags=re.MULTILINE)
    return {room: re.findall(r"`(\w+)`", imports) for room, imports in rows}


def level(room: str, arrows: Arrows) -> int:
    """The length of the longest chain of imports below a room. A cycle ends in a RecursionError."""
    return max((1 + level(other, arrows) for other in arrows[room]), default=0)


def direct(arrows: Arrows) -> list[tuple[str, str]]:
    """The arrows that no chain of others replaces."""

    def reaches(start: str, end: str) -> bool:
        return end in arrows[start] or any(reaches(other, end) for other in arrows[start])

    return [
        (room, other)
        for room, others in arrows.items()
        for other in others
        if not any(reaches(between, other) for between in others if between != other)
    ]


def draw(arrows: Arrows) -> str:
    """An SVG picture: what imports stands above what is imported."""
    levels = {room: level(room, arrows) for room in arrows}
    top = max(levels.values())
    rows = [[room for room in arrows if levels[room] == n] for n in range(top, -1, -1)]
    (box_width, box_height), widest = BOX, max(map(len, rows))
    width = 2 * MARGIN + widest * box_width + (widest - 1) * GAP
    height = 2 * MARGIN + top * ROW + box_height
    centres = {}
    for n, row in enumerate(rows):
        left = (width - len(row) * box_width - (len(row) - 1) * GAP) / 2
        for i, room in enumerate(row):
            centres[room] = (left + i * (box_width + GAP) + box_width / 2, MARGIN + n * ROW + box_height / 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        'font-family="sans-serif">',
        '<defs><marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0 8 4 0 8z" fill="#78909c"/></marker></defs>',
    ]
    for room, other in direct(arrows):
        (x1, y1), (x2, y2) = centres[room], centres[other]
        y1, y2 = y1 + box_height / 2, y2 - box_height / 2
        bend = (y2 - y1) / 2
        lines.append(
            f'<path d="M{x1:g} {y1:g}C{x1:g} {y1 + bend:g} {x2:g} {y2 - bend:g} {x2:g} {y2:g}" fill="none" '
            f'stroke="#78909c" stroke-width="1.4" marker-end="url(#head)"><title>{room} imports {other}</title></path>'
        )
    for room, (x, y) in centres.items():
        lines.append(
            f'<rect x="{x - box_width / 2:g}" y="{y - box_height / 2:g}" width="{box_width}" height="{box_height}" '
            'rx="6" fill="#eceff1" stroke="#78909c"/>'
            f'<text x="{x:g}" y="{y + 5:g}" font-size="14" text-anchor="middle">{room}</text>'
        )
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(read_table(PAGE.read_text(encoding="utf-8"))), encoding="utf-8")
