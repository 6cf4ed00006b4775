"""Start `misconv app` for a test, with models that are fitted in a moment: `python tests/app_server.py FOLDER [options]`.

Every connection that the process itself opens to another machine, or asks the name of, is written to FOLDER/outside.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from misconv import cli
from misconv.app import models

QUICK = models.Settings(
    digit_steps=30, photograph_steps=2, band_steps=2, classifier_epochs=2, side=24, crops=40, batch_size=16
)
LOCAL = ("127.0.0.1", "::1", "localhost", "")


@dataclass(frozen=True)
class Server:
    """A running page."""

    process: subprocess.Popen[str]
    url: str
    temporary: Path  # all of its temporary files are there


def shared_cache(factory: pytest.TempPathFactory) -> Path:
    """Where all processes of one run of the tests keep their models."""
    base = factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "app-cache"


@contextmanager
def started(factory: pytest.TempPathFactory, *options: str) -> Iterator[Server]:
    """A server on a free port, ended by Ctrl-C."""
    folder = factory.mktemp("app")
    temporary = folder / "tmp"
    temporary.mkdir()
    command = [sys.executable, __file__, str(folder), "--port", "0", *options]
    environment = {**os.environ, "XDG_CACHE_HOME": str(shared_cache(factory)), "TMPDIR": str(temporary)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout is not None
        url = next((line.split()[1] for line in process.stdout if line.startswith("Page: ")), None)
        assert url is not None, "the server ended before it had an address"
        try:
            yield Server(process, url, temporary)
        finally:
            process.send_signal(signal.SIGINT)
            code = process.wait(timeout=60)
    assert code == 130
    left = {path.name.split("_")[0] for path in temporary.iterdir()}
    assert left <= {"torchinductor"}  # torch's own; nothing that a visitor sent outlives the server
    assert not (folder / "outside").exists(), (folder / "outside").read_text()


def main() -> None:
    outside = Path(sys.argv[1]) / "outside"

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        if event in ("socket.connect", "socket.getaddrinfo"):
            address = arguments[1] if event == "socket.connect" else arguments[0]
            host = address[0] if isinstance(address, tuple) else address
            if isinstance(host, str) and not host.startswith("/") and host not in LOCAL:
                with outside.open("a") as file:
                    file.write(f"{event} {host}\n")

    sys.addaudithook(watch)
    models.Settings = lambda: QUICK  # type: ignore[misc,assignment]
    sys.argv = ["misconv", "app", *sys.argv[2:]]
    cli.main()


if __name__ == "__main__":
    main()
