"""What the page of `misconv app` computes, keeps, reads and refuses; the page in a browser is test_app_browser.py."""

from __future__ import annotations

import http.client
import json
import re
import socket
import struct
import sys
import zlib
from collections.abc import Iterator
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import pytest
import rasterio
import torch
import torch.nn.functional as F
from PIL import Image
from torch import Tensor, nn
from typer.testing import CliRunner

import misconv
from misconv import cli, impute
from misconv._train import cpu_by_default
from misconv.app import analysis, holes, looks, models, pictures, report
from misconv.app.models import Models
from tests.app_server import QUICK, Server, shared_cache, started


@pytest.fixture(scope="module")
def fitted(tmp_path_factory: pytest.TempPathFactory) -> Models:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        return models.prepare_models(shared_cache(tmp_path_factory) / "misconv" / "app", lambda text: None, QUICK)


@pytest.fixture(autouse=True)
def _as_the_page_runs(without_default_device: None) -> None:
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def visits(fitted: Models) -> looks.Visits:
    return looks.Visits(fitted)


def some_hole(height: int, width: int, seed: int = 0) -> Tensor:
    return holes.drawn_hole("free form", 0.3, (height, width), seed)


# What is computed ----------------------------------------------------------------------------------------------------


def test_the_numbers_are_those_of_the_library(fitted: Models) -> None:
    picture, hole = pictures.digit(3), some_hole(8, 8)
    found = analysis.analyse(picture, hole, fitted)
    x, observed = picture.values[None], ~hole[None, None]
    with torch.no_grad():
        p = fitted.digits(x, observed)
    wanted = {"zeros": impute.zero, "nearest": impute.nearest, "push–pull": impute.push_pull}
    for name, fill in wanted.items():
        assert torch.equal(found.fills[name], fill(x, observed)[0])
    torch.testing.assert_close(found.fills["mean"], p.mean[0])
    torch.testing.assert_close(found.deviation, p.variance[0].sqrt())
    assert torch.equal(found.samples[:, 0][:, ~hole], picture.values[0][~hole].expand(3, -1))
    for name, fill in found.fills.items():
        error = (fill - picture.values)[0][hole].numpy()
        assert found.errors[name] == pytest.approx(float(np.sqrt(np.mean(np.square(error, dtype=np.float64)))))
    assert found.classes is not None
    torch.testing.assert_close(found.classes.ways["MisConv"], fitted.classifier(p).softmax(1)[0].detach())
    torch.testing.assert_close(
        found.classes.growth.probabilities[found.classes.growth.here], found.classes.ways["MisConv"]
    )


def test_the_response_of_misconv_is_the_average_over_completions(fitted: Models) -> None:
    picture, hole = pictures.digit(5), some_hole(8, 8)
    found = analysis.analyse(picture, hole, fitted)
    with torch.no_grad():
        p = fitted.digits(picture.values[None], ~hole[None, None])
        drawn = p.sample(20_000, generator=torch.Generator().manual_seed(0))[:, 0]
        responses = torch.relu(F.conv2d(drawn, analysis.filters(1)))
    assert found.responses is not None
    error = responses.std(0) / len(drawn) ** 0.5
    assert ((found.responses.maps["MisConv"] - responses.mean(0)).abs() <= 5 * error + 1e-5).all()


def test_hidden_pixels_are_not_read(fitted: Models) -> None:
    picture, hole = pictures.photograph(0), some_hole(96, 96)
    other = pictures.Picture(picture.title, picture.values.where(~hole, torch.nan), picture.known)
    one, two = (analysis.analyse(each, hole, fitted) for each in (picture, other))
    for name in one.fills:
        assert torch.equal(one.fills[name], two.fills[name])
    assert torch.equal(one.deviation, two.deviation)
    assert torch.equal(one.samples, two.samples)
    assert one.responses is not None
    assert two.responses is not None
    assert torch.equal(one.responses.maps["MisConv"], two.responses.maps["MisConv"])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_nothing_and_everything_hidden(fitted: Models, share: float) -> None:
    for picture in (pictures.digit(0), pictures.photograph(1)):
        hole = holes.drawn_hole("square", share, picture.size, 0)
        found = analysis.analyse(picture, hole, fitted)
        assert all(bool(fill.isfinite().all()) for fill in (*found.fills.values(), found.deviation, found.samples))
        assert bool((found.deviation > 0).any()) == bool(share)
        text = report.results_html(found)
        assert ("Nothing is hidden" in text, "Nothing is left to see" in text) == (not share, bool(share))


