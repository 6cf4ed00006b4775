"""The page itself: Gradio's controls, wired to `misconv.app.looks`."""

from __future__ import annotations

import html
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, cast

import gradio as gr

from misconv.app.holes import SHAPES
from misconv.app.looks import DIGIT, OWN, PHOTOGRAPH, Look, Visits
from misconv.app.models import Models
from misconv.app.report import read_text

__all__ = ["build_page", "page_options"]

TITLE = "misconv: images with missing pixels"
_LEAD = """
# Look behind the hole

Hide a part of an image. See what it may have been, how sure that is, and what a network makes of it. Everything is
computed on this machine, and nothing leaves it.
"""
# Browsers ask for nothing that is not listed here.
FONTS = ["system-ui", "-apple-system", "Segoe UI", "Roboto", "Helvetica Neue", "Arial", "sans-serif"]
FIXED_FONTS = ["ui-monospace", "Menlo", "Consolas", "monospace"]


def page_options() -> dict[str, Any]:
    """How the page looks: fonts of the system, and our own style."""
    theme = gr.themes.Base(
        primary_hue=gr.themes.colors.indigo, neutral_hue=gr.themes.colors.stone, font=FONTS, font_mono=FIXED_FONTS
    )
    # Gradio's own grey has too little contrast.
    theme.set(body_text_color_subdued="#57534e", body_text_color_subdued_dark="#c4bfba")
    return {"theme": theme, "css": read_text("page.css")}


def build_page(models: Models, folder: Path) -> gr.Blocks:
    """All controls and what they do.

    Args:
        folder: for files to download.
    """
    wired = _Wiring(Visits(models), folder)
    with gr.Blocks(title=TITLE, analytics_enabled=False, fill_width=True, delete_cache=(1800, 7200)) as page:
        gr.Markdown(_LEAD, elem_id="mc-lead")
        look = gr.State(None)
        with gr.Row(elem_id="mc-columns"):
            with gr.Column(scale=2, min_width=320, elem_id="mc-controls"):
                kind = gr.Radio([DIGIT, PHOTOGRAPH, OWN], value=DIGIT, label="Image", elem_id="mc-kind")
                another = gr.Button("Another one", size="sm", elem_id="mc-another")
                file = gr.File(
                    label="PNG, JPEG, WebP, TIFF, GeoTIFF or .npy", type="filepath",
                    file_count="single", height=160, visible=False, elem_id="mc-file",
                )  # fmt: skip
                message = gr.HTML("", visible=False, elem_id="mc-message", padding=False)
                canvas = gr.HTML(
                    {}, html_template=read_text("canvas.html"), js_on_load=read_text("canvas.js"),
                    apply_default_css=False, elem_id="mc-paint", padding=False,
                )  # fmt: skip
                shape = gr.Radio(list(SHAPES), value="square", label="Or a hole of this shape", elem_id="mc-shape")
                share = gr.Slider(0, 100, value=25, step=5, label="Hidden share, %", elem_id="mc-share")
                make = gr.Button("Download the result", size="sm", elem_id="mc-make")
                files = gr.File(
                    label="Filled image and standard deviation", file_count="multiple", interactive=False,
                    visible=False, elem_id="mc-files",
                )  # fmt: skip
            with gr.Column(scale=5, min_width=320):
                results = gr.HTML("", elem_id="mc-output", apply_default_css=False, padding=False)
        # One computation at a time: two would share the same cores. Of what is chosen meanwhile the last is done next.
        common: dict[str, Any] = {
            "concurrency_limit": 1, "concurrency_id": "look", "show_progress": "hidden", "api_visibility": "private",
            "trigger_mode": "always_last",
        }  # fmt: skip
        shown = [look, canvas, results, message, files]
        options = [shape, share]
        page.load(wired.look(wired.start), [kind, *options], [*shown, file, another], **common)
        kind.input(wired.look(wired.start), [kind, *options], [*shown, file, another], **common)
        another.click(wired.look(wired.another), [look, *options], shown, **common)
        file.upload(wired.look(wired.open), [file, *options], [*shown, file], **common)
        canvas.input(wired.look(wired.paint), [look, canvas], [look, results, files], **common)
        for event in (shape.input, share.release):
            event(wired.look(wired.draw), [look, *options], shown, **common)
        make.click(
            wired.download(wired.files),
            look,
            [files, message],
            **{**common, "concurrency_id": "files", "show_progress": "full"},
        )
    return cast(gr.Blocks, page)


