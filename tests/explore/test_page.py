"""The page in a browser, used as a person would: with a mouse, a keyboard, files, and on a phone."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from explored import BROWSER, CPU, DESKTOP, FLAGS, KINDS, PATIENCE, PHONE, ask, huge_png, picture_file, serve
from small import create_small

from inline_attention import linearize
from inline_attention.explore import ExploreServer, Subject, load_subjects
from inline_attention.explore import cost as cost_module
from inline_attention.explore.pictures import MAX_BYTES
from inline_attention.models.weights import save_weights
from inline_attention.ops import attention_matrix

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed: pip install '.[dev]'")
expect = sync_api.expect
expect.set_options(timeout=PATIENCE)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="there is no Chromium or Chrome on the path")


@pytest.fixture(scope="module")
def server(subjects: list[Subject]) -> Iterator[ExploreServer]:
    yield from serve(subjects)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any, server: ExploreServer) -> Iterator[Callable[..., Any]]:
    """Opens the page at a tab. A test fails on any error that the browser reports."""
    problems: list[str] = []
    contexts = []

    def open_page(tab: str = "plane", *, viewport: dict[str, int] = DESKTOP, **options: Any) -> Any:
        context = browser.new_context(viewport=viewport, **options)
        context.set_default_timeout(PATIENCE)
        contexts.append(context)
        page = context.new_page()
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.goto(f"{server.url}#{tab}")
        expect(page.locator(f"#{tab}")).to_be_visible()
        expect(page.locator("#point-q1")).to_have_attribute("aria-valuetext", re.compile("."))  # the page has started
        return page

    yield open_page
    for context in contexts:
        context.close()
    # The browser itself reports answers such as 422 to the deliberate errors of a test.
    assert [problem for problem in problems if "the server responded with a status" not in problem] == []


def weights_shown(page: Any, kind: str) -> list[list[float]]:
    """The weights of each query on each key as the page shows them, in per cent."""
    rows = page.locator(f".row.{kind}").evaluate_all("rows => rows.map(row => row.innerText.trim().split(/\\s+/))")
    return [[float(text.replace("−", "-")) / 100 for text in row] for row in rows]


def coordinates(page: Any, letter: str) -> torch.Tensor:
    inputs = page.locator("#coordinates tr").evaluate_all(
        """rows => rows.map((row) =>
            [row.cells[0].innerText, ...[...row.querySelectorAll("input")].map((input) => Number(input.value))])"""
    )
    return torch.tensor([values for name, *values in inputs if name.startswith(letter)], dtype=torch.float64)


def matrix(queries: torch.Tensor, keys: torch.Tensor, kind: Any, feature_map: str) -> torch.Tensor:
    """(queries, 2), (keys, 2) → (queries, keys), by the library; softmax sees the points as they are."""
    phi = "identity" if kind == "softmax" else feature_map
    return attention_matrix(queries[None, :, None], keys[None, :, None], kind=kind, feature_map=phi)[0, 0]


def test_attention_functions_are_the_library_s(open_page: Callable[..., Any]) -> None:
    """The same points through the page's functions and through `attention_matrix`, for every feature map."""
    page = open_page()
    torch.manual_seed(0)
    queries, keys = 4 * torch.rand(2, 6, 2, dtype=torch.float64) - 2
    weight, bias = torch.randn(2, 2, dtype=torch.float64), torch.randn(2, dtype=torch.float64)
    found = page.evaluate(
        """async ({queries, keys, affine}) => {
            const {KERNELS, KINDS, weights} = await import("/attention.js");
            const rows = (phi) => Object.fromEntries(KINDS.map((kind) => [kind, weights(kind, queries, keys, phi)]));
            return Object.fromEntries(Object.entries(KERNELS).map(([name, {make}]) => [name, rows(make(affine))]));
        }""",
        dict(queries=queries.tolist(), keys=keys.tolist(), affine=dict(A=weight.tolist(), b=bias.tolist())),
    )
    assert set(found) == {"identity", "relu", "leaky_relu", "exp", "relu_affine"}
    for name, by_kind in found.items():
        assert set(by_kind) == set(KINDS)
        for kind, rows in by_kind.items():
            points, phi = (queries, keys), name
            if name == "relu_affine":
                phi = "relu"
                if kind != "softmax":
                    points = (queries @ weight.T + bias, keys @ weight.T + bias)
            expected = matrix(*points, kind, phi)
            torch.testing.assert_close(torch.tensor(rows, dtype=torch.float64), expected, rtol=1e-9, atol=1e-12)