# Holes ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [(1, 1), (8, 8), (5, 7), (192, 101)])
def test_a_hole_comes_back_from_the_page(size: tuple[int, int]) -> None:
    hole = torch.rand(size) < 0.4
    assert torch.equal(holes.unpack_hole(holes.pack_hole(hole), size), hole)


@pytest.mark.parametrize(
    "sent",
    [None, 5, "", "AAAA", "no base64!", pytest.param("A" * 100_000, id="long"), ["AAAAAAAAAAA="], "AAAAAAAAAAAA"],
)
def test_anything_else_is_no_hole(sent: Any) -> None:
    with pytest.raises(ValueError, match="hole must be 8 bytes in base64, for 8 × 8 pixels, got something else"):
        holes.unpack_hole(sent, (8, 8))


@pytest.mark.parametrize("shape", list(holes.SHAPES))
def test_shapes_hide_their_share(shape: str) -> None:
    assert holes.drawn_hole(shape, 0.25, (8, 8), 0).sum() == 16
    for size in ((1, 1), (1, 9), (3, 2)):
        assert holes.drawn_hole(shape, 0.5, size, 0).shape == size


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
def test_a_hole_grows_from_nothing_over_everything(share: float) -> None:
    hole = some_hole(8, 8) if share == 0.3 else torch.full((8, 8), share == 1)
    grown = holes.grown_holes(hole, 8)
    assert not grown[0].any()
    assert grown[-1].all()
    assert (grown[1:] >= grown[:-1]).all()
    assert any(torch.equal(each, hole) for each in grown)


# Images of one's own -------------------------------------------------------------------------------------------------

BANDS = {
    "one": (1, np.uint8),
    "four": (4, np.uint8),
    "six": (6, np.uint16),
    "three": (3, np.int16),
    "two": (2, np.float32),
}


@pytest.mark.parametrize("name", list(BANDS))
def test_bands_and_types(name: str, visits: looks.Visits, tmp_path: Path) -> None:
    bands, kind = BANDS[name]
    rng = np.random.default_rng(0)
    values = rng.integers(0, 200, (bands, 20, 30)).astype(kind)
    path = tmp_path / f"{name}.tif"
    profile = {"driver": "GTiff", "count": bands, "height": 20, "width": 30, "dtype": kind, "photometric": "minisblack"}
    where = rasterio.Affine(10, 0, 500_000, 0, -10, 4_000_000)
    with rasterio.open(path, "w", transform=where, crs="EPSG:32633", **profile) as file:
        file.write(values)
    look = visits.open(str(path), "square", 0.25)
    hole = look.hole.numpy()
    assert "classifier for digits alone" in visits.results(look)
    filled, deviation = visits.files(look, tmp_path)
    with rasterio.open(filled) as file:
        assert (file.crs, file.transform, file.dtypes[0]) == ("EPSG:32633", where, np.dtype(kind).name)
        found = file.read()
    assert np.array_equal(found[:, ~hole], values[:, ~hole])
    assert not np.array_equal(found[:, hole], values[:, hole])
    with rasterio.open(deviation) as file:
        assert (file.transform, file.dtypes[0]) == (where, "float32")
        spread = file.read()
    assert (spread[:, ~hole] == 0).all()
    assert (spread[:, hole] > 0).all()


