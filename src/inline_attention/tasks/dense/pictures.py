"""Pictures in rows and columns, for the examples of a run."""

from collections.abc import Sequence

from PIL import Image, ImageDraw

_HEADING = 20  # pixels


def in_rows(
    rows: Sequence[Sequence[Image.Image]], headings: Sequence[str], *, width: int = 480, below: int = 0
) -> Image.Image:
    """Rows of pictures under headings, resized to `width` or to twice that height. `below`: white pixels at the end."""
    resized = []
    for row in rows:
        scale = min(width / row[0].width, 2 * width / row[0].height)
        size = (max(1, round(scale * row[0].width)), max(1, round(scale * row[0].height)))
        resized.append([cell.resize(size, Image.Resampling.BILINEAR) for cell in row])
    top = _HEADING
    height = top + sum(row[0].height for row in resized) + below
    picture = Image.new("RGB", (len(headings) * width, height), "white")
    for column, heading in enumerate(headings):
        ImageDraw.Draw(picture).text((column * width + 6, 4), heading, fill="black")
    for row in resized:
        for column, cell in enumerate(row):
            picture.paste(cell, (column * width, top))
        top += row[0].height
    return picture
