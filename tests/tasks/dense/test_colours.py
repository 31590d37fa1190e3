from itertools import combinations, pairwise

import numpy as np

from inline_attention.tasks.dense.colours import class_colour, ink_on


def difference(a: tuple[int, int, int], b: tuple[int, int, int]) -> int:
    return int(np.abs(np.subtract(a, b)).max())


def test_colours_can_be_told_apart() -> None:
    colours = [class_colour(number) for number in range(256)]
    assert len(set(colours)) == 256
    assert min(difference(a, b) for a, b in pairwise(colours)) > 60
    assert min(difference(a, b) for a, b in combinations(colours[:20], 2)) > 30


def test_ink_can_be_read() -> None:
    colours = [class_colour(number) for number in range(80)]
    assert min(difference(colour, ink_on(colour)) for colour in colours) > 100
