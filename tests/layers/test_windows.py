"""Windows of any size over maps of any size, against loops over their tokens."""

import itertools

import pytest
import torch
from window_oracle import members

from inline_attention.layers.embed import PatchEmbed, resize_map
from inline_attention.layers.windows import WindowPlan, to_windows, window_regions

SIZES = [(4, 4), (5, 7), (1, 6), (7, 3)]
WINDOWS = [None, (2, 2), (3, 2), (4, 4), (9, 9), (1, 5)]

any_cut = pytest.mark.parametrize(("size", "window", "shifted"), list(itertools.product(SIZES, WINDOWS, [False, True])))


@any_cut
def test_windows_hold_their_tokens(size: tuple[int, int], window: tuple[int, int] | None, shifted: bool) -> None:
    x = torch.randn(2, *size, 3)
    plan = WindowPlan.fit(size, window, shifted=shifted)
    cut = to_windows(x, plan)
    expected = members(size, window, shifted)
    assert cut.tokens.shape == (2 * len(expected), len(expected[0]), 3)
    tokens = cut.tokens.unflatten(0, (2, -1))
    mask = torch.ones(tokens.shape[:3], dtype=torch.bool)
    if cut.token_mask is not None:
        mask = cut.token_mask.unflatten(0, (2, -1))
    for w, rows in enumerate(expected):
        for n, position in enumerate(rows):
            assert (mask[:, w, n] == (position is not None)).all()
            value = torch.zeros(2, 3) if position is None else x[:, position[0], position[1]]
            assert torch.equal(tokens[:, w, n], value)
    assert torch.equal(plan.merge(cut.tokens, batch=2), x)


@any_cut
def test_regions_are_neighbours_of_the_map(
    size: tuple[int, int], window: tuple[int, int] | None, shifted: bool
) -> None:
    """Tokens of one window share a region exactly where the shift did not wrap one of them around."""
    plan = WindowPlan.fit(size, window, shifted=shifted)
    regions = window_regions(plan, torch.device("cpu"))
    for w, rows in enumerate(members(size, window, shifted)):
        for (i, a), (j, b) in itertools.combinations(enumerate(rows), 2):
            if a is None or b is None:
                continue
            # Neighbours stay as far apart in the window as they are on the map.
            width = plan.window[1]
            offset = (j // width - i // width, j % width - i % width)
            assert (regions[w, i] == regions[w, j]) == (offset == (b[0] - a[0], b[1] - a[1]))


@pytest.mark.parametrize("size", [(8, 8), (9, 14), (3, 5)])
@pytest.mark.parametrize("patch", [2, 4])
def test_patch_embed_is_a_strided_convolution(size: tuple[int, int], patch: int) -> None:
    embed = PatchEmbed(patch, 3, 6).double()
    x = torch.randn(2, 3, *size, dtype=torch.float64)
    padded = torch.nn.functional.pad(x, (0, -size[1] % patch, 0, -size[0] % patch))
    expected = embed.proj(padded).permute(0, 2, 3, 1)
    torch.testing.assert_close(embed(x), expected, atol=1e-12, rtol=0)
    channels_last = x.to(memory_format=torch.channels_last)
    torch.testing.assert_close(embed(channels_last), expected, atol=1e-12, rtol=0)


def test_resize_map_interpolates_between_centres() -> None:
    rows, columns = torch.meshgrid(torch.arange(4.0), torch.arange(6.0), indexing="ij")
    x = torch.stack([rows, columns], -1)[None]
    assert resize_map(x, (4, 6), mode="bilinear") is x
    out = resize_map(x, (8, 3), mode="bilinear")
    rows, columns = torch.meshgrid(
        torch.tensor([0, 0.25, 0.75, 1.25, 1.75, 2.25, 2.75, 3]), torch.tensor([0.5, 2.5, 4.5]), indexing="ij"
    )
    torch.testing.assert_close(out, torch.stack([rows, columns], -1)[None])


@pytest.mark.parametrize(("mode", "expected"), [("bilinear", 0.0), ("bicubic", -0.09375)])
def test_resize_map_does_not_average(mode: str, expected: float) -> None:
    """A quarter of the size: the first value lies between the second and the third of the map. Antialiasing would take
    the first one too."""
    x = torch.zeros(1, 1, 8, 1)
    x[0, 0, 0] = 1
    assert resize_map(x, (1, 2), mode=mode)[0, 0, 0].item() == pytest.approx(expected)


def test_one_graph_serves_maps_of_any_size() -> None:
    """Its sizes are symbolic. It pads, shifts and resizes as the modules do at each size."""

    class Module(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.positions = PatchEmbed(2, 3, 4), torch.nn.Parameter(torch.randn(1, 3, 3, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            height, width = x.shape[1:3]
            x = x + resize_map(self.positions, (height, width), mode="bilinear")
            plan = WindowPlan.fit((height, width), (3, 2), shifted=True)
            tokens, token_mask = to_windows(x, plan)
            if token_mask is not None:
                tokens = tokens.masked_fill(~token_mask[..., None], 0)
            return plan.merge(tokens + tokens.sum(1, keepdim=True), batch=x.shape[0])

    module = Module()
    dynamic = {2: torch.export.Dim.DYNAMIC, 3: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        graph = torch.export.export(module, (torch.randn(2, 3, 21, 30),), dynamic_shapes=(dynamic,)).module()
        for size in ((21, 30), (24, 16), (9, 33)):  # the second without padding
            x = torch.randn(2, 3, *size)
            torch.testing.assert_close(graph(x), module(x))