def test_collinear_queries(open_page: Callable[..., Any]) -> None:
    page = open_page()
    expect(page.locator("#verdict-softmax")).to_contain_text("Tells all queries apart")
    expect(page.locator("#verdict-inline")).to_contain_text("Tells all queries apart")
    expect(page.locator("#verdict-linear")).to_contain_text("Same weights for q₁, q₂, q₃, and q₄")
    linear, inline = weights_shown(page, "linear"), weights_shown(page, "inline")
    assert linear == [linear[0]] * 4
    assert len({tuple(row) for row in inline}) == 4
    for preset, verdict in (
        ("affine", "Same weights for q₁, q₂, q₃, and q₄"),
        ("directions", "Tells all queries apart"),
        ("merged", "Same weights for q₁ and q₂. φ itself makes one point of them"),
    ):
        page.select_option("#plane-preset", preset)
        expect(page.locator("#verdict-linear")).to_contain_text(verdict)
    expect(page.locator("#verdict-inline")).to_contain_text("Same weights for q₁ and q₂")
    page.select_option("#plane-kernel", "leaky_relu")
    expect(page.locator("#verdict-inline")).to_contain_text("Tells all queries apart")


def drag(page: Any, selector: str, x: float, y: float) -> None:
    box = page.locator(f"{selector} .reach").bounding_box()
    start = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    page.mouse.move(*start)
    page.mouse.down()
    page.mouse.move(start[0] + x / 2, start[1] + y / 2)
    page.mouse.move(start[0] + x, start[1] + y)
    page.mouse.up()


