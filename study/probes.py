"""Probes of a single attention layer on patches of two photographs. They take minutes on a CPU.

Length: a bare layer must distinguish queries of the same direction and different lengths.
Local: every token must name the brightest of its four neighbours.
Mean: every token must give the brightness of the whole image, which any attention can average.
"""

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn

from inline_attention.data.samples import sample_photographs
from inline_attention.data.seeding import derive_seed
from inline_attention.environment import describe_environment
from inline_attention.layers import ATTENTIONS, Attention, Block

PATCH, SIDE = 4, 8  # side of a patch in pixels, side of a crop in patches
GRID = (SIDE, SIDE)
FEATURES = 3 * PATCH**2
TRAINING_SHARE = 0.7  # left part of each photograph; test crops come from the rest
LENGTHS = (0.5, 1.0, 2.0, 4.0)
SAME = 1e-4  # outputs of a group that are closer than this share of their norm count as equal


class Contestant(NamedTuple):
    """An attention and its arguments."""

    attention: str
    options: Mapping[str, Any] = {}

    def build(self, dim: int, num_heads: int, **options: Any) -> Attention:
        return ATTENTIONS[self.attention](dim, num_heads, **{**options, **self.options})


LENGTH_CONTESTANTS = {
    "softmax": Contestant("softmax"),
    "InLine": Contestant("inline", {"local_residual": False}),
    "InLine, ReLU": Contestant("inline", {"local_residual": False, "feature_map": "relu"}),
    "linear, ReLU": Contestant("linear"),
    "linear, LeakyReLU": Contestant("linear", {"feature_map": "leaky_relu"}),
    "linear, exp": Contestant("linear", {"feature_map": "exp"}),
    "hydra": Contestant("hydra"),
    "angular": Contestant("angular"),
    "enhanced": Contestant("enhanced"),
    "focused": Contestant("focused"),
    "efficient": Contestant("efficient"),
}
LOCAL_CONTESTANTS = {
    f"{title}{suffix}": Contestant(attention, {"local_residual": residual})
    for suffix, residual in (("", False), (" + residual", True))
    for title, attention in (("softmax", "softmax"), ("linear, ReLU", "linear"), ("InLine", "inline"))
}
ESCAPES = ("bare", "bias", "skip")


@dataclass(frozen=True)
class Effort:
    steps: int = 400
    batch: int = 64  # crops
    test_crops: int = 512
    seeds: int = 3
    rate: float = 3e-3


@dataclass(frozen=True)
class Score:
    """Accuracy of each seed, in per cent."""

    values: list[float]
    bound: float  # upper limit for any readout, in per cent, computed without training one

    @property
    def mean(self) -> float:
        return statistics.fmean(self.values)

    @property
    def std(self) -> float:
        return statistics.stdev(self.values) if len(self.values) > 1 else 0.0


@dataclass
class ProbeResult:
    length: dict[str, dict[str, Score]] = field(default_factory=dict)  # by variant (ESCAPES), then contestant
    local: dict[str, Score] = field(default_factory=dict)
    mean: dict[str, Score] = field(default_factory=dict)


# Crops


class Photographs:
    """Both photographs, standardised by channel, divided into a part for training and one for testing."""

    def __init__(self) -> None:
        pictures = [np.asarray(Image.open(path).convert("RGB"), dtype=np.float32) for path in sample_photographs()]
        pixels = torch.stack([torch.from_numpy(p) for p in pictures]).permute(0, 3, 1, 2)  # (2, 3, H, W)
        pixels = (pixels - pixels.mean((0, 2, 3), keepdim=True)) / pixels.std((0, 2, 3), keepdim=True)
        cut = int(TRAINING_SHARE * pixels.shape[3])
        self._parts = {"train": pixels[..., :cut], "test": pixels[..., cut:]}

    def crops(self, part: str, count: int, generator: torch.Generator) -> Tensor:
        """Patches (count, SIDE², FEATURES) of random square crops"""
        pixels, side = self._parts[part], SIDE * PATCH
        which, top, left = (
            torch.randint(high, (count,), generator=generator)
            for high in (len(pixels), pixels.shape[2] - side + 1, pixels.shape[3] - side + 1)
        )
        places = zip(which.tolist(), top.tolist(), left.tolist(), strict=True)
        squares = torch.stack([pixels[i, :, y : y + side, x : x + side] for i, y, x in places])
        patches = squares.unflatten(3, (SIDE, PATCH)).unflatten(
            2, (SIDE, PATCH)
        )  # (count, 3, SIDE, PATCH, SIDE, PATCH)
        return patches.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


class Examples(NamedTuple):
    tokens: Tensor  # (B, N, FEATURES)
    labels: Tensor  # int64; −1: the token has no label


