import numpy as np

from inline_attention.tasks.dense.colours import class_colour, ink_on


def difference(a: tuple[int, int, int], b: tuple[int, int, int]) -> int:
    return int(np.abs(np.subtract(a, b)).max())


def test_colours_can_be_told_apart_and_written_on() -> None:
    colours = [class_colour(number) for number in range(256)]
    assert len(set(colours)) == 256
    for number, colour in enumerate(colours):
        assert difference(colour, ink_on(colour)) > 100
        for distance, other in enumerate(reversed(colours[:number][-20:]), start=1):
            assert difference(colour, other) > (60 if distance == 1 else 30 if number < 20 else 0), (number, distance)
