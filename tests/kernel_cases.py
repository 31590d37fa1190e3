"""Inputs for the Triton kernels, and the rule that their results are held to. Tests and `gpu_check.py` share them."""

import itertools
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inline_attention.layers.block import Block
from inline_attention.layers.registry import build_attention
from inline_attention.ops import (  # needs Triton
    OutputProjection,
    add_mlp,
    fused,
    fused_mlp,
    fused_norm_linear,
    gpu,
    linear_attention,
    make_local_weight,
    norm_linear,
    tangent_attention,
    use_backend,
)
from inline_attention.ops.fused import config, short
from inline_attention.ops.fused.short import Tile
from inline_attention.ops.local import LocalSource
from inline_attention.ops.reference import masked_mean, zero_absent

GPU = torch.cuda.is_available()

DEVICE = "cuda" if GPU else "cpu"
# The interpreter's bfloat16 is wrong.
DTYPES = [torch.float32, torch.float16, torch.bfloat16] if GPU else [torch.float32, torch.float16]

Results = dict[str, Tensor]  # the output and the gradients of q, k, v, of the local weight and of the token weight


@contextmanager
def configured(**changes: Any) -> Iterator[None]:
    """Other launch parameters than `config.CONFIG` has."""
    before = config.CONFIG
    config.CONFIG = before._replace(**changes)
    try:
        yield
    finally:
        config.CONFIG = before


# Both paths through the kernels, whichever the heuristic would choose.
PATHS = {"fused": dict(fused_tokens=10**9, fused_programs=0), "split": dict(fused_tokens=0)}

# A third one, which has no backward.
ONE_LAUNCH = dict(one_launch=True)


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


class Kind(NamedTuple):
    """Which attention of the family. The default is InLine attention."""

    normalization: Any = "subtract"
    feature_map: str = "identity"
    weighted: bool = False  # a token weight, and an offset where the normalization has one
    anchored: bool = False  # tangent attention
    value_channels: int | None = None  # of a head, if fewer than the keys have
    mapped: bool = False  # queries and keys are features, which no φ has to make non-negative

    def __str__(self) -> str:
        if self.anchored:
            return "tangent"
        facts = [self.normalization, "features" if self.mapped else self.feature_map]
        facts += ["weighted"] * self.weighted + [f"e={self.value_channels}"] * (self.value_channels is not None)
        return " ".join(facts)


INLINE = Kind()
TANGENT = Kind(anchored=True)
FAMILY = [
    Kind("divide", "relu"),  # also of enhanced attention
    Kind("magnitude", "elu_plus_one"),  # MALA
    TANGENT,
    Kind("subtract", "identity", weighted=True, value_channels=16),
    Kind("divide", "exp", weighted=True),
    Kind("magnitude", "relu", weighted=True, value_channels=16),
    Kind("divide", "elu_plus_one", weighted=True),  # RALA
    Kind("divide", "identity", value_channels=8, mapped=True),  # PolaFormer, with fewer values; focused attention
]


def run(
    qkv: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    options: Mapping[str, Any],
    *,
    backend: Any,
    dtype: torch.dtype | None = None,
    kind: Kind = INLINE,
) -> Results:
    """Output and gradients of q, k, v, of the local weight and of the token weight and offset, by name.

    One launch has no backward: where `config.CONFIG` asks for it, there is the output alone.
    """
    dtype = dtype or qkv.dtype
    channels = kind.value_channels or qkv.shape[-1]
    leaves = dict(qkv=qkv.detach().to(dtype).requires_grad_())
    if weight is not None:
        leaves["dweight"] = weight.detach().to(dtype)[:, :, :channels].contiguous().requires_grad_()
    if kind.weighted:
        # Any positive numbers, the same in every precision.
        leaves["dtoken_weight"] = qkv.detach()[:, :, 1].nan_to_num().mean(-1).exp().to(dtype).requires_grad_()
        if kind.normalization == "subtract":
            leaves["doffset"] = qkv.detach()[:, :1, 0].nan_to_num().to(dtype).requires_grad_()
    q, k, v = leaves["qkv"].unbind(2)
    if kind.mapped:
        q, k = q.relu(), k.relu()
    common = dict(local_weight=leaves.get("dweight"), backend=backend, **options)
    one_launch = config.CONFIG.one_launch
    with torch.set_grad_enabled(not one_launch):
        if kind.anchored:
            out = tangent_attention(q, k, v[..., :channels], **common)
        else:
            out = linear_attention(
                q,
                k,
                v[..., :channels],
                normalization=kind.normalization,
                feature_map=kind.feature_map,
                token_weight=leaves.get("dtoken_weight"),
                query_offset=leaves.get("doffset"),
                **common,
            )
    if one_launch:
        return dict(out=out)
    grads = torch.autograd.grad(out, list(leaves.values()), grad[..., :channels].to(dtype))
    named = dict(zip(leaves, grads, strict=True))
    return dict(out=out.detach(), **dict(zip(("dq", "dk", "dv"), named.pop("qkv").unbind(2), strict=True)), **named)


