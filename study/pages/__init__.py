"""The text of the study's pages, in templates. Tables and numbers come from `report.py`."""

import re
import string
from collections.abc import Mapping
from pathlib import Path


def fill(name: str, values: Mapping[str, object], *, between: str = "\n\n") -> str:
    """Fill the template NAME.template: `values` replace its $names. Text about missing values is left out.

    - A paragraph is left out if a name in it has no value (None or "").
    - A paragraph without names belongs to the next one with names, and is left out with it. At the end of a section it
      stays, unless all that has names was left out.
    - A paragraph that begins with `?name` does the same, but only if that name has a value; `!name`: if it has none.
    - A heading without text below it is left out.
    """
    known = {key: str(value) for key, value in values.items() if value not in (None, "")}
    kept: list[str] = []
    heading: list[str] = []
    introduction: list[str] = []
    lacks = False  # whether a paragraph of the section was left out
    text = Path(__file__).with_name(f"{name}.template").read_text(encoding="utf-8")
    for paragraph in text.strip().split("\n\n"):
        condition, _, rest = paragraph.partition(" ")
        is_conditional = condition[0] in "?!"
        body = rest if is_conditional else paragraph
        names = set(re.findall(r"\$\{?(\w+)", body))
        if is_conditional and (condition[1:] in known) != (condition[0] == "?"):
            continue
        if not names <= known.keys():
            introduction, lacks = [], True
            continue
        filled = string.Template(body).substitute(known).strip("\n")
        if paragraph.startswith("#"):
            kept += _end_of_section(heading, introduction, lacks)
            heading, introduction, lacks = [filled], [], False
        elif is_conditional or not names:
            introduction.append(filled)
        else:
            if heading and 0 < _level(filled) <= _level(heading[0]):  # sections at the same level or above
                heading = []
            kept += [*heading, *introduction, filled]
            heading, introduction = [], []
    return between.join([*kept, *_end_of_section(heading, introduction, lacks)]) + "\n"


def _end_of_section(heading: list[str], introduction: list[str], lacks: bool) -> list[str]:
    """What is kept where a section ends. Its heading is pending if nothing with names was kept."""
    return [*heading, *introduction] if introduction and not (heading and lacks) else []


def _level(text: str) -> int:
    """The level of the heading that a text begins with. 0: it begins with none."""
    return len(text) - len(text.lstrip("#"))
