"""Start `misconv app` for a test, with models that are fitted in a moment: `python tests/app_server.py FOLDER [options]`.

Every connection that the process itself opens to another machine, or asks the name of, is written to FOLDER/outside.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from misconv import cli
from misconv.app import models

QUICK = models.Settings(
    digit_steps=40, photograph_steps=2, band_steps=2, classifier_epochs=3, side=32, crops=64, batch_size=16
)
LOCAL = ("127.0.0.1", "::1", "localhost", "")


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