class Error(NamedTuple):
    """How far one result is from float64, and how far it may be, both relative to its norm."""

    name: str
    error: float
    allowed: float


def errors(
    exact: Results, plain: Results, fast: Results, *, mean: float = 0.0, factor: float = 2.0, roundings: float = 1.0
) -> list[Error]:
    """Allowed is `factor` times the error of the reference backend on the same inputs, and so many roundings, each.

    A rounding is relative to the size of the inputs. Tokens of mean `mean` and spread 1 are that much larger than
    their spread, which is what the gradients depend on.
    """
    found = []
    for name, z in fast.items():
        x, y = exact[name], plain[name]
        assert z.dtype == y.dtype
        size = float(x.norm()) or 1.0
        rounding = roundings * torch.finfo(z.dtype).eps * max(1.0, mean)
        error, allowed = (z - x).norm(), factor * (y - x).norm() + rounding * x.norm()
        found.append(Error(name, float(error) / size, float(allowed) / size))
    return found


def compare(
    qkv: Tensor,
    weight: Tensor | None,
    grad: Tensor,
    options: Mapping[str, Any],
    *,
    kind: Kind = INLINE,
    mean: float = 0.0,
) -> list[Error]:
    """The kernels against float64."""
    inputs = (qkv, weight, grad, options)
    exact = run(*inputs, backend="reference", dtype=torch.float64, kind=kind)
    plain = run(*inputs, backend="reference", kind=kind)
    return errors(exact, plain, run(*inputs, backend="triton", kind=kind), mean=mean)


class Specialization(NamedTuple):
    """What the kernels of a random case are compiled for."""

    path: str
    dtype: torch.dtype
    kind: Kind
    heads: int
    head_dim: int
    local: bool
    masks: tuple[str, ...]
    narrow: bool  # a map of five to eight columns; the kernels' steps have two rows then


def _specializations() -> list[Specialization]:
    """Each head size in each dtype, for InLine attention and for the family. Few enough that thousands of cases are not
    bound by the compiler.

    On a GPU each member of the family has each dtype, and one of them on the fused path.
    """
    generator = random.Random(0)
    sizes = list(itertools.product((16, 24, 32, 40, 48, 64, 80, 128) if GPU else (16, 32), DTYPES))
    generator.shuffle(sizes)
    sizes.sort(key=lambda size: DTYPES.index(size[1]))
    paths = itertools.cycle(("fused", "split", "split"))  # most kernels are on the split path
    inline = [Kind(feature_map=name) for name in ("identity", "relu", "leaky_relu", "exp")]
    masks = [(), ("token_mask",), ("query_mask",), ("token_mask", "query_mask")]
    return [
        Specialization(
            path, dtype, kind, generator.choice((1, 2, 3, 6)), head_dim,
            generator.random() < 2 / 3, generator.choice(masks), generator.random() < 1 / 3,
        )
        for kinds in (inline, FAMILY)
        for (head_dim, dtype), path, kind in itertools.islice(
            zip(itertools.cycle(sizes), paths, itertools.cycle(kinds), strict=False), max(len(sizes), len(kinds))
        )
    ]  # fmt: skip


