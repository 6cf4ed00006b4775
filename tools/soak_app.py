"""Use the page of `misconv app` for a long time in a browser, and tell how the memory of its server grows.

    misconv app --port 7860 &
    python tools/soak_app.py --url http://127.0.0.1:7860/ --pid $! --actions 500

After a warm-up random actions follow: strokes, shapes, other digits and photographs, files of one's own that are right
or broken. The resident memory of the server is read from /proc, so this needs Linux. Ends with 1 if it grows by more
than a tenth.
"""

from __future__ import annotations

import argparse
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

FLAGS = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
WARM_UP = 60  # actions until everything has been used
MOST_GROWTH = 0.10
PATIENCE = 240_000  # ms; a machine may be busy with other things


def main() -> None:
    """Read the options, act, and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:7860/")
    parser.add_argument("--pid", type=int, required=True, help="of the server")
    parser.add_argument("--actions", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    from playwright.sync_api import sync_playwright

    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        sys.exit("soak_app needs chromium, chromium-browser or google-chrome on PATH")
    with sync_playwright() as driver, tempfile.TemporaryDirectory() as folder:
        window = driver.chromium.launch(executable_path=browser, args=FLAGS)
        visitor = Visitor(window.new_page(), random.Random(options.seed), write_files(Path(folder)))
        visitor.page.goto(options.url)
        visitor.page.wait_for_selector("canvas[data-shown]", timeout=PATIENCE)
        growth = soak(visitor, options.pid, options.actions)
        window.close()
    if growth > MOST_GROWTH:
        sys.exit(1)


def soak(visitor: Visitor, pid: int, actions: int) -> float:
    """Act, print the memory on the way, and return by which share it grew after the warm-up."""
    seconds: list[float] = []
    start = 0.0
    for number in range(1, WARM_UP + actions + 1):
        clock = time.perf_counter()
        kind = visitor.act()
        if kind == "stroke":
            seconds.append(time.perf_counter() - clock)
        if number == WARM_UP:
            start = memory(pid)
        if number % 50 == 0 or number == WARM_UP:
            print(f"{number:5} actions: {memory(pid):7.1f} MB", flush=True)
    growth = memory(pid) / start - 1
    slow = sorted(seconds)[int(0.95 * len(seconds))]
    print(f"memory {start:.1f} MB -> {memory(pid):.1f} MB ({100 * growth:+.1f} %) in {actions} actions")
    print(f"{len(seconds)} strokes: median {statistics.median(seconds):.2f} s, 95 % in {slow:.2f} s")
    return growth


def memory(pid: int) -> float:
    """Resident memory of a process, in MB."""
    text = Path(f"/proc/{pid}/status").read_text()
    return float(text.split("VmRSS:")[1].split()[0]) / 1000


def write_files(folder: Path) -> list[Path]:
    """Images to drop on the page; the last one is broken."""
    rng = np.random.default_rng(0)
    for number, shape in enumerate([(40, 60), (3, 150, 200), (6, 64, 64), (1, 1), (900, 700)]):
        np.save(folder / f"{number}.npy", rng.integers(0, 4000, shape).astype(np.uint16))
    (folder / "broken.png").write_bytes(b"no image")
    return [*sorted(folder.glob("*.npy")), folder / "broken.png"]


class Visitor:
    """Somebody who tries everything."""

    def __init__(self, page: Any, chance: random.Random, files: list[Path]) -> None:
        self.page, self.chance, self.files = page, chance, files
        self.certain = ("shape", "other image")  # what always brings new results

    def act(self) -> str:
        """One random action, until its results are shown; returns what it was."""
        actions: dict[str, tuple[Callable[[], None], int]] = {
            "stroke": (self.stroke, 6),
            "shape": (self.shape, 2),
            "other image": (self.other_image, 1),
            "another one": (self.another_one, 1),
            "file": (self.file, 1),
        }
        (kind,) = self.chance.choices(list(actions), [weight for _, weight in actions.values()])
        before = self.page.get_attribute("#mc-results", "data-answer")
        actions[kind][0]()
        # A stroke over what is hidden already, or a broken file, changes nothing.
        changed = "before => document.querySelector('#mc-results').dataset.answer !== before"
        try:
            self.page.wait_for_function(changed, arg=before, timeout=PATIENCE if kind in self.certain else 3000)
        except Exception as error:
            if "Timeout" not in type(error).__name__:
                raise
            return "nothing"
        return kind

    def stroke(self) -> None:
        """A line with a brush of any width."""
        self.page.locator(".mc-tools input").fill(str(self.chance.randint(1, 100)))
        if self.chance.random() < 0.3:
            self.page.click(f"[data-tool={self.chance.choice(['paint', 'erase'])}]")
        self.page.locator("canvas").scroll_into_view_if_needed()
        box = self.page.locator("canvas").bounding_box()
        x, y, width, height = (box[name] for name in ("x", "y", "width", "height"))
        shares = [(self.chance.uniform(0.1, 0.9), self.chance.uniform(0.1, 0.9)) for _ in range(2)]
        points = [(x + across * width, y + down * height) for across, down in shares]
        self.page.mouse.move(*points[0])
        self.page.mouse.down()
        self.page.mouse.move(*points[1], steps=6)
        self.page.mouse.up()

    def shape(self) -> None:
        """A hole of another shape."""
        self._choose("#mc-shape")

    def other_image(self) -> None:
        """A digit or a photograph."""
        self._choose("#mc-kind", 2)

    def another_one(self) -> None:
        """The next digit or photograph."""
        if self.page.locator("#mc-another").is_visible():
            self.page.click("#mc-another")

    def file(self) -> None:
        """An image of one's own."""
        self.page.locator("#mc-kind input").nth(2).check()
        self.page.wait_for_selector("#mc-file input[type=file]", state="attached", timeout=PATIENCE)
        self.page.set_input_files("#mc-file input[type=file]", str(self.chance.choice(self.files)))

    def _choose(self, group: str, count: int = 5) -> None:
        """A radio button that is not chosen yet."""
        found = [self.page.locator(f"{group} input").nth(number) for number in range(count)]
        self.chance.choice([button for button in found if not button.is_checked()]).check()


if __name__ == "__main__":
    main()