Task = Callable[[Tensor, torch.Generator], Examples]  # makes examples from crops


class LengthTask:
    """A patch at all LENGTHS (in units of a mean patch) as queries, before the tokens of one image.

    The image is always the crop with the most contrast. Only the direction of the queries changes, and test directions
    are new.
    """

    def __init__(self, crops: Tensor) -> None:
        image = crops[crops.std((1, 2)).argmax()]
        self.image = (image - image.mean()) / image.std()

    def __call__(self, crops: Tensor, generator: torch.Generator) -> Examples:
        chosen = torch.randint(crops.shape[1], (len(crops),), generator=generator)
        direction = F.normalize(crops[torch.arange(len(crops)), chosen], dim=-1) * FEATURES**0.5
        queries = direction[:, None] * torch.tensor(LENGTHS)[:, None]  # (B, 4, FEATURES)
        tokens = torch.cat([queries, self.image.expand(len(crops), -1, -1)], dim=1)
        return Examples(tokens, torch.arange(len(LENGTHS)).expand(len(crops), -1))


def local_task(crops: Tensor, generator: torch.Generator) -> Examples:
    """Which neighbour is brightest: 0 above, 1 below, 2 left, 3 right. Tokens at the border have no label."""
    light = crops.mean(-1).unflatten(1, GRID)
    around = torch.stack([light[:, :-2, 1:-1], light[:, 2:, 1:-1], light[:, 1:-1, :-2], light[:, 1:-1, 2:]])
    return Examples(crops, F.pad(around.argmax(0), (1, 1, 1, 1), value=-1).flatten(1))


class MeanTask:
    """The quartile of the mean brightness among all training crops, as the label of every token."""

    def __init__(self, crops: Tensor) -> None:
        self.bounds = crops.mean((1, 2)).quantile(torch.tensor([0.25, 0.5, 0.75]))

    def __call__(self, crops: Tensor, generator: torch.Generator) -> Examples:
        labels = torch.bucketize(crops.mean((1, 2)), self.bounds)
        return Examples(crops, labels[:, None].expand(-1, crops.shape[1]))


# Models


class LengthProbe(nn.Module):
    """Queries through one attention over the tokens of the image, and a readout.

    Queries attend to the image, not to themselves or each other. "bare": no bias in q, k, v, and no skip connection.
    """

    def __init__(self, contestant: Contestant, *, variant: str) -> None:
        super().__init__()
        count = len(LENGTHS)
        self.attention = contestant.build(FEATURES, 3, qkv_bias=variant == "bias", num_prefix_tokens=count, grid=GRID)
        self.skip = variant == "skip"
        self.readout = nn.Sequential(nn.Linear(FEATURES, 64), nn.GELU(), nn.Linear(64, count))

    def attended(self, tokens: Tensor) -> Tensor:
        """(B, 4 + N, FEATURES) → inputs of the readout for the four queries, (B, 4, FEATURES)"""
        queries = slice(0, len(LENGTHS))
        q, k, v = self.attention.operands(self.attention.project(tokens, GRID), GRID)
        seen = torch.ones(len(LENGTHS), tokens.shape[1], dtype=torch.bool)
        seen[:, queries] = False
        weights = self.attention.weights(q, k, rows=queries, mask=seen)  # (B, heads, 4, 4 + N)
        out = self.attention.normalise((weights @ v.transpose(1, 2)).transpose(1, 2))
        out = self.attention.merge(self.attention.apply_gate(out, tokens[:, queries]))
        return out + tokens[:, queries] if self.skip else out

    def forward(self, tokens: Tensor) -> Tensor:
        return self.readout(self.attended(tokens))


class BlockProbe(nn.Module):
    """Patches with learned positions, one transformer block, and a readout for every token."""

    def __init__(self, contestant: Contestant, *, dim: int = 48, num_heads: int = 3, classes: int = 4) -> None:
        super().__init__()
        self.embed = nn.Linear(FEATURES, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1, SIDE**2, dim))
        self.block = Block(dim, contestant.build(dim, num_heads, grid=GRID), mlp_ratio=2.0, norm_eps=1e-6)
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, classes))

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.block(self.embed(tokens) + self.position, GRID))


# Measuring


def distinct_share(outputs: Tensor) -> float:
    """The largest accuracy of any readout if each group of outputs (B, 4, C) holds every class once.

    Outputs of a group that are equal (to SAME of their norm) get the same answer, which is right for one of them.
    """
    apart = torch.cdist(outputs, outputs) > SAME * outputs.norm(dim=-1, keepdim=True).amax(1, keepdim=True)
    first = ~(~apart & torch.ones_like(apart).tril(-1)).any(-1)  # no earlier output of the group is equal
    return float(first.float().mean())