SPECIALIZATIONS = _specializations()


def specialization_of(seed: int) -> Specialization:
    return SPECIALIZATIONS[seed % len(SPECIALIZATIONS)]


class RandomCase(NamedTuple):
    inputs: tuple[Tensor, Tensor | None, Tensor, dict[str, Any]]
    kind: Kind
    config: dict[str, Any]  # changes to `config.CONFIG`
    mean: float  # of the tokens

    def __str__(self) -> str:
        qkv, weight, grad, options = self.inputs
        masks = [name for name in ("token_mask", "query_mask") if options[name] is not None]
        batch, _, _, heads, head_dim = qkv.shape
        return (
            f"batch {batch}, grid {options['grid']}, prefix {options['num_prefix_tokens']}, {heads} heads of {head_dim}"
            f", {qkv.dtype}, {self.kind}, mean {self.mean}, local {weight is not None}, masks {masks}"
            f", strides {qkv.stride()} and {grad.stride()}, config {self.config}"
        )

    def errors(self) -> list[Error]:
        with configured(**self.config):
            return compare(*self.inputs, kind=self.kind, mean=self.mean)


def _apart(x: Tensor, times: int) -> Tensor:
    """The same tokens, `times` as far apart, with NaN between them."""
    return torch.stack([x, *[torch.full_like(x, torch.nan)] * (times - 1)], 2)[:, :, 0]


def random_case(seed: int, *, longest: int = 95) -> RandomCase:
    """A case for the kernels of `specialization_of(seed)`, with any batch, grid, prefix, mean, masks and strides.

    Maps have up to `longest` rows and columns, and fewer where one program a sample serves short sequences.
    """
    generator = random.Random(seed)
    kernels = specialization_of(seed)
    longest = 5 if not GPU else 16 if kernels.path == "fused" else longest
    # Widths that one compiled kernel serves.
    widths = (1, 5) if not GPU else (5, 8) if kernels.narrow else (9, 16) if longest == 16 else (17, longest)
    qkv, weight, grad, options = make_inputs(
        generator.choice((1, 2, 5) if GPU else (1, 2)),
        (generator.randint(1, longest), generator.randint(*widths)),
        generator.choice((0, 1, 4)),
        kernels.heads,
        kernels.head_dim,
        kernels.dtype,
        local=kernels.local,
        masked=True,
        mean=(mean := generator.choice((0.0, 1.0, 4.0))),
        seed=seed,
    )
    masks = dict(token_mask=options["token_mask"], query_mask=options["query_mask"])
    if generator.random() < 0.5:
        masks["query_mask"] = masks["query_mask"].flip(1)
    options |= {name: mask if name in kernels.masks else None for name, mask in masks.items()}
    # An odd number of times, so that strides of an odd multiple of eight stay so: kernels are compiled for either.
    qkv, grad = (_apart(x, generator.choice((1, 3))) for x in (qkv, grad))
    return RandomCase((qkv, weight, grad, options), kernels.kind, PATHS[kernels.path], mean)


