"""What a file says about itself: the model, its classes, and how its images are prepared."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inline_attention._version import __version__
from inline_attention.models.hub import image_preparation
from inline_attention.models.weights import architecture


def describe(
    model: Any,
    *,
    class_names: Sequence[str] | None,
    preprocessing: Mapping[str, Any] | None,
    multi_label: bool = False,
) -> dict[str, str]:
    """The entries of the description, the same in every format. Lists and booleans are JSON.

    The images are prepared in timm's terms: resized with `interpolation`, by `crop_mode` to `input_size` divided by
    `crop_pct`, cropped at the centre, scaled to 0..1, less `mean`, divided by `std`.
    """
    if class_names is not None and len(class_names) != model.num_classes:
        raise ValueError(f"there are {len(class_names)} class names for the {model.num_classes} classes of the model")
    prepared = image_preparation(model, preprocessing)
    about = {"library": f"inline_attention {__version__}", "architecture": architecture(model)}
    about["multi_label"] = json.dumps(multi_label)
    if class_names is not None:
        about["class_names"] = json.dumps(list(class_names), ensure_ascii=False)
    for key in ("input_size", "mean", "std"):
        about[key] = json.dumps(list(prepared[key]))
    return about | {key: str(prepared[key]) for key in ("interpolation", "crop_pct", "crop_mode")}