def test_dragging(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.locator("summary").click()
    before = coordinates(page, "q")
    drag(page, "#point-q4", -60, 20)
    expect(page.locator("#point-q4")).not_to_have_attribute("aria-valuetext", re.compile("1.14, 2.05"))
    after = coordinates(page, "q")
    assert not torch.allclose(after, before, atol=0.1)
    # The others turn with it and keep their lengths.
    torch.testing.assert_close(after[:3].norm(dim=1), before[:3].norm(dim=1), rtol=0, atol=2e-3)
    expect(page.locator("#verdict-linear")).to_contain_text("Same weights for q₁, q₂, q₃, and q₄")

    page.uncheck("#plane-together")
    drag(page, "#point-q4", 90, 60)
    drag(page, "#point-k1", -40, 40)
    expect(page.locator("#verdict-linear")).to_contain_text("Same weights for q₁, q₂, and q₃")
    expect(page.locator("#plane-preset")).to_have_value("")
    for kernel in ("relu", "exp", "identity", "leaky_relu"):
        page.select_option("#plane-kernel", kernel)
        for kind in KINDS:
            expected = matrix(coordinates(page, "q"), coordinates(page, "k"), kind, kernel)
            shown = torch.tensor(weights_shown(page, kind), dtype=torch.float64)
            torch.testing.assert_close(shown, expected, rtol=0.01, atol=0.008)  # coordinates are shown to 0.001


def test_keyboard_in_the_plane(open_page: Callable[..., Any]) -> None:
    page = open_page()
    page.locator("#tab-plane").focus()
    page.keyboard.press("ArrowRight")
    expect(page.locator("#image")).to_be_visible()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#plane")).to_be_visible()
    page.uncheck("#plane-together")
    page.locator("#point-q1").focus()
    for key in ("ArrowRight", "Shift+ArrowUp"):
        page.keyboard.press(key)
    expect(page.locator("#point-q1")).to_have_attribute("aria-valuetext", "q₁ at 0.45, 0.97")
    expect(page.locator("#verdict-linear")).to_contain_text("Same weights for q₂, q₃, and q₄")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.id") == "point-q2"


def map_painted(page: Any, kind: str) -> list[int]:
    """The pixels in the middle of the 4×4 tokens."""
    return page.locator(f"[data-kind={kind}] canvas").evaluate(
        """canvas => {
            const context = canvas.getContext("2d");
            const at = [0, 1, 2, 3].map((i) => Math.round((i + 0.3) * canvas.width / 4));
            return at.flatMap((y) => at.flatMap((x) => [...context.getImageData(x, y, 1, 1).data]));
        }"""
    )


def settled(page: Any) -> None:
    """Wait until the page has received all maps that it requested."""
    expect(page.locator(".panel.stale")).to_have_count(0)
    for kind in KINDS:
        expect(page.locator(f"[data-kind={kind}] .facts")).to_contain_text("Smallest")


def test_tokens_layers_and_heads(open_page: Callable[..., Any]) -> None:
    page = open_page("image")
    settled(page)
    expect(page.locator("#image-random")).to_contain_text("Linear: random weights")
    expect(page.locator("[data-kind=softmax]")).to_contain_text("softmax_deit_study.safetensors")
    facts = page.locator("[data-kind=picture] .facts")
    box = page.locator("[data-kind=picture] canvas").bounding_box()
    page.mouse.click(box["x"] + 0.9 * box["width"], box["y"] + 0.1 * box["height"])
    expect(facts).to_have_text("Token in row 1 of 4, column 4 of 4.")
    settled(page)

    def changed_by(action: Callable[[], object], *kinds: str) -> None:
        before = {kind: map_painted(page, kind) for kind in KINDS}
        action()
        settled(page)
        changed = {kind for kind in KINDS if map_painted(page, kind) != before[kind]}
        assert changed >= set(kinds)  # others may, because all maps share a scale

    with page.expect_request(lambda request: "/api/map" in request.url and '"layer":2' in request.post_data):
        changed_by(lambda: page.locator("#image-layer").fill("3"), *KINDS)
    expect(page.locator("#image-layer-value")).to_have_text("3 of 3")
    heads = page.get_by_label("Head of InLine")
    assert heads.locator("option").all_inner_texts() == ["mean of heads", "head 1 of 2", "head 2 of 2"]
    changed_by(lambda: heads.select_option("1"), "inline")
    changed_by(lambda: page.check("#image-residual"), "inline")
    expect(page.locator("[data-kind=inline] .facts")).to_contain_text("with the local residual")
    expect(page.locator("[data-kind=softmax] .facts")).to_contain_text("this attention has no local residual")
    changed_by(lambda: page.select_option("#image-reference", "uniform"), *KINDS)
    page.locator("[data-kind=inline] canvas").focus()
    changed_by(lambda: page.keyboard.press("ArrowDown"), *KINDS)
    expect(facts).to_have_text("Token in row 2 of 4, column 4 of 4.")
    changed_by(lambda: page.get_by_label("Flower").click(), *KINDS)


def legend(page: Any) -> list[float]:
    return [float(text.replace("−", "-")) for text in page.locator("#image-legend span").all_inner_texts()]


def test_predictions_are_beside_the_maps(open_page: Callable[..., Any], server: ExploreServer) -> None:
    page = open_page("image")
    for number, kind in enumerate(KINDS):
        guesses = page.locator(f"article[data-kind={kind}] .guesses li")
        _, answer, _ = ask(server, "POST", "/api/prediction", dict(picture="china", model=number))
        if kind == "linear":  # the one with random weights
            assert answer["guesses"] == []
            expect(guesses).to_have_text(["No prediction: random weights."])
            continue
        expect(guesses).to_have_count(3)
        for item, guess in zip(guesses.all(), answer["guesses"], strict=True):
            expect(item.locator("span")).to_have_text(guess["name"])
            assert float(item.locator("b").inner_text().rstrip("%")) == pytest.approx(
                100 * guess["probability"], abs=0.5
            )
    page.locator("#image-samples button").nth(1).click()
    _, answer, _ = ask(server, "POST", "/api/prediction", dict(picture="flower", model=0))
    meter = page.locator("article[data-kind=softmax] .guesses meter").first
    expect(meter).to_have_attribute("value", str(answer["guesses"][0]["probability"]))


def test_all_maps_share_a_scale(open_page: Callable[..., Any], server: ExploreServer) -> None:
    """The legend reads as weight × N, its ends are the largest of any map, and its middle is in the middle."""
    page = open_page("image")
    settled(page)
    for residual in (False, True):
        page.set_checked("#image-residual", residual)
        for reference, middle in (("zero", 0), ("uniform", 1)):
            page.select_option("#image-reference", reference)
            ends = []
            for kind in KINDS:
                facts = page.locator(f"[data-kind={kind}] .facts").inner_text().replace("−", "-")
                ends += [float(end) for end in re.findall(r"(?:Smallest|largest) ([-\d.]+)", facts)]
            assert len(ends) == 6
            reach = max(abs(end - middle) for end in ends)
            assert legend(page) == pytest.approx([middle - reach, middle, middle + reach], abs=0.011)
    status, content, _ = ask(server, "POST", "/api/map", dict(picture="china", model=0, layer=0, x=0.5, y=0.5))
    assert status == 200
    facts = page.locator("[data-kind=softmax] .facts").inner_text()
    assert f"largest {content['tokens'] * max(content['weights']):.2f}" in facts
    assert f"N = {content['tokens']}" in facts


def test_a_student_beside_its_teacher(browser: Any, tmp_path: Path) -> None:
    """Titled so, on one colour scale, each with its prediction."""
    model = create_small("softmax_deit_tiny")
    linearize(model)
    file = str(save_weights(model, tmp_path / "student.safetensors"))
    with contextmanager(serve)(load_subjects([file], device=CPU)) as server:
        page = browser.new_page(viewport=DESKTOP)
        page.goto(f"{server.url}#image")
        expect(page.locator(".panel h2")).to_have_text(["Picture", "Softmax put back", "Linearised: tangent"])
        expect(page.locator(".panel.stale")).to_have_count(0)
        ends: list[float] = []
        for kind in ("softmax", "tangent"):
            facts = page.locator(f"[data-kind={kind}] .facts")
            expect(facts).to_contain_text("Smallest")
            expect(page.locator(f"[data-kind={kind}] .guesses li")).to_have_count(3)
            expect(page.locator(f"[data-kind={kind}]")).to_contain_text("student.safetensors")
            ends += map(float, re.findall(r"(?:Smallest|largest) ([-\d.]+)", facts.inner_text().replace("−", "-")))
        expect(page.locator("#image-random")).to_be_hidden()
        assert max(legend(page)) == pytest.approx(max(map(abs, ends)), abs=0.011)
        page.close()


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
def test_numbers_do_not_overlap(open_page: Callable[..., Any], viewport: dict[str, int]) -> None:
    page = open_page(viewport=viewport)
    for preset in ("collinear", "affine", "directions", "merged"):
        page.select_option("#plane-preset", preset)
        for kernel in ("relu", "identity", "leaky_relu", "exp"):
            page.select_option("#plane-kernel", kernel)
            overlaps = page.evaluate(
                """() => [...document.querySelectorAll(".row")].flatMap((row) => {
                    const boxes = [...row.querySelectorAll(".weight")].map((node) => {
                        const range = document.createRange();
                        range.selectNodeContents(node);
                        return range.getBoundingClientRect();
                    });
                    return boxes.slice(1).filter((box, i) => box.left < boxes[i].right + 1).map(() => row.innerText);
                })"""
            )
            assert overlaps == [], (preset, kernel)


def test_uploads(open_page: Callable[..., Any], tmp_path: Path) -> None:
    page = open_page("image")
    settled(page)
    status = page.locator("#image-status")

    def upload(name: str, content: bytes) -> None:
        path = tmp_path / name
        path.write_bytes(content)
        page.set_input_files("#image-file", path)

    before = map_painted(page, "softmax")
    upload("mine.png", picture_file(90, 60))
    expect(status).to_have_text("“mine.png” is loaded.")
    settled(page)
    mine = map_painted(page, "softmax")
    assert mine != before
    for name, content, message in (
        ("notes.txt", b"these are notes", "“notes.txt”: this is not an image that can be read here"),
        ("bomb.png", huge_png(20_000), "at most 40 million pixels are decoded here"),
        ("large.png", bytes(MAX_BYTES + 1), "“large.png” has 16.0 MiB; the limit is 16 MiB"),
    ):
        upload(name, content)
        expect(status).to_contain_text(message)
        expect(status).to_have_class(re.compile("error"))
    assert map_painted(page, "softmax") == mine  # what was there stays
    page.get_by_label("Flower").click()
    expect(status).to_be_empty()


def test_two_visitors(open_page: Callable[..., Any], tmp_path: Path) -> None:
    """Each visitor sees their own picture, also after the other one has uploaded theirs."""
    pages = [open_page("image") for _ in range(2)]
    pictures = []
    for seed, page in enumerate(pages):
        path = tmp_path / f"{seed}.png"
        path.write_bytes(picture_file(64, 64, seed=seed))
        page.set_input_files("#image-file", path)
        expect(page.locator("#image-status")).to_have_text(f"“{seed}.png” is loaded.")
        settled(page)
        pictures.append(map_painted(page, "inline"))
    assert pictures[0] != pictures[1]
    for page, picture in zip(pages, pictures, strict=True):
        page.check("#image-residual")
        page.uncheck("#image-residual")
        settled(page)
        assert map_painted(page, "inline") == picture


def test_costs(open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    page = open_page("cost")
    expect(page.locator("#cost-table tbody tr")).to_have_count(6)
    expect(page.locator("#cost-chart polyline")).to_have_count(3)
    page.check("[value=time]")
    expect(page.locator("#cost-chart")).to_contain_text("Not measured yet")
    page.click("#cost-measure")
    expect(page.locator("#cost-status")).to_have_text("Measured.")
    expect(page.locator("#cost-chart polyline")).to_have_count(3)
    assert "–" not in page.locator("#cost-table").inner_text()

    monkeypatch.setattr(cost_module, "SIZES", (32,) * 1000)
    page.click("#cost-measure")
    expect(page.locator("#cost-progress")).to_be_visible()
    page.click("#cost-cancel")
    expect(page.locator("#cost-status")).to_have_text("Stopped; the results so far are kept.")
    expect(page.locator("#cost-measure")).to_be_enabled()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone(open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """Nothing is wider than the screen, fingers drag, and nothing is too small to read."""
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    page = open_page(viewport=PHONE, color_scheme=scheme, has_touch=True, is_mobile=True)
    for tab in ("plane", "image", "cost"):
        page.locator(f"#tab-{tab}").tap()
        if tab == "image":
            settled(page)
            name = page.locator("[data-kind=softmax] .guesses span").first
            expect(name).to_be_visible()
            assert name.bounding_box()["width"] > 80  # room for the name of a class
        if tab == "cost":
            expect(page.locator("#cost-table tbody tr")).to_have_count(6)
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        wide = page.evaluate(
            """() => [...document.querySelectorAll("main p")].filter((node) =>
                node.scrollWidth > node.clientWidth).length"""
        )
        assert wide == 0
        small = page.evaluate(
            """() => [...document.querySelectorAll("main *")].filter((node) =>
                node.checkVisibility() && node.childElementCount === 0 && node.textContent.trim() !== ""
                && !node.closest("svg") && parseFloat(getComputedStyle(node).fontSize) < 9.5).length"""
        )
        assert small == 0
    page.locator("#tab-plane").tap()
    box = page.locator("#point-q4 .reach").bounding_box()
    touch = page.context.new_cdp_session(page)
    x, y = box["x"] + box["width"] / 2, box["y"] + box["height"] / 2
    for kind, points in (
        ("touchStart", [dict(x=x, y=y)]),
        ("touchMove", [dict(x=x - 20, y=y + 5)]),
        ("touchMove", [dict(x=x - 40, y=y + 10)]),
        ("touchEnd", []),
    ):
        touch.send("Input.dispatchTouchEvent", dict(type=kind, touchPoints=points))
    expect(page.locator("#point-q4")).not_to_have_attribute("aria-valuetext", re.compile("1.14, 2.05"))
    page.locator("#tab-image").tap()
    canvas = page.locator("[data-kind=inline] canvas").bounding_box()
    page.locator("[data-kind=inline] canvas").tap(position=dict(x=5, y=canvas["height"] - 5))
    expect(page.locator("[data-kind=picture] .facts")).to_have_text("Token in row 4 of 4, column 1 of 4.")


def test_every_control_has_a_name(open_page: Callable[..., Any]) -> None:
    """What a screen reader would say of each control in the tab order."""
    page = open_page()
    for tab in ("plane", "image", "cost"):
        page.locator(f"#tab-{tab}").click()
        if tab == "image":
            settled(page)
        names = page.locator(f"#{tab}").aria_snapshot()
        unnamed = re.findall(r"- (?:button|combobox|checkbox|radio|slider|spinbutton|progressbar)(?=:|$)", names, re.M)
        assert unnamed == [], names


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_contrast(open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, scheme: str) -> None:
    """WCAG AA: 4.5 to 1 for text, 3 to 1 for large text and for the edges of controls."""
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    page = open_page(color_scheme=scheme)
    for tab in ("plane", "image", "cost"):
        page.locator(f"#tab-{tab}").click()
        if tab == "image":
            settled(page)
            page.set_input_files("#image-file", {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"notes"})
            expect(page.locator("#image-status")).to_have_class(re.compile("error"))
        if tab == "cost":
            expect(page.locator("#cost-table tbody tr")).to_have_count(6)
        ratios = page.evaluate(
            """() => {
                const channels = (colour) => colour.match(/[\\d.]+/g).map(Number);
                const linear = (c) => (c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
                const luminance = (colour) => {
                    const [r, g, b] = channels(colour).map((c) => linear(c / 255));
                    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
                };
                const ratio = (a, b) => {
                    const [low, high] = [luminance(a), luminance(b)].sort((p, q) => p - q);
                    return (high + 0.05) / (low + 0.05);
                };
                const behind = (node) => {
                    const colour = getComputedStyle(node).backgroundColor;
                    return channels(colour)[3] === 0 ? behind(node.parentElement) : colour;
                };
                const text = (node) => [...node.childNodes].some((child) => child.nodeType === 3 && child.data.trim());
                const found = [];
                for (const node of document.querySelectorAll("body *")) {
                    if (!node.checkVisibility() || node.closest(":disabled")) continue;
                    const style = getComputedStyle(node);
                    const colour = node instanceof SVGElement ? style.fill : style.color;
                    const size = parseFloat(style.fontSize);
                    const large = size >= 24 || (size >= 18.66 && style.fontWeight >= 700);
                    if (text(node)) found.push([node.textContent, ratio(colour, behind(node)), large ? 3 : 4.5]);
                    if (node.matches("select, .button, input[type=number]")) {
                        found.push([node.id, ratio(style.borderTopColor, behind(node.parentElement)), 3]);
                    }
                }
                return found;
            }"""
        )
        assert len(ratios) > 20
        assert [ratio for ratio in ratios if ratio[1] < ratio[2]] == [], tab


def test_focus_is_visible(open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The Tab key reaches every control, and each then has an outline."""
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    page = open_page()
    for tab, count in (("plane", 13), ("image", 14), ("cost", 3)):
        page.locator(f"#tab-{tab}").click()
        if tab == "image":
            settled(page)
        if tab == "cost":
            expect(page.locator("#cost-measure")).to_be_enabled()
        for stop in range(count):
            outlined = page.evaluate(
                """() => {
                    const node = document.activeElement;
                    if (node.matches(".point")) return getComputedStyle(node.firstChild).stroke !== "none";
                    const shown = node.matches(".upload input") ? node.parentElement : node;
                    return getComputedStyle(shown).outlineWidth === "3px";
                }"""
            )
            if stop > 0:  # the click that opened the tab shows no outline
                assert outlined, page.evaluate("document.activeElement.outerHTML")
            page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement === document.body"), "more controls than were counted"


@pytest.mark.parametrize("viewport", [DESKTOP, PHONE], ids=["desktop", "phone"])
@pytest.mark.parametrize("tab", ["plane", "image", "cost"])
def test_nothing_moves_while_the_page_fills(
    open_page: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tab: str, viewport: dict[str, int]
) -> None:
    """The browser's own measure of layout shifts. The tab that turns bold moves its neighbours a little."""
    monkeypatch.setattr(cost_module, "SIZES", (32, 64))
    page = open_page(tab, viewport=viewport)
    if tab == "image":
        settled(page)
        expect(page.locator(".guesses li").first).to_be_visible()
    if tab == "cost":
        expect(page.locator("#cost-table tbody tr")).to_have_count(6)
    shift = page.evaluate(
        """() => {
            const observer = new PerformanceObserver(() => {});
            observer.observe({type: "layout-shift", buffered: true});
            return observer.takeRecords().reduce((sum, entry) => sum + entry.value, 0);
        }"""
    )
    assert shift < 0.01


def test_a_server_that_ended(browser: Any, server: ExploreServer) -> None:
    """The page says so instead of showing controls that do nothing."""
    page = browser.new_page()
    page.route("**/api/setup", lambda route: route.abort())
    page.goto(server.url)
    expect(page.get_by_role("alert")).to_have_text("The server does not answer. Is `inline explore` still running?")
    expect(page.locator("main")).to_be_hidden()
    page.close()


def test_another_page_cannot_use_it(browser: Any, server: ExploreServer) -> None:
    """Browsers let any page send a form to this server. Such a request is refused."""
    elsewhere = "http://elsewhere.test/"
    form = f"<form method=post enctype=text/plain action={server.url}api/measure><button>Win a prize</button></form>"
    page = browser.new_page()
    page.route(elsewhere, lambda route: route.fulfill(body=form, content_type="text/html"))
    page.goto(elsewhere)
    with page.expect_navigation() as navigation:
        page.click("button")
    assert navigation.value.status == 403
    assert navigation.value.json() == {"error": "requests of other pages are not answered"}
    page.close()
