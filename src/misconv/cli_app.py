"""The command `misconv app`: the page."""

from __future__ import annotations

from typing import Annotated

import typer

from misconv._terminal import interruptible, refuse, report_errors

__all__ = ["app"]

_LARGEST_PORT = 65_535
_MOST_MEGABYTES = 1000


def app(
    host: Annotated[
        str, typer.Option(metavar="ADDRESS", help="To listen on. Others than 127.0.0.1 let other machines in.")
    ] = "127.0.0.1",
    port: Annotated[int, typer.Option(metavar="N", help="0 takes one that is free.")] = 7860,
    upload_limit: Annotated[int, typer.Option(metavar="MB", help="The largest file that the page takes.")] = 20,
) -> None:
    """Serve a page for your browser: hide parts of images, and see what becomes of them.

    The first start fits small densities for about a minute and keeps them in the user's cache folder. The page needs no
    internet.

    Example: misconv app --port 8000
    """
    if not 0 <= port <= _LARGEST_PORT:
        raise refuse(f"--port must lie between 0 and {_LARGEST_PORT}, got {port}")
    if not 1 <= upload_limit <= _MOST_MEGABYTES:
        raise refuse(f"--upload-limit must lie between 1 and {_MOST_MEGABYTES}, got {upload_limit}")
    with interruptible("stopped"), report_errors(ImportError), report_errors(OSError):
        from misconv.app import cache_folder, check_installed, listen, prepare_models, serve

        check_installed()
        with listen(host, port) as where:
            import torch

            # Strokes are answered one after the other, on images so small that threads would wait for each other.
            torch.set_num_threads(1)
            typer.echo(f"Densities: {cache_folder()}")
            models = prepare_models(cache_folder(), typer.echo)
            serve(models, where, host, upload_limit * 10**6, lambda url: typer.echo(f"Page: {url} (Ctrl-C ends it)"))
