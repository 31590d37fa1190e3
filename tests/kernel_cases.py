"""Inputs for the Triton kernels, and the rule that their results are held to. Tests and `gpu_check.py` share them."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.ops import fused, inline_attention  # needs Triton

GPU = torch.cuda.is_available()

DEVICE = "cuda" if GPU else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]

Results = dict[str, Tensor]  # the output and the gradients of q, k, v and of the local weight


@contextmanager
def configured(**changes: Any) -> Iterator[None]:
    """Other launch parameters than `fused.CONFIG` has."""
    before = fused.CONFIG
    fused.CONFIG = before._replace(**changes)
    try:
        yield
    finally:
        fused.CONFIG = before


# Both ways through the kernels, whatever the heuristic would take.
PATHS = {"fused": dict(fused_tokens=10**9, fused_programs=0), "split": dict(fused_tokens=0)}


def make_inputs(
    batch: int,
    grid: tuple[int, int],
    prefix: int,
    heads: int,
    head_dim: int,
    dtype: torch.dtype,
    *,
    local: bool = True,
    masked: bool = False,
    mean: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor | None, Tensor, dict[str, Any]]:
    """qkv, the local weight, the output's gradient and options. `masked` masks queries and keys alike.

    The attention of random tokens is about N^-1/2 in size. The local residual is made so too, or it would hide it.
    """
    generator = torch.Generator().manual_seed(seed)
    tokens = prefix + grid[0] * grid[1]
    qkv = (torch.randn(batch, tokens, 3, heads, head_dim, generator=generator) + mean).to(DEVICE, dtype)
    weight = torch.randn(batch, heads, head_dim, 9, generator=generator) / (3 * tokens**0.5)
    weight = weight.to(DEVICE, dtype) if local else None
    grad = torch.randn(batch, tokens, heads, head_dim, generator=generator).to(DEVICE, dtype)
    mask = (torch.rand(batch, tokens, generator=generator) > 0.3).to(DEVICE) if masked else None
    return qkv, weight, grad, dict(grid=grid, num_prefix_tokens=prefix, token_mask=mask, query_mask=mask)


def run(
    qkv: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    options: Mapping[str, Any],
    *,
    backend: Any,
    dtype: torch.dtype | None = None,
    feature_map: str = "identity",
) -> Results:
    """Output and gradients of q, k, v and of the local weight, by name."""
    dtype = dtype or qkv.dtype
    qkv = qkv.detach().to(dtype).requires_grad_()
    leaves = [qkv]
    if weight is not None:
        weight = weight.detach().to(dtype).requires_grad_()
        leaves.append(weight)
    out = inline_attention(*qkv.unbind(2), feature_map=feature_map, local_weight=weight, backend=backend, **options)
    grad_qkv, *grad_weight = torch.autograd.grad(out, leaves, grad.to(dtype))
    results = [out.detach(), *grad_qkv.unbind(2), *grad_weight]
    return dict(zip(("out", "dq", "dk", "dv", "dweight"), results, strict=False))


class Error(NamedTuple):
    """How far one result is from float64, and how far it may be, both relative to its norm."""

    name: str
    error: float
    allowed: float


def errors(exact: Results, plain: Results, fast: Results) -> list[Error]:
    """Allowed is twice the error of the reference backend on the same inputs, and one rounding, for each result."""
    found = []
    for name, z in fast.items():
        x, y = exact[name], plain[name]
        assert z.dtype == y.dtype
        size = float(x.norm()) or 1.0
        error, allowed = (z - x).norm(), 2 * (y - x).norm() + torch.finfo(z.dtype).eps * x.norm()
        found.append(Error(name, float(error) / size, float(allowed) / size))
    return found


def compare(
    qkv: Tensor, weight: Tensor | None, grad: Tensor, options: Mapping[str, Any], *, feature_map: str = "identity"
) -> list[Error]:
    """The kernels against float64."""
    inputs = (qkv, weight, grad, options)
    exact = run(*inputs, backend="reference", dtype=torch.float64, feature_map=feature_map)
    plain = run(*inputs, backend="reference", feature_map=feature_map)
    return errors(exact, plain, run(*inputs, backend="triton", feature_map=feature_map))


class RandomCase(NamedTuple):
    inputs: tuple[Tensor, Tensor | None, Tensor, dict[str, Any]]
    feature_map: str
    config: dict[str, Any]  # changes to `fused.CONFIG`

    def __str__(self) -> str:
        qkv, weight, _, options = self.inputs
        masks = [name for name in ("token_mask", "query_mask") if options[name] is not None]
        batch, _, _, heads, head_dim = qkv.shape
        return (
            f"batch {batch}, grid {options['grid']}, prefix {options['num_prefix_tokens']}, {heads} heads of {head_dim}"
            f", {qkv.dtype}, {self.feature_map}, local {weight is not None}, masks {masks}, config {self.config}"
        )


def random_case(seed: int) -> RandomCase:
    """A case of any shape, dtype, feature map and masks, through one of the two paths or as the heuristic takes it."""
    generator = torch.Generator().manual_seed(seed)

    def pick(*options: Any) -> Any:
        return options[torch.randint(len(options), (), generator=generator)]

    config: dict[str, Any] = {1: PATHS["fused"], 3: PATHS["split"]}.get(seed % 4, {})
    limit = 6 if not GPU else 17 if seed % 4 == 1 else 96  # one program a sample serves short sequences
    grid = tuple(int(torch.randint(1, limit, (), generator=generator)) for _ in range(2))
    heads, head_dim = pick(1, 2, 3, 6), pick(16, 24, 32, 40, 48, 64, 80, 128) if GPU else pick(16, 32)
    options = dict(local=pick(True, True, False), masked=pick(True, False), mean=pick(0.0, 1.0, 4.0), seed=seed)
    case = (pick(1, 2, 5), grid, pick(0, 1, 4), heads, head_dim, DTYPES[seed % len(DTYPES)])
    inputs = make_inputs(*case, **options)
    if inputs[3]["token_mask"] is not None:  # of queries and keys alike, of keys, of queries, or different ones
        mask = inputs[3]["token_mask"]
        masks = pick((mask, mask), (mask, None), (None, mask), (mask, mask.flip(1)))
        inputs[3].update(zip(("token_mask", "query_mask"), masks, strict=True))
    return RandomCase(inputs, pick("identity", "relu", "leaky_relu", "exp"), config)
