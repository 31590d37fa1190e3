"""torch.hub: `torch.hub.load("OWNER/REPOSITORY", "inline_swin_tiny", pretrained=True)`."""

import sys
from functools import partial
from pathlib import Path

dependencies = ["torch", "torchvision", "timm", "safetensors"]

sys.path.insert(0, str(Path(__file__).parent / "src"))

from inline_attention import create_model, list_models  # noqa: E402 (it is found on the path set above)

globals().update({name: partial(create_model, name) for name in list_models()})