def fit(model: nn.Module, batches: Iterator[Examples], *, effort: Effort) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=effort.rate, weight_decay=0.0)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, effort.rate, total_steps=effort.steps)
    for _ in range(effort.steps):
        tokens, labels = next(batches)
        loss = F.cross_entropy(model(tokens).flatten(0, 1), labels.flatten(), ignore_index=-1)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()


@torch.no_grad()
def accuracy(model: nn.Module, examples: Examples) -> float:
    """Accuracy in per cent over the tokens with a label"""
    asked = examples.labels >= 0
    right = model(examples.tokens).argmax(-1) == examples.labels
    return 100 * float(right[asked].float().mean())


class ProbeRun(NamedTuple):
    accuracy: float
    model: nn.Module
    test: Examples


def run_probe(
    build: Callable[[], nn.Module], task: Task, photographs: Photographs, *, effort: Effort, seed: int
) -> ProbeRun:
    """Train on crops of one part of the photographs and test on the other. The result depends on the seed alone."""
    torch.manual_seed(derive_seed("probe weights", seed))
    model = build()
    draws = torch.Generator().manual_seed(derive_seed("probe crops", seed))

    def batches() -> Iterator[Examples]:
        while True:
            yield task(photographs.crops("train", effort.batch, draws), draws)

    fit(model, batches(), effort=effort)
    draws = torch.Generator().manual_seed(derive_seed("probe test", seed))
    test = task(photographs.crops("test", effort.test_crops, draws), draws)
    return ProbeRun(accuracy(model, test), model, test)


def run_probes(
    *, effort: Effort | None = None, seed: int = 0, on_done: Callable[[str], None] | None = None
) -> ProbeResult:
    """Run all three probes with the seeds seed, seed + 1, … `on_done` is called with a line after each contestant."""
    effort = effort or Effort()
    photographs, result = Photographs(), ProbeResult()

    def report_score(what: str, name: str, score: Score) -> None:
        if on_done is not None:
            on_done(f"{what:12} {name:22} {score.mean:5.1f} ± {score.std:.1f} %  (bound {score.bound:.1f})")

    some = photographs.crops("train", 2048, torch.Generator().manual_seed(derive_seed("probe tasks", seed)))
    length_task = LengthTask(some)
    for variant in ESCAPES:
        scores = result.length.setdefault(variant, {})
        for name, contestant in LENGTH_CONTESTANTS.items():
            scores[name] = length_score(contestant, variant, length_task, photographs, effort=effort, seed=seed)
            report_score(f"length {variant}", name, scores[name])
    tasks: dict[str, Task] = {"local": local_task, "mean": MeanTask(some)}
    for what, task in tasks.items():
        block_scores: dict[str, Score] = getattr(result, what)
        for name, contestant in LOCAL_CONTESTANTS.items():
            runs = [
                run_probe(partial(BlockProbe, contestant), task, photographs, effort=effort, seed=seed + i)
                for i in range(effort.seeds)
            ]
            block_scores[name] = Score([run.accuracy for run in runs], bound=100.0)
            report_score(what, name, block_scores[name])
    return result


def length_score(
    contestant: Contestant, variant: str, task: LengthTask, photographs: Photographs, *, effort: Effort, seed: int
) -> Score:
    """The accuracy of each seed, and the bound from the outputs of the trained layers."""
    values, bounds = [], []
    for i in range(effort.seeds):
        run = run_probe(
            partial(LengthProbe, contestant, variant=variant), task, photographs, effort=effort, seed=seed + i
        )
        assert isinstance(run.model, LengthProbe)
        with torch.no_grad():
            bounds.append(100 * distinct_share(run.model.attended(run.test.tokens)))
        values.append(run.accuracy)
    return Score(values, max(bounds))


def to_json(result: ProbeResult, *, effort: Effort, seed: int) -> dict[str, Any]:
    """All results and the settings they were measured with."""

    def plain(scores: Mapping[str, Score]) -> dict[str, Any]:
        return {
            name: {
                "mean": round(score.mean, 3),
                "std": round(score.std, 3),
                "bound": round(score.bound, 3),
                "values": [round(value, 3) for value in score.values],
            }
            for name, score in scores.items()
        }

    return {
        "effort": asdict(effort),
        "seed": seed,
        "lengths": list(LENGTHS),
        "chance": 100 / len(LENGTHS),
        "environment": describe_environment(),
        "length": {variant: plain(scores) for variant, scores in result.length.items()},
        "local": plain(result.local),
        "mean": plain(result.mean),
    }
