"""Attentions by name: the registry, and which attention each block of a model has ("IIIS")."""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from .attention import Attention

ATTENTIONS: dict[str, type[Attention]] = {}  # by the names that models take
LETTERS = {"I": "inline", "S": "softmax", "L": "linear"}

AttentionT = TypeVar("AttentionT", bound=Attention)
AttentionSpec = str | Sequence[str]


def register_attention(cls: type[AttentionT]) -> type[AttentionT]:
    """Makes an attention known under its `kind`, for every model that takes an attention by name."""
    kind = getattr(cls, "kind", None)
    if not isinstance(kind, str) or not kind:
        raise ValueError(f"{cls.__name__}.kind is {kind!r}; expected the name to register it under, such as 'mine'")
    if kind in ATTENTIONS:
        raise ValueError(f"{cls.__name__}.kind is {kind!r}, which is {ATTENTIONS[kind].__name__}; choose another name")
    ATTENTIONS[kind] = cls
    return cls


def build_attention(
    name: str,
    dim: int,
    num_heads: int,
    *,
    feature_map: str | None = None,
    local_residual: bool | None = None,
    gain: bool | float = False,
    rope: bool = False,
    anchors: int | None = None,
    own: Mapping[str, type[Attention]] | None = None,
    **kwargs: Any,
) -> Attention:
    """An attention by name. Model-wide choices apply if its `follows` names them; None keeps the default.

    `own` are classes of a family, by name. They take the place of registered ones.
    """
    cls = {**ATTENTIONS, **(own or {})}[name]
    choices: dict[str, Any] = dict(
        feature_map=feature_map, local_residual=local_residual, gain=gain, rope=rope, anchors=anchors
    )
    chosen = {key: value for key, value in choices.items() if value is not None and key in cls.follows}
    return cls(dim, num_heads, **chosen, **kwargs)


def parse_attention(spec: AttentionSpec, depths: Sequence[int]) -> list[list[str]]:
    """The attention of every block, by stage.

    Args:
        spec: letters per stage ("IIIS": I InLine, S softmax, L linear), a sequence of names per stage, or one name for
            all stages. "inline:2" is a stage whose first two blocks are InLine and whose others are softmax.
        depths: blocks per stage.
    """
    if not isinstance(spec, Sequence) or not all(isinstance(stage, str) for stage in spec):
        raise ValueError(f"attention={spec!r}: expected a name, or a letter or name for each stage")
    stages = list(spec)
    if isinstance(spec, str) and spec.partition(":")[0] in ATTENTIONS:
        stages = [spec] * len(depths)
    if len(stages) != len(depths):
        raise ValueError(
            f"attention={spec!r} names {len(stages)} stages but the model has {len(depths)}; "
            f"expected a letter ({', '.join(LETTERS)}) or a name ({', '.join(ATTENTIONS)}) for each"
        )
    return [_parse_stage(stage, depth, spec) for stage, depth in zip(stages, depths, strict=True)]


def check_choices(stages: Sequence[Sequence[str]], **choices: Any) -> None:
    """Raise ValueError for a choice that none of a model's attentions follows.

    Args:
        stages: the attention of every block, from `parse_attention`.
        choices: arguments of `build_attention`. None and False choose nothing.
    """
    used = dict.fromkeys(name for stage in stages for name in stage)
    for choice, value in choices.items():
        if value in (None, False) or any(choice in ATTENTIONS[name].follows for name in used):
            continue
        follow = ", ".join(name for name, cls in ATTENTIONS.items() if choice in cls.follows)
        raise ValueError(f"{choice}={value!r} has no effect with attention {', '.join(used)}; expected one of {follow}")


def _parse_stage(stage: str, depth: int, spec: AttentionSpec) -> list[str]:
    name, colon, count = LETTERS.get(stage, stage).partition(":")
    if name not in ATTENTIONS or (colon and not count.isdecimal()):
        raise ValueError(
            f"attention={spec!r}: {stage!r} is unknown; expected a letter ({', '.join(LETTERS)}), "
            f"a name ({', '.join(ATTENTIONS)}) or a name with a count of blocks, such as 'inline:2'"
        )
    first = int(count) if colon else depth
    if first > depth:
        raise ValueError(f"attention={spec!r}: {stage!r} asks for {first} blocks of a stage that has {depth}")
    return [name] * first + ["softmax"] * (depth - first)


def describe_attention(stages: Sequence[Sequence[str]]) -> str:
    """The short form of what `parse_attention` returned: "IIIS", or "I I I:2 S" if a stage is mixed"""
    letters = {name: letter for letter, name in LETTERS.items()}
    words = []
    for blocks in stages:
        first = sum(name == blocks[0] for name in blocks)
        word = letters.get(blocks[0], blocks[0])
        words.append(word if first == len(blocks) else f"{word}:{first}")
    return "".join(words) if all(len(word) == 1 for word in words) else " ".join(words)
