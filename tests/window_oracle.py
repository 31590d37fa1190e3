"""Which tokens of a map a window holds, by loops: the oracle of every test of windows."""

import itertools


def members(size: tuple[int, int], window: tuple[int, int] | None, shifted: bool) -> list[list[tuple[int, int] | None]]:
    """The positions of the map in each window, row by row; None for padding. Shifts are cyclic, by half a window."""
    sides, steps, padded = [], [], []
    for length, side in zip(size, window or size, strict=True):
        side = min(side, length)
        sides.append(side)
        steps.append(side // 2 if shifted and side < length else 0)
        padded.append(-(-length // side) * side)
    found = []
    for top, left in itertools.product(range(0, padded[0], sides[0]), range(0, padded[1], sides[1])):
        rows = []
        for i, j in itertools.product(range(sides[0]), range(sides[1])):
            y, x = (top + i + steps[0]) % padded[0], (left + j + steps[1]) % padded[1]
            rows.append((y, x) if y < size[0] and x < size[1] else None)
        found.append(rows)
    return found
