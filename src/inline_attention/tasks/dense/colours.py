"""A colour for every class, the same in all pictures of dense prediction."""

import colorsys

Colour = tuple[int, int, int]

# Saturations and values, taken in turn. Hues are a golden angle apart, so classes of similar hue differ by a Fibonacci
# number. Of those below 21, only 3 is a multiple of three, so such classes differ in saturation and value.
_LEVELS = ((0.75, 1.0), (0.95, 0.65), (0.4, 0.9))


def class_colour(number: int) -> Colour:
    """The colour of a class number. Neighbouring numbers get clearly different colours."""
    red, green, blue = colorsys.hsv_to_rgb(number * 0.618034 % 1, *_LEVELS[number % 3])
    return int(255 * red), int(255 * green), int(255 * blue)


def ink_on(colour: Colour) -> Colour:
    """Black or white, whichever is readable on the colour"""
    red, green, blue = colour
    return (0, 0, 0) if 0.299 * red + 0.587 * green + 0.114 * blue > 110 else (255, 255, 255)
