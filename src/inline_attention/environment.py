"""The device to compute on, and versions and hardware for bug reports, benchmarks and the log of a run."""

import os
import platform
import subprocess
from importlib import metadata
from pathlib import Path

import torch

from inline_attention._version import __version__

PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "triton",
    "numpy",
    "pillow",
    "safetensors",
    "huggingface_hub",
    "onnx",
    "onnxruntime",
    "onnxscript",
    "scikit-learn",
    "segmentation-models-pytorch",
    "tensorboard",
)


def choose_device(name: str | None = None) -> torch.device:
    """The device called `name`. None and "auto" choose the best: CUDA, then MPS, then the CPU.

    ValueError if the device cannot be used.
    """
    available = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available(), "cpu": True}
    present = [kind for kind, usable in available.items() if usable]
    if name in (None, "auto"):
        name = present[0]
    try:
        device = torch.device(name)
        if device.type not in available or device.index is not None:
            torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        if "device string" in reason or "device type" in reason:  # a long list of all that PyTorch could be built for
            reason = "expected cpu, cuda, cuda:N or mps"
        raise ValueError(f"device {name!r} cannot be used: {reason}") from error
    if not available.get(device.type, True):
        raise ValueError(f"device {name} is not available here; available: {', '.join(present)}")
    return device


def describe_environment() -> dict[str, str]:
    """Names and values, in the order to print them."""
    facts = {
        "inline-attention": f"{__version__}{_commit()}",
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "cpu": f"{_cpu_name()}, {_count(os.cpu_count() or 1, 'core')}, {_count(torch.get_num_threads(), 'thread')}",
    }
    facts |= {name: _version(name) for name in PACKAGES}
    facts["torch built for CUDA"] = torch.version.cuda or "no"
    if torch.cuda.is_available():
        for i in range(torch.cuda.device_count()):
            device = torch.cuda.get_device_properties(i)
            facts[f"gpu {i}"] = (
                f"{device.name}, {device.total_memory / 2**30:.0f} GiB, capability {device.major}.{device.minor}"
            )
        facts["driver"] = _output("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader") or "unknown"
    else:
        facts["gpu"] = "mps" if torch.backends.mps.is_available() else "none"
    return facts


def _count(number: int, what: str) -> str:
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _commit() -> str:
    """The git commit, if the package runs from a checkout; "" if it is installed."""
    checkout = Path(__file__).resolve().parents[2]
    if not (checkout / ".git").exists():
        return ""
    commit = _output("git", "-C", str(checkout), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*")
    return f" ({commit})" if commit else ""


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "unknown"


def _output(*command: str) -> str:
    """The first line of a command's output; "" if the command is missing or fails."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip().partition("\n")[0]
