"""For the API reference: a comment beside a field documents it.

Fields of dataclasses and named tuples, and values of modules, are explained in a comment on their line or on the line
before. mkdocstrings shows docstrings alone; this makes an "Attributes" section, or a docstring, of such comments.
"""

import ast
import io
import tokenize
from typing import Any

import griffe


class FieldComments(griffe.Extension):
    def on_class_members(self, *, node: ast.AST, cls: griffe.Class, agent: Any, **kwargs: Any) -> None:
        fields = [
            attribute
            for name, attribute in cls.members.items()
            if isinstance(attribute, griffe.Attribute) and attribute.annotation and not name.startswith("_")
        ]
        comments = {field.name: _comment(field) for field in fields}
        if not any(comments.values()):
            return
        # The signature of a dataclass lists its fields already; that of a named tuple is not shown.
        whole = any("NamedTuple" in str(base) for base in cls.bases)
        section = "\n".join(f"    {name}: {comment}" for name, comment in comments.items() if comment or whole)
        text = cls.docstring.value if cls.docstring else ""
        lineno = cls.docstring.lineno if cls.docstring else cls.lineno
        cls.docstring = griffe.Docstring(
            f"{text}\n\nAttributes:\n{section}",
            lineno=lineno,
            parent=cls,
            parser=agent.docstring_parser,
            parser_options=agent.docstring_options,
        )

    def on_attribute_instance(self, *, attr: griffe.Attribute, **kwargs: Any) -> None:
        if attr.docstring is None and attr.parent is not None and attr.parent.is_module and (text := _comment(attr)):
            attr.docstring = griffe.Docstring(text, lineno=attr.lineno, parent=attr)


def _comment(attribute: griffe.Attribute) -> str:
    """On the last line of the attribute, else on a line of its own before the first; "" where there is none."""
    lines = attribute.lines_collection[attribute.filepath]
    assert attribute.lineno is not None
    assert attribute.endlineno is not None
    above = lines[attribute.lineno - 2].strip()
    return _trailing_comment(lines[attribute.endlineno - 1]) or (above[1:].strip() if above.startswith("#") else "")


def _trailing_comment(line: str) -> str:
    try:
        for token in tokenize.generate_tokens(io.StringIO(line.strip()).readline):
            if token.type == tokenize.COMMENT:
                return token.string.lstrip("#").strip()
    except tokenize.TokenError:  # the last line of a longer expression: brackets that it does not open
        pass
    return ""
