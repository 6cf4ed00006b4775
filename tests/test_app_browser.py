"""The page of `misconv app` in a real browser: nothing leaves the machine, holes are painted, everybody can use it."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest

from tests.app_server import Server, started

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium, chromium-browser or google-chrome on PATH")

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip
WCAG = {"runOnly": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa"]}
MOMENT = 60_000  # ms; machines that test are busy


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory, "--upload-limit", "1") as made:
        yield made


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        made = driver.chromium.launch(executable_path=BROWSER, args=FLAGS, env={**os.environ, "HOME": folder})
        yield made
        made.close()


class Visit:
    """One person with the page open."""

    def __init__(self, browser: Any, server: Server, **options: Any) -> None:
        self.hosts: set[str] = set()
        self.problems: list[str] = []
        self.context = browser.new_context(**options)
        self.page = self.context.new_page()
        self.page.on("request", lambda request: self.hosts.add(urlsplit(request.url).netloc))
        self.page.on("pageerror", lambda error: self.problems.append(str(error)))
        self.page.goto(server.url)
        self.page.wait_for_selector("#mc-results", timeout=MOMENT)
        self.page.wait_for_selector("canvas[data-shown]", timeout=MOMENT)

    def number(self) -> str:
        """Which results are shown."""
        found = self.page.get_attribute("#mc-results", "data-answer")
        assert found is not None
        return str(found)

    def after(self, before: str) -> None:
        """Wait until other results are shown."""
        self.page.wait_for_function(
            "before => document.querySelector('#mc-results')?.dataset.answer !== before", arg=before, timeout=MOMENT
        )

    def stroke(self, *points: tuple[float, float]) -> None:
        """Paint along points, in shares of the canvas."""
        before = self.number()
        self.page.locator("canvas").scroll_into_view_if_needed()
        box = self.page.locator("canvas").bounding_box()
        places = [(box["x"] + x * box["width"], box["y"] + y * box["height"]) for x, y in points]
        self.page.mouse.move(*places[0])
        self.page.mouse.down()
        for place in places[1:]:
            self.page.mouse.move(*place, steps=8)
        self.page.mouse.up()
        self.after(before)

    def press(self, name: str) -> None:
        """Click something, and wait for its results."""
        before = self.number()
        self.page.get_by_label(name, exact=True).check()
        self.after(before)

    def status(self) -> str:
        return str(self.page.inner_text(".mc-status"))

    def answer(self) -> str:
        return str(self.page.inner_text("#mc-answer"))

    def bars(self) -> str:
        return str(self.page.inner_html(".mc-bars"))

    def upload(self, path: Path) -> None:
        self.page.set_input_files("#mc-file input[type=file]", str(path))

    def close(self) -> None:
        self.context.close()


def hidden(status: str) -> int:
    found = re.match(r"([\d,]+) of [\d,]+ pixels are hidden", status)
    return 0 if found is None else int(found[1].replace(",", ""))


def test_painting_a_hole(browser: Any, server: Server) -> None:
    visit = Visit(browser, server, viewport={"width": 1300, "height": 900})
    assert hidden(visit.status()) == 16  # a quarter, to begin with
    before = visit.number()
    visit.page.get_by_role("button", name="Clear").click()
    visit.after(before)
    assert hidden(visit.status()) == 0
    assert "no doubt comes from a hole" in visit.answer()
    said = visit.bars()
    visit.stroke((0.2, 0.5), (0.8, 0.5), (0.8, 0.8), (0.2, 0.8))
    some = hidden(visit.status())
    assert 8 <= some <= 56
    assert re.search(r"The hole causes .+ % of the doubt", visit.answer())
    before = visit.number()
    visit.page.focus("canvas")  # the same with the keyboard
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "Space"):
        visit.page.keyboard.press(key)
    visit.after(before)
    assert hidden(visit.status()) > some
    visit.page.locator(".mc-tools input").fill("100")
    visit.stroke((0.1, 0.1), (0.9, 0.1), (0.9, 0.9), (0.1, 0.9))  # over everything
    assert hidden(visit.status()) == 64
    assert "Nothing is left to see" in visit.status()
    assert visit.bars() != said  # a smaller hole may leave a digit beyond doubt
    for shape, count in (("noise", 16), ("stripes", 16)):
        visit.press(shape)
        assert hidden(visit.status()) == count
    assert visit.problems == []
    assert visit.hosts <= {urlsplit(server.url).netloc, ""}
    visit.close()


def test_files_of_ones_own(browser: Any, server: Server, tmp_path: Path) -> None:
    """Too large, broken and right ones, while somebody else looks at a photograph."""
    from PIL import Image

    other = Visit(browser, server)
    other.press("Photograph")
    assert hidden(other.status()) == 48 * 48
    title = other.page.inner_text(".mc-title")
    visit = Visit(browser, server)
    visit.page.get_by_label("Your own", exact=True).check()
    visit.page.wait_for_selector("#mc-file", timeout=MOMENT)
    large = tmp_path / "large.png"
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (800, 800, 3), np.uint8)).save(large)
    assert large.stat().st_size > 1_000_000
    before = visit.number()
    visit.upload(large)
    visit.page.wait_for_selector("text=/size|large|MB/i >> visible=true", timeout=MOMENT)
    assert visit.number() == before
    visit.page.reload()
    visit.page.wait_for_selector("canvas[data-shown]", timeout=MOMENT)
    visit.page.get_by_label("Your own", exact=True).check()
    visit.page.wait_for_selector("#mc-file input[type=file]", state="attached", timeout=MOMENT)
    (tmp_path / "broken.png").write_bytes(b"\x89PNG nothing")
    visit.upload(tmp_path / "broken.png")
    visit.page.wait_for_selector("#mc-message [role=alert]", timeout=MOMENT)
    assert "broken.png is no image that can be read" in visit.page.inner_text("#mc-message")
    before = visit.number()
    np.save(tmp_path / "six.npy", np.random.default_rng(0).integers(0, 60_000, (6, 30, 40)).astype(np.uint16))
    visit.upload(tmp_path / "six.npy")
    visit.after(before)
    assert visit.page.inner_text(".mc-title").startswith("six.npy: 40 × 30 pixels, 6 bands of uint16")
    visit.page.click("#mc-make")
    links = visit.page.locator("#mc-files a[href*='six-']")
    links.first.wait_for(timeout=MOMENT)
    names = {Path(urlsplit(link.get_attribute("href")).path).name for link in links.all()}
    assert names == {"six-filled.npy", "six-deviation.npy"}
    assert violations(visit.page) == []
    assert other.page.inner_text(".mc-title") == title
    other.stroke((0.1, 0.1), (0.4, 0.4))
    assert hidden(other.status()) > 48 * 48
    for each in (visit, other):
        assert each.problems == []
        assert each.hosts <= {urlsplit(server.url).netloc, ""}
        each.close()


def violations(page: Any) -> list[tuple[str, list[str]]]:
    """What breaks the rules of WCAG A and AA that axe can check."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of what axe's package imports
        from axe_playwright_python.sync_playwright import Axe
    found = Axe().run(page, options=WCAG).response
    assert len(found["passes"]) > 10
    return [(rule["id"], [node["html"] for node in rule["nodes"]]) for rule in found["violations"]]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everybody_can_use_it(browser: Any, server: Server, scheme: str) -> None:
    """By these rules, on a phone; and nothing has to be scrolled sideways."""
    visit = Visit(browser, server, viewport={"width": 390, "height": 844}, color_scheme=scheme)
    assert visit.page.evaluate("document.documentElement.scrollWidth") <= 390
    assert violations(visit.page) == []
    visit.close()