class _Wiring:
    """What each event returns to the page.

    Gradio calls from a thread of its own for every event, and the C library keeps freed memory for each thread by
    itself. So all work is done in two threads that stay, one for looks and one for downloads, and memory does not grow.
    """

    def __init__(self, visits: Visits, folder: Path) -> None:
        self.visits, self.folder = visits, folder
        self._looks, self._downloads = (ThreadPoolExecutor(1, thread_name_prefix="misconv-app") for _ in range(2))

    def look(self, action: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """An event that looks at an image."""
        return lambda *inputs: self._looks.submit(action, *inputs).result()

    def download(self, action: Callable[..., tuple[Any, ...]]) -> Callable[..., tuple[Any, ...]]:
        """An event that writes files, for which nobody else should wait."""
        return lambda *inputs: self._downloads.submit(action, *inputs).result()

    def start(self, kind: str, shape: str, share: float) -> tuple[Any, ...]:
        fields = gr.update(visible=kind == OWN, value=None), gr.update(visible=kind != OWN)
        if kind != OWN:
            return (*self._all(self.visits.start(kind, 0, shape, share / 100)), *fields)
        text = _note("Drop an image on the field above, or click it to choose one.")
        return gr.skip(), gr.skip(), gr.skip(), text, gr.skip(), *fields  # what was there stays until a file comes

    def another(self, look: Look | None, shape: str, share: float) -> tuple[Any, ...]:
        return self._all(self.visits.another(look or self._first(shape, share), shape, share / 100))

    def open(self, path: str | None, shape: str, share: float) -> tuple[Any, ...]:
        ready = gr.update(value=None)  # for the next file
        try:
            if path is None:
                raise ValueError("no file came")
            return (*self._all(self.visits.open(path, shape, share / 100)), ready)
        except (ValueError, OSError, MemoryError) as error:
            text = _note(f"This image cannot be shown: {_reason(error)}", alert=True)
            return gr.skip(), gr.skip(), gr.skip(), text, gr.skip(), ready

    def paint(self, look: Look | None, sent: Any) -> tuple[Any, ...]:
        try:
            if look is None:
                raise ValueError
            painted = self.visits.paint(look, sent)
        except ValueError:  # of an image that is no longer shown: its strokes come too late
            return gr.skip(), gr.skip(), gr.skip()
        return painted, self.visits.results(painted), gr.update(visible=False)

    def draw(self, look: Look | None, shape: str, share: float) -> tuple[Any, ...]:
        return self._all(self.visits.draw(look or self._first(shape, share), shape, share / 100))

    def files(self, look: Look | None) -> tuple[Any, Any]:
        if look is None:
            return gr.skip(), gr.skip()
        for old in self.folder.iterdir():  # one download at a time: Gradio has its own copies of the last ones
            shutil.rmtree(old, ignore_errors=True)
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            made = self.visits.files(look, folder)
        except (ValueError, OSError, MemoryError) as error:
            return gr.update(visible=False), _note(f"Nothing was written: {_reason(error)}", alert=True)
        return gr.update(value=made, visible=True), gr.update(visible=False)

    def _first(self, shape: str, share: float) -> Look:
        """For a page that has lost its state, as after a restart of the server."""
        return self.visits.start(DIGIT, 0, shape, share / 100)

    def _all(self, look: Look) -> tuple[Any, ...]:
        hidden = gr.update(visible=False)  # old messages and old files
        return look, self.visits.canvas(look), self.visits.results(look), hidden, hidden


def _note(text: str, *, alert: bool = False) -> Any:
    role, kind = ("alert", "mc-note mc-alert") if alert else ("status", "mc-note")
    return gr.update(value=f'<p class="{kind}" role="{role}">{html.escape(text)}</p>', visible=True)


def _reason(error: Exception) -> str:
    """On one line; of an error of the system without the place, which is ours."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error).splitlines() or ["it is too large"])[0][:300]
