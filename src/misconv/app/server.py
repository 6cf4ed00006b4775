"""Serving the page: on one address, to pages of its own alone, with nothing that leaves the machine."""

from __future__ import annotations

import json
import os
import socket
import tempfile
from collections.abc import Awaitable, Callable, Iterator, MutableMapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from misconv.app.models import Models

__all__ = ["check_installed", "listen", "serve"]

Scope = MutableMapping[str, Any]
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]

# The browser itself refuses whatever would go elsewhere. Gradio evaluates the templates of its own components.
_POLICY = (
    "default-src 'self'; script-src 'self' 'unsafe-inline' 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src 'self'; object-src 'none'; frame-ancestors 'none'; "
    "base-uri 'self'; form-action 'self'"
)
_HEADERS = [
    (b"content-security-policy", _POLICY.encode()),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
]
# What the page needs of Gradio's routes; the others (its proxy, its histories, its reloading) do not exist here.
_ROUTES = (
    "/assets/", "/static/", "/theme.css", "/config", "/manifest.json", "/favicon.ico", "/gradio_api/queue/",
    "/gradio_api/upload", "/gradio_api/upload_progress", "/gradio_api/heartbeat/", "/gradio_api/file=",
    "/gradio_api/info", "/gradio_api/startup-events", "/gradio_api/reset", "/gradio_api/cancel",
)  # fmt: skip
_EVENTS, _UPLOADS = "/gradio_api/queue/join", "/gradio_api/upload"
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
_MORE = 1_000_000  # bytes of a request besides the file in it
_SESSIONS = 100  # whose images are kept in memory


def check_installed() -> None:
    """ImportError with the name of the extra, before any work."""
    for name in ("gradio", "uvicorn"):
        if find_spec(name) is None:  # not imported yet: Gradio then makes a folder where it is told to
            raise ImportError(f"the page needs {name}: pip install 'misconv[app]'")


@contextmanager
def listen(host: str, port: int) -> Iterator[socket.socket]:
    """A socket on this address alone; OSError on one line where it is taken, or is none of this machine."""
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        made = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise OSError(f"--host must be an address of this machine, got {host}: {error.strerror}") from error
    with made:
        if os.name == "posix":
            made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            made.bind(address)
            made.listen(128)
        except OSError as error:
            raise OSError(f"cannot listen on {host}, port {port}: {error.strerror}; choose another --port") from error
        yield made


def serve(models: Models, where: socket.socket, host: str, upload_limit: int, ready: Callable[[str], None]) -> None:
    """Serve the page until Ctrl-C; `ready` hears its address.

    Args:
        upload_limit: of a file, in bytes.
    """
    import uvicorn

    port = where.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="misconv-app-", ignore_cleanup_errors=True) as folder:
        app = make_app(models, Path(folder), host, upload_limit)
        config = uvicorn.Config(
            app, log_level="critical", access_log=False, timeout_graceful_shutdown=1, server_header=False, ws="none"
        )
        server = uvicorn.Server(config)
        ready(f"http://{f'[{host}]' if ':' in host else host}:{port}/")
        server.run(sockets=[where])


def make_app(models: Models, folder: Path, host: str, upload_limit: int) -> Any:
    """The application, all of whose files are below a folder."""
    uploads = folder / "gradio"
    uploads.mkdir()
    # Read by Gradio when it is imported, and later.
    os.environ["GRADIO_TEMP_DIR"] = str(uploads)
    os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"
    import gradio
    from fastapi import FastAPI

    from misconv.app.page import build_page, page_options

    made = folder / "results"
    made.mkdir()
    page = build_page(models, made)
    page.state_session_capacity = _SESSIONS
    page.queue(max_size=50, api_open=False)
    app = gradio.mount_gradio_app(
        FastAPI(docs_url=None, redoc_url=None, openapi_url=None), page, path="", footer_links=[], run_history=False,
        allowed_paths=[], max_file_size=upload_limit, ssr_mode=False, mcp_server=False, pwa=False,
        enable_monitoring=False, show_error=False, **page_options(),
    )  # fmt: skip
    page.has_launched = True  # only then does Gradio check paths, and a page that is mounted is never launched
    return Guard(app, _LOOPBACK if host in _LOOPBACK else None, upload_limit, uploads)


class Guard:
    """In front of Gradio: refuses other names for this machine, other routes, what is too large, and foreign paths."""

    def __init__(self, app: Any, names: tuple[str, ...] | None, upload_limit: int, uploads: Path) -> None:
        self.app, self.names, self.upload_limit, self.uploads = app, names, upload_limit, uploads.resolve()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", []), *_HEADERS]
            await send(message)

        refusal = self._refusal(scope)
        if refusal is None and scope["path"].startswith(_EVENTS):
            body = await _read(receive)
            refusal = self._event_refusal(body)
            receive = _again(body, receive)
        if refusal is None:
            await self.app(scope, receive, send_with_headers)
            return
        status, text = refusal
        headers = [(b"content-type", b"text/plain; charset=utf-8"), (b"content-length", b"%d" % len(text))]
        await send_with_headers({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": text.encode()})

    def _refusal(self, scope: Scope) -> tuple[int, str] | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        host, origin = headers.get(b"host", ""), headers.get(b"origin", "")
        # Another name for this machine is a trick of a foreign page that wants to read ours.
        if self.names is not None and host.rsplit(":", 1)[0].strip("[]") not in self.names:
            return 421, "this page is for this machine alone"
        if origin and origin.split("://")[-1] != host:
            return 403, "this page answers to itself alone"
        path = scope["path"]
        if path != "/" and not path.startswith(_ROUTES):
            return 404, "there is nothing here"
        length = headers.get(b"content-length", "0")
        largest = _MORE + (self.upload_limit if path.startswith(_UPLOADS) else 0)
        if not length.isdigit() or int(length) > largest:
            return 413, f"a file may have {self.upload_limit // 10**6} MB"
        return None

    def _event_refusal(self, body: bytes | None) -> tuple[int, str] | None:
        """An event may name files that were uploaded, and no others: Gradio would copy or even download them."""
        if body is None:
            return 413, "an event may have 1 MB"
        try:
            paths = list(_paths(json.loads(body or b"{}")))
        except (ValueError, RecursionError):
            return 400, "an event must be JSON"
        return None if all(map(self._is_uploaded, paths)) else (403, "only uploaded files can be shown")

    def _is_uploaded(self, path: object) -> bool:
        try:
            return isinstance(path, str) and Path(path).resolve().is_relative_to(self.uploads)
        except (OSError, ValueError):
            return False


async def _read(receive: Receive) -> bytes | None:
    """The body of a request; None if it is too long."""
    body, more = b"", True
    while more and len(body) <= _MORE:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return body if len(body) <= _MORE else None


def _again(body: bytes | None, receive: Receive) -> Receive:
    """The same body once more, and then what else comes."""
    waiting: list[Message] = [{"type": "http.request", "body": body or b"", "more_body": False}]

    async def replay() -> Message:
        return waiting.pop() if waiting else await receive()

    return replay


def _paths(content: object) -> Iterator[object]:
    """All that is called a path, anywhere in JSON."""
    if isinstance(content, dict):
        if "path" in content:
            yield content["path"]
        for value in content.values():
            yield from _paths(value)
    elif isinstance(content, list):
        for value in content:
            yield from _paths(value)