class NoGradient(torch.autograd.Function):
    """The identity. Its backward returns None, which stands for a gradient of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> None:
        return None


# The forward pass in one launch


def make_source(qkv: Tensor, *, seed: int = 0) -> LocalSource:
    """Tokens and an MLP whose local weight is about as large as that of `make_inputs`."""
    generator = torch.Generator().manual_seed(seed)
    batch, tokens, _, heads, d = qkv.shape

    def normal(*shape: int, scale: float) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, qkv.dtype)

    return LocalSource(
        normal(batch, tokens, heads * d, scale=tokens**0.5),  # so that their mean is about one
        normal(heads, d, d, scale=d**-0.5), normal(heads, d, scale=0.2),
        normal(heads, 9 * d, d, scale=(d * tokens) ** -0.5), normal(heads, 9 * d, scale=0.1 * tokens**-0.5),
    )  # fmt: skip


def not_made(source: LocalSource) -> Tensor:
    """For calls of `fused.attention` whose kernel makes the local weight, or that have none to make."""
    raise AssertionError("the local weight was made outside the kernel")


def run_made(
    qkv: Tensor, source: LocalSource, options: Mapping[str, Any], *, kind: Kind = INLINE, tile: Tile | None = None
) -> Results:
    """The output of one launch that makes the local weight. `tile`: another than it would choose"""
    with configured(**ONE_LAUNCH), torch.no_grad():
        out = fused.attention(
            [qkv], source, options["token_mask"], options["query_mask"], None, None, None,
            anchored=False, normalization=kind.normalization, feature_map=kind.feature_map,
            scale=1.0 if kind.normalization == "divide" else qkv.shape[-1] ** -0.5, grids=[options["grid"]],
            num_prefix_tokens=options["num_prefix_tokens"], make=not_made, tile=tile,
        )  # fmt: skip
    return dict(out=out)


def made_results(
    qkv: Tensor, source: LocalSource, options: Mapping[str, Any], *, kind: Kind = INLINE, tile: Tile | None = None
) -> tuple[Results, Results, Results]:
    """The reference in float64 and in the inputs' dtype, and `run_made`, to which absent tokens are NaN"""
    mask, results = options["token_mask"], []
    for dtype in (torch.float64, qkv.dtype):
        x, *parameters = (tensor.to(dtype) for tensor in source)
        weight = make_local_weight(masked_mean(zero_absent(x, mask), mask), *parameters, backend="reference")
        with configured(**ONE_LAUNCH):  # no gradients
            results.append(run(qkv, weight, qkv, options, backend="reference", dtype=dtype, kind=kind))
    if mask is not None:
        source = source._replace(x=source.x.masked_fill(~mask.unsqueeze(2), torch.nan))
    exact, plain = results
    return exact, plain, run_made(qkv, source, options, kind=kind, tile=tile)


class RandomShort(NamedTuple):
    case: RandomCase
    source: LocalSource | None
    tile: Tile | None

    def __str__(self) -> str:
        return f"{self.case}, made {self.source is not None}, {self.tile}"

    def errors(self) -> list[Error]:
        if self.source is None:
            return self.case._replace(config=ONE_LAUNCH).errors()
        qkv, _, _, options = self.case.inputs
        return errors(*made_results(qkv, self.source, options, kind=self.case.kind, tile=self.tile))


def random_short(seed: int) -> RandomShort:
    """A random case of up to 40² tokens. If its attention takes no other tensors, the local weight may be made inside.

    Whether it is, and the tile, follow from the specialization, so that each kernel is compiled once.
    """
    case = random_case(seed, longest=40)
    qkv, *_ = case.inputs
    generator = random.Random(str(specialization_of(seed)))
    plain = not (case.kind.weighted or case.kind.anchored or case.kind.value_channels)
    if not plain or generator.random() < 0.4:
        return RandomShort(case, None, None)
    tile = None
    if qkv.dtype != torch.float32 and qkv.shape[-1] <= 64:
        tile = generator.choice(short.TILES)._replace(parts=1 + seed % 5)
    return RandomShort(case, make_source(qkv, seed=seed), tile)


# The MLP half of a block

MlpInputs = tuple[Tensor, ...]  # x, norm_weight, norm_bias, w1, b1, w2, b2


