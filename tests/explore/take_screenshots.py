"""Takes the pictures of docs/explore.md anew: PYTHONPATH=tests python tests/explore/take_screenshots.py [WEIGHTS…]"""

import io
import json
import sys
import tempfile
from collections.abc import Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from explored import BROWSER, CPU, DESKTOP, FLAGS, KINDS, PATIENCE, PHONE, serve
from PIL import Image
from playwright.sync_api import expect, sync_playwright

from inline_attention import linearize
from inline_attention.explore import load_subjects
from inline_attention.models.weights import save_weights
from inline_attention.tasks.classification.classifier import load_classifier, preprocessing

IMAGES = Path(__file__).parents[2] / "docs" / "images"


def visit(browser: Any, url: str, viewport: dict[str, int], scheme: str) -> list[Image.Image]:
    """The three parts of the page."""
    page = browser.new_page(viewport=viewport, color_scheme=scheme)
    shots = []
    for tab in ("plane", "image", "cost"):
        page.goto(f"{url}#{tab}")
        page.reload()
        if tab == "plane":
            expect(page.locator("#verdict-linear")).to_contain_text("Same weights")
        elif tab == "image":
            choose_token(page, KINDS)
        else:
            expect(page.locator("#cost-chart polyline")).to_have_count(3)
        shots.append(shot(page))
    page.close()
    return shots


def choose_token(page: Any, kinds: Sequence[str]) -> None:
    page.locator("#image-layer").fill("2")
    box = page.locator("[data-kind=picture] canvas").bounding_box()
    page.mouse.click(box["x"] + 0.38 * box["width"], box["y"] + 0.35 * box["height"])
    for kind in kinds:
        expect(page.locator(f"[data-kind={kind}] .facts")).to_contain_text("Smallest")
        expect(page.locator(f"[data-kind={kind}] .guesses li").first).to_be_visible()
    expect(page.locator(".panel.stale")).to_have_count(0)


def shot(page: Any) -> Image.Image:
    return Image.open(io.BytesIO(page.screenshot(full_page=True, animations="disabled"))).convert("RGB")


def visit_student(browser: Any) -> Image.Image:
    """The package's softmax model, linearised and not trained, beside itself."""
    teacher = load_classifier("softmax_deit_study", "pretrained")
    linearize(teacher.model)
    metadata = {"class_names": json.dumps(teacher.class_names), "preprocessing": preprocessing(teacher.data)}
    with tempfile.TemporaryDirectory() as folder:
        file = save_weights(teacher.model, Path(folder, "student.safetensors"), metadata=metadata)
        subjects = load_subjects([str(file)], device=CPU)
    with contextmanager(serve)(subjects) as server:
        page = browser.new_page(viewport=DESKTOP, color_scheme="light")
        page.goto(f"{server.url}#image")
        choose_token(page, ("softmax", "tangent"))
        return shot(page)


def main() -> None:
    expect.set_options(timeout=5 * PATIENCE)  # counting costs is slow on a busy machine
    with contextmanager(serve)(load_subjects(sys.argv[1:], device=CPU)) as server, sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=BROWSER, args=list(FLAGS))
        plane, image, _ = visit(browser, server.url, DESKTOP, "light")
        phones = visit(browser, server.url, PHONE, "dark")
        student = visit_student(browser)
        browser.close()
    plane.save(IMAGES / "explore-plane.png", optimize=True)
    image.save(IMAGES / "explore-image.jpg", quality=78, optimize=True)
    student.save(IMAGES / "explore-student.jpg", quality=78, optimize=True)
    width, height = phones[0].width + 20, max(phone.height for phone in phones)
    strip = Image.new("RGB", (width * len(phones), height), phones[0].getpixel((0, 0)))
    for i, phone in enumerate(phones):
        strip.paste(phone, (i * width, 0))
    strip = strip.resize((strip.width * 3 // 4, strip.height * 3 // 4), Image.Resampling.LANCZOS)
    strip.save(IMAGES / "explore-phone.jpg", quality=66, optimize=True)


if __name__ == "__main__":
    main()