def test_twenty_megapixels(fitted: Models, tmp_path: Path) -> None:
    """Shown as averages of blocks; the download has every pixel."""
    values = (np.arange(5000)[:, None] // 20 % 256 * np.ones(4000)).astype(np.uint8)
    path = tmp_path / "large.png"
    Image.fromarray(values).save(path, compress_level=1)
    picture = pictures.read_picture(path)
    assert picture.size == (192, 154)
    assert picture.notes[0].startswith("It is shown and computed at 154 × 192 pixels.")
    first = values[: -(-5000 // 192), :26].mean() / 255  # the block of the first pixel
    assert float(picture.values[0, 0, 0]) == pytest.approx(first, abs=1e-6)
    hole = torch.zeros(picture.size, dtype=torch.bool)
    hole[100:104, 70:74] = True
    filled, deviation = looks.Visits(fitted).files(looks.Look(picture, hole, looks.OWN), tmp_path)
    wide = np.zeros((5000, 4000), bool)
    wide[-(-100 * 5000 // 192) : -(-104 * 5000 // 192), -(-70 * 4000 // 154) : -(-74 * 4000 // 154)] = True
    found, spread = np.asarray(Image.open(filled)), np.load(deviation, mmap_mode="r")[0]
    assert np.array_equal(found[~wide], values[~wide])
    assert np.array_equal(spread > 0, wide)


def test_pixels_that_the_file_lacks(visits: looks.Visits, tmp_path: Path) -> None:
    values = np.random.default_rng(0).random((12, 14)).astype(np.float32)
    values[2:5, 3:6] = np.nan
    np.save(tmp_path / "a.npy", values)
    look = visits.open(str(tmp_path / "a.npy"), "square", 0.0)
    found = analysis.analyse(look.picture, look.hole, visits.models)
    assert found.hidden == 9
    assert found.errors == {}
    assert found.claimed is None
    filled, _ = visits.files(look, tmp_path)
    assert np.isfinite(np.load(filled)).all()
    assert np.array_equal(np.load(filled)[6:], values[6:])


def test_one_pixel(visits: looks.Visits, tmp_path: Path) -> None:
    Image.fromarray(np.full((1, 1, 3), 77, np.uint8)).save(tmp_path / "dot.png")
    for share in (0.0, 0.5, 1.0):
        look = visits.open(str(tmp_path / "dot.png"), "square", share)
        assert "this image is smaller" in visits.results(look)
        assert len(visits.files(look, tmp_path)) == 2


def test_constant_and_enormous_numbers(visits: looks.Visits, tmp_path: Path) -> None:
    for number in (0.0, -7.5, 1e30):
        np.save(tmp_path / "a.npy", np.full((9, 9), number))
        assert "<img" in visits.results(visits.open(str(tmp_path / "a.npy"), "noise", 0.5))
    np.save(tmp_path / "a.npy", np.full((900, 900), 1.7e308))
    with pytest.raises(ValueError, match="a.npy must hold numbers below 1e300"):
        visits.open(str(tmp_path / "a.npy"), "noise", 0.5)


def png_that_claims(width: int, height: int) -> bytes:
    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    head = struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", head) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


def npy_that_claims(shape: tuple[int, ...]) -> bytes:
    head = f"{{'descr': '|u1', 'fortran_order': False, 'shape': {shape}, }}".ljust(117) + "\n"
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(head)) + head.encode() + bytes(100)


REFUSED = {
    "empty.png": (b"", "empty.png is .*"),
    "broken.tif": (b"II*\0 nothing", "broken.tif is no TIFF.*"),
    "text.jpg": (b"hello", "text.jpg is no image that can be read, or its suffix is wrong"),
    "claims.png": (png_that_claims(9000, 9000), "claims.png must have at most 40 million pixels, .*, got 9000 × 9000 pixels of 1 band"),
    "bomb.png": (png_that_claims(60_000, 60_000), "bomb.png claims more pixels than an image file should: .*"),
    "claims.npy": (npy_that_claims((100_000, 100_000)), "claims.npy is no array that can be read: .*"),
    "many.npz": (b"PK\x03\x04", "many.npz must end in one of .*"),
    "page.html": (b"<script>", "page.html must end in one of .*"),
}  # fmt: skip


@pytest.mark.parametrize("name", list(REFUSED))
def test_files_that_are_refused(name: str, tmp_path: Path) -> None:
    content, message = REFUSED[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=f"^{message}$") as error:
        pictures.read_picture(tmp_path / name)
    assert str(tmp_path) not in str(error.value)


def test_a_name_is_text_on_the_page(visits: looks.Visits, tmp_path: Path) -> None:
    path = tmp_path / "<img src=x onerror=alert(1)>.npy"
    np.save(path, np.zeros((4, 4)))
    page = visits.results(visits.open(str(path), "square", 0.25))
    assert "&lt;img src=x" in page
    assert "<img src=x" not in page


# The cache -----------------------------------------------------------------------------------------------------------


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert models.cache_folder() == tmp_path / "misconv" / "app"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    assert models.cache_folder() == tmp_path / "home" / ".cache" / "misconv" / "app"


def test_what_is_cached_is_not_fitted_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Damaged and foreign entries are, and so are those of other settings."""
    monkeypatch.setattr(models, "_TOLD", {"a": "fitting"})
    told: list[str] = []
    file = tmp_path / "new" / "a.safetensors"

    def entry(notes: dict[str, Any]) -> nn.Linear:
        def fit(model: nn.Linear) -> None:
            with torch.no_grad():
                model.weight.fill_(3.0)

        told.clear()
        return models._Cache(tmp_path / "new", told.append, notes).entry("a", lambda: nn.Linear(2, 2), fit)

    again = ["fitting"]
    entry({"steps": 1})
    assert told == again
    before = file.read_bytes()
    loaded = entry({"steps": 1})
    assert (told, loaded.training, float(loaded.weight[0, 0].detach())) == ([], False, 3.0)
    refit = [f"{file} is damaged or of another version; fitting it again", "fitting"]
    entry({"steps": 2})
    assert told == refit
    for damage in (b"", b"nonsense", before[:-5], before[:200] + b"\0" + before[201:]):
        file.write_bytes(damage)
        entry({"steps": 1})
        assert told == refit
        entry({"steps": 1})
        assert told == []
    misconv.save(nn.Conv2d(1, 1, 3), file, notes={"steps": 1})
    entry({"steps": 1})
    assert told == refit
    file.unlink()
    file.mkdir()  # cannot be replaced by a file
    entry({"steps": 1})
    assert told[:2] == refit
    assert told[2].startswith("it cannot be kept for the next start: ")


def test_what_is_shown_was_not_learned_from() -> None:
    images, labels = models.held_out_digits()
    every, classes = misconv.data.digits()
    assert len(images) == len(every) - models.TRAINED_DIGITS
    trained = models._shuffled_digits()[0][: models.TRAINED_DIGITS].flatten(1)
    twice = (torch.cdist(images.flatten(1), trained).min(1).values == 0).sum()
    assert twice <= 2  # some digits are written alike to the pixel
    assert len(labels.unique()) == len(classes.unique()) == 10


# The server ----------------------------------------------------------------------------------------------------------


needs_gradio = pytest.mark.skipif(find_spec("gradio") is None, reason="the page needs gradio, of the extra app")


@pytest.fixture(scope="module")
def server(fitted: Models, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with started(tmp_path_factory, "--upload-limit", "1") as made:
        yield made


def ask(server: Server, method: str, path: str, body: bytes = b"", **headers: str) -> tuple[int, dict[str, str], str]:
    """The answer to a request whose path goes out as it is."""
    place = urlsplit(server.url)
    with closing(http.client.HTTPConnection(str(place.hostname), place.port, timeout=60)) as connection:
        connection.putrequest(method, path, skip_host="host" in headers, skip_accept_encoding=True)
        for name, value in {**headers, "content-length": headers.get("content-length", str(len(body)))}.items():
            connection.putheader(name.replace("_", "-"), value)
        connection.endheaders(body)
        found = connection.getresponse()
        return found.status, {k.lower(): v for k, v in found.getheaders()}, found.read().decode(errors="replace")


def upload(server: Server, name: str, content: bytes, **headers: str) -> tuple[int, str]:
    head = f'--x\r\nContent-Disposition: form-data; name="files"; filename="{name}"\r\n\r\n'.encode()
    body = head + content + b"\r\n--x--\r\n"
    options = {"content_type": "multipart/form-data; boundary=x", **headers}
    status, _, text = ask(server, "POST", "/gradio_api/upload", body, **options)
    return status, text


@needs_gradio
def test_the_page_is_served_with_rules_for_the_browser(server: Server) -> None:
    status, headers, page = ask(server, "GET", "/")
    assert status == 200
    policy = dict(part.split(" ", 1) for part in headers["content-security-policy"].split("; "))
    assert policy["default-src"] == policy["connect-src"] == "'self'"
    assert "http" not in headers["content-security-policy"]
    assert "fonts.googleapis" not in page + ask(server, "GET", "/theme.css")[2]


PATHS = [
    "/gradio_api/file=/etc/passwd", "/gradio_api/file=../../etc/passwd", "/gradio_api/file=..%2f..%2fetc%2fpasswd",
    "/gradio_api/file=%2Fetc%2Fpasswd", "/gradio_api/file=//etc/passwd", "/gradio_api/file=file:///etc/passwd",
    "/gradio_api/file=http://127.0.0.1:1/a", "/static/../../../../etc/passwd", "/static/%2e%2e/%2e%2e/etc/passwd",
    "/assets/..%2f..%2f..%2fetc%2fpasswd", "/assets/../../../routes.py", "/gradio_api/proxy=http://127.0.0.1:1/",
    "/gradio_api/openapi.json", "/gradio_api/runs", "/gradio_api/dev/reload", "/docs", "/openapi.json",
]  # fmt: skip


@needs_gradio
def test_no_file_of_the_server_is_read(server: Server, tmp_path: Path) -> None:
    secret = tmp_path / "secret.txt"
    secret.write_text("root: secret")
    own = [f"/gradio_api/file={path}" for path in (secret, __file__, models.__file__, Path.cwd() / "pyproject.toml")]
    for path in [*PATHS, *own]:
        status, _, text = ask(server, "GET", path)
        assert status in (400, 403, 404, 500), path
        assert "root:" not in text, path
        assert "import" not in text, path


@needs_gradio
def test_only_uploaded_files_can_be_named(server: Server, tmp_path: Path) -> None:
    """What the page sends after an upload names the file; another one, or an address to fetch one from, is refused."""
    np.save(tmp_path / "mine.npy", np.zeros((4, 4)))
    (uploaded,) = json.loads(upload(server, "mine.npy", (tmp_path / "mine.npy").read_bytes())[1])
    config = json.loads(ask(server, "GET", "/config")[2])
    (event,) = (each for each in config["dependencies"] if [name for _, name in each["targets"]] == ["upload"])

    def show(path: str) -> int:
        file = {"path": path, "meta": {"_type": "gradio.FileData"}}
        data = {"data": [file, "square", 25], "fn_index": event["id"], "session_hash": "abc"}
        return ask(
            server, "POST", "/gradio_api/queue/join", json.dumps(data).encode(), content_type="application/json"
        )[0]

    tricks = [str(tmp_path / "mine.npy"), "/etc/passwd", f"{Path(uploaded).parent}/../../../../../etc/passwd", "\0"]
    for path in [*tricks, "http://127.0.0.1:1/a.npy", "mine.npy", ""]:
        assert show(path) == 403, path
    assert show(uploaded) == 200
    _, _, told = ask(server, "GET", "/gradio_api/queue/data?session_hash=abc")
    assert "mine.npy: 4 × 4 pixels, 1 band of float64" in told
    assert ask(server, "POST", "/gradio_api/queue/join", b"{", content_type="application/json")[0] == 400


@needs_gradio
def test_other_pages_are_refused(server: Server) -> None:
    """A page elsewhere can neither call this machine by another name nor send from its own."""
    assert ask(server, "GET", "/", host="evil.example")[0] == 421
    assert ask(server, "GET", "/", host="localhost:7860")[0] == 200
    assert upload(server, "a.png", b"a", origin="http://evil.example")[0] == 403
    assert upload(server, "a.png", b"a", origin=server.url.rstrip("/"))[0] == 200


@needs_gradio
def test_uploads_are_bounded(server: Server) -> None:
    assert upload(server, "a.png", bytes(900_000))[0] == 200
    assert upload(server, "a.png", bytes(1_500_000))[0] == 413
    assert ask(server, "POST", "/gradio_api/upload", **{"content-length": "3000000"})[0] == 413


@needs_gradio
def test_an_upload_stays_in_the_temporary_folder(server: Server) -> None:
    status, text = upload(server, "../../../evil.png", b"a")
    assert status == 200
    (place,) = json.loads(text)
    assert server.temporary.resolve() in Path(place).resolve().parents


# The command ---------------------------------------------------------------------------------------------------------


def refused(*arguments: str) -> str:
    result = CliRunner().invoke(cli.app, ["app", *arguments], prog_name="misconv")
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert result.stderr.count("\n") == 1
    return result.stderr


@needs_gradio
def test_a_port_in_use_is_refused() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = refused("--port", str(port))
    assert re.fullmatch(rf"misconv: cannot listen on 127.0.0.1, port {port}: .+; choose another --port\n", text)


@needs_gradio
def test_options_are_checked() -> None:
    assert refused("--port", "70000") == "misconv: --port must lie between 0 and 65535, got 70000\n"
    assert refused("--upload-limit", "0") == "misconv: --upload-limit must lie between 1 and 1000, got 0\n"
    assert "--host must be an address of this machine, got no such host" in refused("--host", "no such host")


def test_a_missing_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gradio", None)
    assert refused() == "misconv: the page needs gradio: pip install 'misconv[app]'\n"
