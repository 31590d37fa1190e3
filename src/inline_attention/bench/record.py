"""Records of benchmarks: facts about the machine and results, as JSON and as markdown tables."""

import datetime
import json
from collections.abc import Callable, Collection, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from inline_attention.environment import describe_environment
from inline_attention.ops.backends import HAS_TRITON, tuned

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FACTS = ("inline-attention", "python", "cpu", "torch", "triton", "timm", "torch built for CUDA")


def describe_run(device: torch.device, dtype: torch.dtype) -> dict[str, str]:
    """The facts that the results depend on: name → value."""
    environment = describe_environment()
    facts = {name: environment[name] for name in FACTS}
    if device.type == "cuda":
        facts |= {name: environment[name] for name in (f"gpu {device.index or 0}", "driver")}
        if HAS_TRITON:
            facts["launch settings"] = tuned.source_of(device)
    facts["device"] = str(device)
    facts["dtype"] = str(dtype).removeprefix("torch.")
    precision = torch.get_float32_matmul_precision()
    facts["float32 products"] = f"{precision} ({'no tf32' if precision == 'highest' else 'tf32 allowed'})"
    facts["date"] = datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC")
    return facts


@dataclass
class Record:
    """A run. With a path, the file always holds what has been measured so far."""

    kind: str  # "op", "break-even", "kernels", "model", "profile" or "dense"
    facts: dict[str, str]
    path: Path | None = None
    results: list[dict[str, Any]] = field(default_factory=list)

    def add(self, results: Iterable[Any]) -> list[dict[str, Any]]:
        """Add results, which are dataclasses. Returns them as dictionaries, for a table."""
        added = [asdict(result) for result in results]
        self.results += added
        if self.path is not None:
            self.path.write_text(json.dumps(self.content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
        return added

    @property
    def content(self) -> dict[str, Any]:
        return dict(kind=self.kind, facts=self.facts, results=self.results)

    @property
    def failed(self) -> bool:
        """Whether no measurement succeeded."""
        return all(result.get("error") is not None for result in self.results)


def read_record(path: Path, *, kinds: Collection[str]) -> tuple[str, dict[str, str], list[dict[str, Any]]]:
    """Kind, facts and results of a file that a run wrote; ValueError unless it is of one of the `kinds`."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        kind, facts, results = str(content["kind"]), dict(content["facts"]), content["results"]
        for result in results:
            if "size" in result:  # in records of dense models before 0.2
                result["img_size"] = result.pop("size")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} is not a record of `inline bench`: expected a file that --json wrote") from error
    if kind not in kinds:
        raise ValueError(f"{path} is a record of kind {kind!r}; expected {' or '.join(kinds)}")
    return kind, facts, results


def check_contenders(names: Iterable[str], known: Collection[str]) -> None:
    if unknown := [name for name in names if name not in known]:
        raise ValueError(f"there is no contender {', '.join(unknown)}; expected some of {', '.join(known)}")


def fastest(
    results: Iterable[dict[str, Any]], row: Callable[[dict[str, Any]], tuple[Any, ...]]
) -> list[dict[str, Any]]:
    """Each contender of each row of a table in its fastest mode. One that failed in all modes appears once."""
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for r in results:
        groups.setdefault((*row(r), r["contender"]), []).append(r)
    return [max(group, key=lambda r: r["images_per_second"] or 0) for group in groups.values()]
