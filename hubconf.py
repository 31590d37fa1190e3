"""torch.hub: `torch.hub.load("OWNER/REPOSITORY", "inline_swin_tiny", pretrained=True)`."""

import sys
from pathlib import Path

from timm.models import model_entrypoint

dependencies = ["torch", "torchvision", "timm", "safetensors"]

sys.path.insert(0, str(Path(__file__).parent / "src"))

from inline_attention import list_models  # noqa: E402 (it is found on the path set above)

globals().update({name: model_entrypoint(name) for name in list_models()})  # their docstrings are torch.hub.help