def mlp_inputs(rows: tuple[int, ...], width: int, hidden: int, dtype: torch.dtype, *, seed: int = 0) -> MlpInputs:
    """Both terms of the sum are about one in size, so that neither hides an error of the other."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    return (
        normal(*rows, width), 1 + normal(width, scale=0.2), normal(width, scale=0.2),
        normal(hidden, width, scale=width**-0.5), normal(hidden, scale=0.2),
        normal(width, hidden, scale=2 * hidden**-0.5), normal(width, scale=0.2),
    )  # fmt: skip


def last_step(x: Tensor, *, seed: int = 0) -> OutputProjection:
    """The end of an attention, as large as the stream x that it is added to."""
    generator = torch.Generator().manual_seed(seed)
    width = x.shape[-1]

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(x.device, x.dtype)

    return OutputProjection(normal(*x.shape), normal(width, width, scale=width**-0.5), normal(width, scale=0.2))


def mlp_errors(
    inputs: MlpInputs,
    tile: fused_mlp.Tile | None,
    *,
    projection: OutputProjection | None = None,
    mean: float = 0.0,
) -> tuple[float, float]:
    """How far the kernel's result is from float64, and how far it may be, relative to its norm.

    That is 1.2 times as far as the reference in the same precision, and one rounding. In float32, whose sums depend on
    their order, it is three times as far, and two roundings.
    """
    x, *tensors = inputs
    exactly = None if projection is None else OutputProjection(*(t.double() for t in projection))
    with torch.no_grad():
        exact = add_mlp(*(t.double() for t in inputs), projection=exactly, backend="reference")
        plain = add_mlp(*inputs, projection=projection, backend="reference")
        fast = fused_mlp.add_mlp(x, tensors[:2], tensors[2:], projection, 1e-5, x.dtype, tile)
    assert fast.dtype == plain.dtype
    size = float(exact.norm()) or 1.0
    error, of_plain = (float((z.double() - exact).norm()) / size for z in (fast, plain))
    factor, roundings = (3.0, 2.0) if x.dtype == torch.float32 else (1.2, 1.0)
    return error, factor * of_plain + roundings * torch.finfo(x.dtype).eps * max(1.0, mean)


def trained_mlp_errors(inputs: MlpInputs, tile: fused_mlp.Tile | None) -> list[Error]:
    """The errors of the output and of every gradient, where gradients are needed."""
    names = ("dx", "dnorm_weight", "dnorm_bias", "dw1", "db1", "dw2", "db2")
    upstream = torch.randn(inputs[0].shape, generator=torch.Generator().manual_seed(1))
    dtype = inputs[0].dtype

    def results(f: Callable[..., Tensor], dtype: torch.dtype) -> Results:
        leaves = [t.detach().to(dtype).requires_grad_() for t in inputs]
        out = f(*leaves)
        grads = torch.autograd.grad(out, leaves, upstream.to(DEVICE, inputs[0].dtype).to(dtype))
        return dict(out=out.detach()) | dict(zip(names, grads, strict=True))

    def by_kernel(x: Tensor, *tensors: Tensor) -> Tensor:
        return fused_mlp.add_mlp(x, tensors[:2], tensors[2:], None, 1e-5, dtype, tile)

    def by_reference(*tensors: Tensor) -> Tensor:
        return add_mlp(*tensors, backend="reference")

    exact, plain = (results(by_reference, precision) for precision in (torch.float64, dtype))
    factor, roundings = (3.0, 2.0) if dtype == torch.float32 else (2.0, 1.0)  # as in `mlp_errors`
    return errors(exact, plain, results(by_kernel, dtype), factor=factor, roundings=roundings)


class RandomMlp(NamedTuple):
    inputs: MlpInputs
    tile: fused_mlp.Tile | None

    def errors(self) -> list[Error]:
        """Of inference, of inference with a projection, and of training"""
        projection = last_step(self.inputs[0])
        return [
            ("inference", *mlp_errors(self.inputs, self.tile)),
            ("projected", *mlp_errors(self.inputs, self.tile, projection=projection)),
            *trained_mlp_errors(self.inputs, self.tile),
        ]

    def __str__(self) -> str:
        x, _, _, w1, *_ = self.inputs
        return f"rows {tuple(x.shape[:-1])}, {w1.shape[1]} → {w1.shape[0]} channels, {x.dtype}, {self.tile}"


def random_mlp(seed: int) -> RandomMlp:
    """Widths of models and others, with any tile that fits, split and not."""
    generator = random.Random(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    width = generator.choice((64, 96, 128, 192, 256, 320, 384, 448, 512) if GPU else (16, 32, 48))
    if generator.random() < 0.2:
        width -= generator.randint(1, 15)
    hidden = generator.choice((4 * width, 4 * width, 2 * width + 1, generator.randint(1, 3 * width)))
    rows = generator.choice((1, 49, 197, generator.randint(2, 20_000))) if GPU else generator.randint(1, 40)
    inputs = mlp_inputs((rows,), width, hidden, dtype, seed=seed)
    tile = generator.choice(fitting_tiles(inputs[0]))._replace(splits=generator.choice((1, 1, 2, 5)))
    return RandomMlp(inputs, generator.choice((tile, tile, None)))


def fitting_tiles(x: Tensor) -> list[fused_mlp.Tile]:
    limits = gpu.limits_of(x.device)
    return [tile for tile in fused_mlp.TILES if fused_mlp.fits(tile, x.shape[-1], x.dtype, limits)]


# The norm of a block and the linear layer after it


class NormLinearCase(NamedTuple):
    tensors: tuple[Tensor, ...]  # x, norm_weight, norm_bias, weight, bias
    tile: fused_mlp.Tile | None

    def errors(self) -> list[Error]:
        """Of the normalised rows and of the output"""
        x, *norm, weight, bias = self.tensors
        exact = norm_linear(*(t.double() for t in self.tensors), backend="reference")
        plain = norm_linear(*self.tensors, backend="reference")
        fast = fused_norm_linear.norm_linear(x, norm, weight, bias, 1e-5, x.dtype, self.tile)
        return errors(*(dict(zip(("normed", "out"), y, strict=True)) for y in (exact, plain, fast)))

    def __str__(self) -> str:
        x, *_, bias = self.tensors
        return f"rows {tuple(x.shape[:-1])}, {x.shape[-1]} → {len(bias)} channels, {x.dtype}, {self.tile}"


def norm_linear_inputs(
    rows: tuple[int, ...], width: int, outputs: int, dtype: torch.dtype, *, seed: int = 0
) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, scale: float = 1.0) -> Tensor:
        return (torch.randn(shape, generator=generator) * scale).to(DEVICE, dtype)

    norm = 1 + normal(width, scale=0.2), normal(width, scale=0.2)
    return normal(*rows, width) + 3, *norm, normal(outputs, width, scale=width**-0.5), normal(outputs, scale=0.2)


def random_norm_linear(seed: int) -> NormLinearCase:
    """Widths of models and others, with any tile that fits, split and not."""
    generator = random.Random(seed)
    dtype = DTYPES[seed % len(DTYPES)]
    width = generator.choice((64, 96, 160, 192, 384) if GPU else (16, 32, 48)) - generator.choice((0, 0, 0, 5))
    rows = generator.choice((1, 197, generator.randint(2, 20_000))) if GPU else generator.randint(1, 40)
    outputs = generator.choice((3 * width, generator.randint(1, 2 * width)))
    tensors = norm_linear_inputs((rows,), width, outputs, dtype, seed=seed)
    tile = generator.choice(fitting_tiles(tensors[0]))
    return NormLinearCase(tensors, generator.choice((None, tile, tile._replace(splits=generator.randint(1, 5)))))


# A whole block

BLOCK_FACTOR = 1.2  # how much larger the errors of a block with kernels may be than those of a plain one


class BlockCase(NamedTuple):
    """A block with everything that `optimize` may choose for it, against the same block in plain PyTorch.

    Its parameters have the digits of `dtype`, so that all of an error comes from the calls.
    """

    attention: str
    width: int
    heads: int
    batch: int
    grid: tuple[int, int]
    dtype: torch.dtype
    autocast: bool  # a float32 stream and parameters; otherwise all in `dtype`

    def __str__(self) -> str:
        return (
            f"{self.attention}, {self.width} channels, {self.heads} heads, batch {self.batch}, grid {self.grid}, "
            f"{self.dtype}, {'a float32 stream' if self.autocast else 'all in it'}"
        )

    def draw(self) -> tuple[Block, Tensor, Tensor]:
        """The block in float64, its input and the gradient of its output"""
        generator = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator)

        attention = build_attention(self.attention, self.width, self.heads, num_prefix_tokens=1, local_residual=True)
        block = Block(self.width, attention, mlp_ratio=4, norm_eps=1e-6)
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                if parameter.ndim > 1 and not name.endswith(("b1", "b2")):
                    parameter.copy_(normal(*parameter.shape) * parameter.shape[-1] ** -0.5)
                else:
                    parameter.copy_(normal(*parameter.shape) * 0.2 + ("norm" in name and name.endswith("weight")))
        rows = (self.batch, 1 + self.grid[0] * self.grid[1], self.width)
        x, grad = normal(*rows), normal(*rows)
        return block.to(DEVICE, self.dtype).double(), *(t.to(DEVICE, self.dtype).double() for t in (x, grad))

    def results(self, dtype: torch.dtype, *, fused: bool, training: bool, config: Mapping[str, Any]) -> Results:
        block, x, grad = self.draw()
        autocast = self.autocast and dtype != torch.float64
        stream = torch.float32 if autocast else dtype
        block.to(stream).train(training)
        leaves = dict(block.named_parameters()) | dict(x=x.to(stream).requires_grad_())
        if fused:
            block.fused = ("inference", "normed", "projected", "training")
        backend = use_backend("triton" if fused else "reference")
        autocasting = torch.autocast(DEVICE, self.dtype, enabled=autocast)
        with backend, configured(**config), autocasting, torch.set_grad_enabled(training):
            out = block(leaves["x"], self.grid)
        if not training:
            return dict(out=out)
        grads = torch.autograd.grad(out, list(leaves.values()), grad.to(stream))
        return dict(out=out.detach()) | {f"d{name}": x for name, x in zip(leaves, grads, strict=True)}

    def errors(self, *, training: bool, **config: Any) -> list[Error]:
        """Allowed is `BLOCK_FACTOR` times the error of the plain block.

        The errors of a few numbers differ by chance. So the gradients of all vectors count as one tensor, in which each
        is as long as the others, together with those of the local residual's network, which sees one token an image.

        Args:
            training: the output and all gradients in training mode; otherwise the output of inference.
            config: changes to `config.CONFIG`, which choose the launches of the attention.
        """
        exact, plain, fast = (
            self.results(dtype, fused=fused, training=training, config=config)
            for dtype, fused in ((torch.float64, False), (self.dtype, False), (self.dtype, True))
        )
        if training:
            few = [name for name in exact if exact[name].ndim == 1 or "local" in name]
            sizes = [exact[name].norm() for name in few]
            for found in (exact, plain, fast):
                parts = [found.pop(name).flatten() / size for name, size in zip(few, sizes, strict=True)]
                found["vectors and local residual"] = torch.cat(parts)
        return errors(exact, plain, fast, factor=BLOCK_FACTOR, roundings=0.0)


def block_cases(attentions: Iterable[str] = ("inline", "tangent", "mala", "rala")) -> list[BlockCase]:
    """Half precision, with a stream of either. The interpreter is slow, so the block is small there."""
    sizes: Any = (192, 6, 8, (14, 14)) if GPU else (32, 2, 2, (7, 9))
    return [
        BlockCase(name, *sizes, dtype, autocast)
        for name in attentions
        for dtype in DTYPES[1:]
        for autocast in (True, False)
    ]


# What the attention launches in a block, and whether the block is trained.
BLOCK_RUNS: dict[str, tuple[dict[str, Any], bool]] = {
    "inference, one launch": (ONE_LAUNCH, False),
    "inference": (PATHS["split"], False),
    "training, short sequences": (PATHS["fused"], True),
    "training": (PATHS["split"], True),
}


@contextmanager
def every_kernel_wins() -> Iterator[None]:
    """The kernels of the MLP and of the norm run for all sizes, as if each had been measured to be faster."""

    def choose(x: Tensor, hidden: int, dtype: torch.dtype, use: str) -> fused_mlp.Tile:
        return fused_mlp.choose_tile(x.numel() // x.shape[-1], x.shape[-1], hidden, dtype, gpu.limits_of(x.device))

    before, fused_mlp.winning_tile = fused_mlp.winning_tile, choose
    try:
        yield
    finally:
        fused_mlp.winning_tile = before
