"""Our C++, compiled at its first use by the compiler of the machine, and kept in the cache of torch's extensions."""

from __future__ import annotations

import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

__all__ = ["Build", "reason"]

_LONGEST = 120  # seconds of compiling


class Build:
    """A library that is in the cache, or is being compiled into it.

    An OSError says why there can be none. Several processes may compile the same at the same time.

    Args:
        main: the file to compile, which may include others of its folder.
        flags: of the compiler. libraries: likewise, behind the file.
        identity: what else a library depends on.
    """

    def __init__(self, main: Path, flags: Iterable[str], libraries: Iterable[str] = (), identity: Any = None) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError(f"not tried on {sys.platform}")
        compiler = shutil.which(os.environ.get("CXX", "c++"))
        if compiler is None:
            raise OSError(f"no C++ compiler {os.environ.get('CXX', 'c++')} was found")
        sources = [path.read_bytes() for path in sorted(main.parent.iterdir())]
        flags, libraries = [*flags, "-fPIC", "-shared"], list(libraries)
        known = repr((sources, flags, libraries, identity, platform.machine(), os.path.realpath(compiler)))
        root = os.environ.get("TORCH_EXTENSIONS_DIR") or Path.home() / ".cache" / "torch_extensions"
        name = f"{main.stem}-{hashlib.sha256(known.encode()).hexdigest()[:16]}.so"
        self.path = Path(root) / "misconv" / name
        self._process: subprocess.Popen[bytes] | None = None
        if self.path.exists():
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        # Under a name of its own first: what stands in the cache is whole. A process that ends before its compiler does
        # leaves the library to those that come after it.
        self._folder, self._said = tempfile.mkdtemp(dir=self.path.parent), tempfile.TemporaryFile()  # noqa: SIM115
        made = Path(self._folder) / name
        command = [compiler, *flags, "-o", str(made), str(main), *libraries]
        script = 'made=$1 path=$2; shift 2; "$@" && mv -f "$made" "$path"; done=$?; rm -rf "${made%/*}"; exit $done'
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", script, "sh", str(made), str(self.path), *command],
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=self._said, start_new_session=True,
        )  # fmt: skip

    def is_done(self) -> bool:
        """Whether nobody has to wait for it any more, be it there or not."""
        return self._process is None or self._process.poll() is not None

    def wait(self) -> Path:
        """The library, once it is there; a CalledProcessError or TimeoutExpired if it will not be."""
        if self._process is not None:
            process, self._process = self._process, None
            with self._said as said:
                try:
                    process.wait(_LONGEST)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                    shutil.rmtree(self._folder, ignore_errors=True)
                    raise
                said.seek(0)
                if process.returncode:
                    message = said.read().decode(errors="replace")
                    raise subprocess.CalledProcessError(process.returncode, str(process.args), stderr=message)
        return self.path


def reason(problem: BaseException) -> str:
    """What went wrong, in a line."""
    said = str(getattr(problem, "stderr", None) or problem).strip()
    return f"could not be compiled: {said.splitlines()[0] if said else type(problem).__name__}"
