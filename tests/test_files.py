"""Image files: what is missing in them, and that they come back as they were."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, PngImagePlugin
from torch.utils.data import DataLoader

import misconv
from misconv import UNetDMFA, data, impute
from misconv._files import (
    Crops,
    FoundFile,
    fill_scene,
    find_files,
    predict,
    reach_of,
    read_image,
    read_shape,
    write_image,
)
from misconv._files.png import with_chunks_of, write_deep
from misconv._train import cpu_by_default

rasterio = pytest.importorskip("rasterio")


@pytest.fixture(autouse=True)
def _on_the_cpu() -> Iterator[None]:
    torch.set_default_dtype(torch.float32)
    with cpu_by_default():
        yield


def random_values(shape: tuple[int, ...], kind: str, seed: int = 0) -> Any:
    generator = np.random.default_rng(seed)
    if kind.startswith("float"):
        return generator.normal(size=shape).astype(kind)
    limits = np.iinfo(kind)
    return generator.integers(limits.min, limits.max, shape, dtype=kind, endpoint=True)


def write_raster(path: Path, values: Any, **options: Any) -> None:
    bands, height, width = values.shape
    profile = {
        "driver": "GTiff", "count": bands, "height": height, "width": width, "dtype": values.dtype, "crs": "EPSG:32633",
        "transform": rasterio.Affine(10, 0, 4e5, 0, -10, 5e6),
    }  # fmt: skip
    with rasterio.open(path, "w", **profile | options) as file:
        file.write(values)
        file.update_tags(SENSOR="none")
        file.set_band_description(1, "first")


# Round trips ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "bands", "kind"),
    [
        ("a.png", 3, "uint8"), ("a.png", 1, "uint8"), ("a.png", 1, "uint16"), ("a.webp", 3, "uint8"),
        ("a.bmp", 3, "uint8"), ("a.tif", 6, "int16"), ("a.tiff", 1, "float64"), ("a.tif", 4, "uint16"),
        ("a.npy", 5, "float32"), ("a.npy", 1, "int32"), ("a.npz", 2, "uint8"),
    ],
)  # fmt: skip
def test_files_come_back_as_they_were(name: str, bands: int, kind: str, tmp_path: Path) -> None:
    values, path = random_values((bands, 20, 30), kind), tmp_path / name
    if path.suffix.startswith(".tif"):
        write_raster(path, values)
    elif path.suffix == ".npy":
        np.save(path, values)
    elif path.suffix == ".npz":
        np.savez(path, image=values, place="elsewhere")
    else:
        pixels = np.moveaxis(values, 0, -1)
        Image.fromarray(pixels[..., 0] if bands == 1 else pixels).save(path, lossless=True)
    image = read_image(path)
    assert image.values.dtype == kind
    assert image.shape == read_shape(path) == (bands, 20, 30)
    assert np.array_equal(image.values, values)
    assert image.missing == 0
    holes = np.zeros((20, 30), bool)
    holes[4:9, 10:20] = True
    image = image.without(holes)
    filled = image.fill(np.full(image.shape, 1e9))
    largest = np.iinfo(kind).max if np.dtype(kind).kind in "iu" else 1e9
    assert (filled[:, holes] == min(largest, 1e9)).all()  # kept in range
    write_image(tmp_path / f"b{path.suffix}", image, filled)
    again = read_image(tmp_path / f"b{path.suffix}")
    assert np.array_equal(again.values, filled)
    assert again.values.dtype == kind
    assert np.array_equal(again.values[:, ~holes], values[:, ~holes])


def test_what_a_png_says_of_itself_stays(tmp_path: Path) -> None:
    pixels = random_values((12, 10, 4), "uint8")
    pixels[..., 3] = 255
    pixels[2:5, 2:5, 3] = 0
    pixels[7, 7, 3] = 40  # seen through a little
    text = PngImagePlugin.PngInfo()
    text.add_text("Author", "nobody")
    Image.fromarray(pixels).save(tmp_path / "a.png", icc_profile=b"a profile", dpi=(300, 300), pnginfo=text)
    image = read_image(tmp_path / "a.png")
    assert image.missing == pytest.approx(9 / 120)
    write_image(tmp_path / "b.png", image, image.fill(np.full(image.shape, 7.4)))
    with Image.open(tmp_path / "b.png") as back:
        assert back.mode == "RGBA"
        assert back.info["icc_profile"] == b"a profile"
        assert back.info["Author"] == "nobody"
        assert back.info["dpi"] == pytest.approx((300, 300), rel=1e-3)
        after = np.asarray(back)
    assert (after[2:5, 2:5] == [7, 7, 7, 255]).all()
    seen = pixels[..., 3] > 0
    assert np.array_equal(after[seen], pixels[seen])


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
@pytest.mark.parametrize("bands", [2, 3, 4])  # grey and alpha, colours, colours and alpha
def test_a_png_of_16_bits_keeps_them(bands: int, tmp_path: Path) -> None:
    stored = random_values((bands, 12, 10), "uint16")
    if bands != 3:
        stored[-1], stored[-1, 2:5, 2:5], stored[-1, 7, 7] = 65535, 0, 1  # seen, not at all, a very little
    with rasterio.open(tmp_path / "a.png", "w", driver="PNG", width=10, height=12, count=bands, dtype="uint16") as file:
        file.write(stored)
    text = PngImagePlugin.PngInfo()
    text.add_text("Author", "nobody")
    Image.new("L", (1, 1)).save(tmp_path / "words.png", pnginfo=text, icc_profile=b"a profile")
    (tmp_path / "a.png").write_bytes(with_chunks_of(tmp_path / "words.png", (tmp_path / "a.png").read_bytes()))
    image = read_image(tmp_path / "a.png")
    colours = stored if bands == 3 else stored[:-1]
    assert image.values.dtype == "uint16"
    assert image.shape == read_shape(tmp_path / "a.png") == colours.shape
    assert image.missing == pytest.approx(0 if bands == 3 else 9 / 120)
    assert np.array_equal(image.values, colours)
    write_image(tmp_path / "b.png", image, image.fill(np.full(image.shape, 700.4)))
    with rasterio.open(tmp_path / "b.png") as file:
        after = file.read()
    if bands != 3:
        assert (after[:-1, 2:5, 2:5] == 700).all()
        assert (after[-1, 2:5, 2:5] == 65535).all()
        stored[:, 2:5, 2:5] = after[:, 2:5, 2:5]
    assert np.array_equal(after, stored)
    with Image.open(tmp_path / "b.png") as back:
        assert (back.info["Author"], back.info["icc_profile"]) == ("nobody", b"a profile")


def test_one_colour_of_a_png_of_16_bits_may_mean_transparent(tmp_path: Path) -> None:
    stored = random_values((3, 12, 10), "uint16")
    stored[:, 3, 4] = (1, 256, 65535)
    stored[:, 5, 6] = (1, 256, 65534)
    (tmp_path / "a.png").write_bytes(write_deep(stored))
    whole = (tmp_path / "a.png").read_bytes()
    key = b"tRNS" + np.array([1, 256, 65535], ">u2").tobytes()
    chunk = (len(key) - 4).to_bytes(4, "big") + key + zlib.crc32(key).to_bytes(4, "big")
    (tmp_path / "a.png").write_bytes(whole[:33] + chunk + whole[33:])
    assert np.argwhere(~read_image(tmp_path / "a.png").observed).tolist() == [[0, 3, 4]]


def test_a_damaged_png_of_16_bits_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.png").write_bytes(write_deep(random_values((3, 40, 50), "uint16"))[:-2000])
    with pytest.raises(ValueError, match=r"^a\.png is damaged: [^\n]*$"):
        read_image(tmp_path / "a.png")


def test_a_png_of_one_bit_stays_one(tmp_path: Path) -> None:
    pixels = random_values((12, 10), "uint8") > 100
    Image.fromarray(pixels).save(tmp_path / "a.png")
    holes = np.zeros((12, 10), bool)
    holes[2:4] = True
    image = read_image(tmp_path / "a.png").without(holes)
    assert set(np.unique(image.coded()[:, ~holes])) == {0, 1}
    write_image(tmp_path / "b.png", image, image.fill(np.full(image.shape, 0.7)))
    with Image.open(tmp_path / "b.png") as back:
        assert back.mode == "1"
        assert np.array_equal(np.asarray(back), pixels | holes)


def test_a_jpeg_becomes_a_file_that_loses_nothing(tmp_path: Path) -> None:
    Image.fromarray(random_values((12, 10, 3), "uint8")).save(tmp_path / "a.jpg")
    image = read_image(tmp_path / "a.jpg")
    assert image.suffix == ".png"
    write_image(tmp_path / "a.png", image, image.values)
    assert np.array_equal(read_image(tmp_path / "a.png").values, image.values)


def test_a_geotiff_keeps_its_place_and_its_tags(tmp_path: Path) -> None:
    values = random_values((3, 40, 50), "int16")
    values[values == -9999] = 0
    values[:, 10:14] = -9999
    write_raster(tmp_path / "a.tif", values, nodata=-9999, compress="deflate", tiled=True, blockxsize=16, blockysize=16)
    image = read_image(tmp_path / "a.tif")
    assert image.missing == pytest.approx(0.1)
    write_image(tmp_path / "b.tif", image, image.fill(np.zeros(image.shape)))
    with rasterio.open(tmp_path / "a.tif") as old, rasterio.open(tmp_path / "b.tif") as new:
        assert old.crs == new.crs
        assert old.transform == new.transform
        assert old.tags() == new.tags()
        assert old.descriptions == new.descriptions
        assert old.profile["compress"] == new.profile["compress"]
        assert (old.profile["blockxsize"], new.nodata) == (new.profile["blockxsize"], None)
        assert (new.read()[:, 10:14] == 0).all()


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
def test_a_tiff_keeps_control_points_profile_predictor_and_other_tags(tmp_path: Path) -> None:
    points = [
        rasterio.control.GroundControlPoint(*place) for place in ((0, 0, 10, 50), (12, 0, 10, 49), (0, 9, 11, 50))
    ]
    size = {"driver": "GTiff", "width": 10, "height": 12, "count": 3, "dtype": "uint8"}
    with rasterio.open(tmp_path / "a.tif", "w", **size, compress="lzw", predictor=2) as file:
        file.write(random_values((3, 12, 10), "uint8"))
        file.gcps = (points, "EPSG:4326")
        file.update_tags(ns="PLANT", row="7")
        file.update_tags(ns="COLOR_PROFILE", SOURCE_ICC_PROFILE="AAAC")
    image = read_image(tmp_path / "a.tif")
    write_image(tmp_path / "b.tif", image, image.values)
    with rasterio.open(tmp_path / "a.tif") as old, rasterio.open(tmp_path / "b.tif") as new:
        assert len(new.gcps[0]) == 3
        assert [point.asdict() | {"id": 0} for point in old.gcps[0]] == [p.asdict() | {"id": 0} for p in new.gcps[0]]
        assert (old.gcps[1], old.crs) == (new.gcps[1], new.crs)
        for space in ("PLANT", "COLOR_PROFILE", "IMAGE_STRUCTURE"):
            assert old.tags(ns=space) == new.tags(ns=space) != {}
    assert not list(tmp_path.glob("*.aux.xml"))


@pytest.mark.parametrize("windows", [False, True])
def test_what_is_half_transparent_in_a_tiff_stays_so(windows: bool, tmp_path: Path) -> None:
    stored = random_values((4, 96, 80), "uint8")
    stored[3] = 130
    stored[3, 20:30, 20:30] = 0
    write_raster(tmp_path / "a.tif", stored, photometric="RGB", alpha="YES")
    if windows:
        fill_scene(*find_files(tmp_path / "a.tif"), [tmp_path / "b.tif"], random_density(3), largest=64)
    else:
        image = read_image(tmp_path / "a.tif")
        write_image(tmp_path / "b.tif", image, image.fill(np.full(image.shape, 7)))
    with rasterio.open(tmp_path / "b.tif") as file:
        after = file.read()
    assert (after[3, 20:30, 20:30] == 255).all()
    seen = stored[3] > 0
    assert np.array_equal(after[:, seen], stored[:, seen])


# Holes ---------------------------------------------------------------------------------------------------------------


def test_every_way_to_say_that_a_pixel_is_missing(tmp_path: Path) -> None:
    values = np.arange(24, dtype=np.float32).reshape(1, 4, 6)
    values[0, 0, 0] = np.nan
    np.save(tmp_path / "nan.npy", values)
    assert read_image(tmp_path / "nan.npy").observed.sum() == 23
    assert read_image(tmp_path / "nan.npy", nodata=5).observed.sum() == 22
    whole = np.arange(24, dtype=np.uint8).reshape(4, 6)
    np.save(tmp_path / "bytes.npy", whole)
    assert read_image(tmp_path / "bytes.npy", nodata=3).observed.sum() == 23
    assert read_image(tmp_path / "bytes.npy", nodata=3.5).observed.all()  # no byte is that
    assert read_image(tmp_path / "bytes.npy", nodata=-9999).observed.all()
    write_raster(tmp_path / "masked.tif", whole[None])
    with rasterio.open(tmp_path / "masked.tif", "r+") as file:
        file.write_mask(whole != 7)
    assert read_image(tmp_path / "masked.tif").observed.sum() == 23
    colour = Image.fromarray(whole)
    colour.save(tmp_path / "key.png", transparency=9)
    assert read_image(tmp_path / "key.png").observed.sum() == 23


def test_pictures_of_holes(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    (tmp_path / "masks").mkdir()
    holes = np.zeros((8, 8), np.uint8)
    holes[2:4, 2:4] = 255
    for name in ("a", "b"):
        Image.fromarray(random_values((8, 8, 3), "uint8")).save(tmp_path / "images" / f"{name}.jpg")
        Image.fromarray(holes).save(tmp_path / "masks" / f"{name}.png")
    white = data.images(tmp_path / "images", masks=tmp_path / "masks")
    assert len(white) == 2
    assert white[1].isnan().sum() == 4 * 3
    assert data.images(tmp_path / "images", masks=tmp_path / "masks", hole_is="black")[0].isnan().sum() == 60 * 3
    assert data.images(tmp_path / "images", masks=tmp_path / "masks" / "a.png")[1].isnan().sum() == 4 * 3
    (tmp_path / "masks" / "b.png").unlink()
    with pytest.raises(ValueError, match=r"^b.jpg has no mask: none is called b$"):
        data.images(tmp_path / "images", masks=tmp_path / "masks")[1]
    Image.fromarray(holes[:6]).save(tmp_path / "masks" / "b.png")
    with pytest.raises(ValueError, match="the mask of b.jpg must be 8×8 pixels"):
        data.images(tmp_path / "images", masks=tmp_path / "masks")[1]
    with pytest.raises(ValueError, match='hole_is must be "white" or "black", got \'grey\''):
        data.images(tmp_path / "images", hole_is="grey")


# Finding and reading -------------------------------------------------------------------------------------------------


def test_files_folders_patterns_and_lists(tmp_path: Path) -> None:
    for name in ("a/1.png", "a/deep/2.png", "b/3.npy", "a/.hidden.png", "a/readme.txt"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"x")
    (tmp_path / "a" / "loop").symlink_to(tmp_path / "a")

    def names(*sources: Path | str) -> list[str]:
        return [str(file.name) for file in find_files(list(sources))]

    assert names(tmp_path / "a") == ["1.png", "deep/2.png"]
    assert names(tmp_path) == ["a/1.png", "a/deep/2.png", "b/3.npy"]
    assert names(f"{tmp_path}/*/*.np?") == ["3.npy"]
    assert names(tmp_path / "b" / "3.npy", tmp_path / "b") == ["3.npy"]
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        find_files(tmp_path / "c")
    with pytest.raises(FileNotFoundError, match="which matches none"):
        find_files(f"{tmp_path}/*.tif")
    (tmp_path / "empty").mkdir()
    with pytest.raises(FileNotFoundError, match="got none"):
        find_files(tmp_path / "empty")
    (tmp_path / "b" / "1.png").write_bytes(b"y")
    with pytest.raises(ValueError, match="would both become 1.png"):
        find_files([tmp_path / "a", tmp_path / "b"])


def damaged(tmp_path: Path) -> dict[str, Path]:
    """Files that cannot be read, each in its own way."""
    stream = io.BytesIO()
    Image.fromarray(random_values((40, 40, 3), "uint8")).save(stream, "PNG")
    content = {
        "truncated.png": stream.getvalue()[:200], "empty.png": b"", "text.png": b"no image at all",
        "wrong.tif": stream.getvalue()[:60], "pickled.npy": pickle.dumps([1]), "array.npy": b"\x93NUMPY\x01\x00",
    }  # fmt: skip
    for name, data_ in content.items():
        (tmp_path / name).write_bytes(data_)
    np.save(tmp_path / "stack.npy", np.zeros((2, 3, 4, 5)))
    np.savez(tmp_path / "two.npz", a=np.zeros((4, 4)), b=np.zeros((4, 4)))
    np.save(tmp_path / "complex.npy", np.zeros((4, 4), complex))
    np.save(tmp_path / "infinite.npy", np.array([[1.0, np.inf]]))
    with zipfile.ZipFile(tmp_path / "tricks.npz", "w") as archive:
        archive.writestr("../../outside.npy", b"no array")
    return {path.name: path for path in tmp_path.iterdir()}


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("truncated.png", "truncated.png is damaged"), ("empty.png", "empty.png is empty"),
        ("text.png", "text.png is no image that can be read"), ("wrong.tif", "wrong.tif is no TIFF that can be read"),
        ("pickled.npy", "pickled.npy is no array"), ("array.npy", "array.npy is"),
        ("stack.npy", r"stack.npy must hold one image, .* got shape \(2, 3, 4, 5\)"),
        ("two.npz", "two.npz must hold one array"), ("complex.npy", "must hold real numbers, got complex128"),
        ("infinite.npy", "infinite.npy has infinite pixels"), ("tricks.npz", "tricks.npz"),
    ],
)  # fmt: skip
def test_files_that_cannot_be_read_are_named(name: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        read_image(damaged(tmp_path)[name])
    assert "\n" not in str(raised.value)


def test_what_is_not_one_picture_of_brightness_is_refused(tmp_path: Path) -> None:
    frames = [Image.fromarray(random_values((8, 8, 3), "uint8", seed)) for seed in range(2)]
    frames[0].save(tmp_path / "a.webp", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"^a.webp holds 2 pictures, and one is expected$"):
        read_image(tmp_path / "a.webp")
    frames[0].save(tmp_path / "a.tif", save_all=True, append_images=frames[1:])
    with pytest.raises(ValueError, match=r"^a.tif holds 2 pictures, and one is expected$"):
        read_image(tmp_path / "a.tif")
    frames[0].convert("CMYK").save(tmp_path / "ink.tif")
    with pytest.raises(ValueError, match=r"^ink.tif holds amounts of ink \(CMYK\); save it as RGB first$"):
        read_image(tmp_path / "ink.tif")
    write_raster(tmp_path / "classes.tif", random_values((1, 8, 8), "uint8"))
    with rasterio.open(tmp_path / "classes.tif", "r+") as file:
        file.write_colormap(1, {number: (number, 0, 0, 255) for number in range(256)})
    with pytest.raises(ValueError, match=r"^classes.tif holds numbers of colours"):
        read_image(tmp_path / "classes.tif")


def test_a_lossy_tiff_comes_back_without_loss(tmp_path: Path) -> None:
    write_raster(tmp_path / "a.tif", random_values((3, 32, 32), "uint8"), compress="jpeg", photometric="YCBCR")
    image = read_image(tmp_path / "a.tif")
    write_image(tmp_path / "b.tif", image, image.values)
    assert np.array_equal(read_image(tmp_path / "b.tif").values, image.values)


def test_a_decompression_bomb_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(random_values((40, 40, 3), "uint8")).save(tmp_path / "a.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ValueError, match=r"a.png claims more pixels than an image file should"):
        read_image(tmp_path / "a.png")


# As a Dataset --------------------------------------------------------------------------------------------------------


def test_a_density_learns_from_files(tmp_path: Path) -> None:
    for number in range(12):
        values = random_values((2, 10, 12), "float32", number)
        values[:, 3:6, 3:6] = np.nan
        np.save(tmp_path / f"{number}.npy", values)
    images = data.images(tmp_path)
    assert images[0].dtype == torch.float32
    assert next(iter(DataLoader(images, 4))).shape == (4, 2, 10, 12)
    density = UNetDMFA(2, rank=1, widths=(4, 4), depths=(1, 1), patch=1)
    history = misconv.fit_density(density, images, steps=4, batch_size=4, validation=0, progress=False)
    assert history[-1]["step"] == 4


def test_squares_cover_images_of_any_size(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(70.0).reshape(7, 10))
    write_raster(tmp_path / "b.tif", np.arange(300.0, dtype=np.float32).reshape(1, 20, 15), nodata=7)
    images = data.images(tmp_path)
    crops = Crops(images, 8, [read_shape(path) for path in images.paths])
    assert len(crops) == 1 * 2 + 3 * 2
    assert all(crop.shape == (1, 8, 8) for crop in crops)
    assert crops[0][0, 7].isnan().all()  # beyond the border
    seen = {float(v) for index in range(len(crops)) for v in crops[index][~crops[index].isnan()]}
    assert seen == {float(v) for v in range(300) if v != 7} | {float(v) for v in range(70)}


# Window by window ----------------------------------------------------------------------------------------------------


def random_density(channels: int) -> UNetDMFA:
    torch.manual_seed(0)
    density = UNetDMFA(channels, rank=2, widths=(8, 8, 8), depths=(1, 1, 1), patch=1, bounds=None).eval()
    with torch.no_grad():
        density.head.weight.normal_(0, 0.2)
    return density


@pytest.mark.parametrize("share", [0.3, 0.0])
def test_windows_leave_no_seams(share: float) -> None:
    density = random_density(2)
    assert reach_of(density) == 64
    coded = random_values((2, 300, 260), "float32")
    coded[:, np.random.default_rng(1).random((300, 260)) < share] = np.nan
    coded[:, 100:130, 90:150] = np.nan
    (whole,) = predict(density, lambda window: coded[:, *window], coded.shape)
    parts = list(predict(density, lambda window: coded[:, *window], coded.shape, largest=192))
    assert len(parts) == 5 * 5
    for part in parts:
        for ours, all_ in ((part.mean, whole.mean), (part.deviation, whole.deviation)):
            np.testing.assert_allclose(ours, all_[:, *part.window], atol=1e-5 * np.ptp(whole.mean))


def test_a_scene_is_filled_window_by_window(tmp_path: Path) -> None:
    values = random_values((2, 150, 170), "int16") // 8
    values[:, :, ::20] = -9999
    write_raster(tmp_path / "a.tif", values, nodata=-9999, compress="lzw")
    density = random_density(2).train()
    missing = impute.scene(tmp_path / "a.tif", tmp_path / "b.tif", density, deviation=tmp_path / "sd.tif")
    assert density.training
    assert missing == pytest.approx(9 / 170)
    image = read_image(tmp_path / "a.tif")
    with rasterio.open(tmp_path / "b.tif") as file, rasterio.open(tmp_path / "sd.tif") as errors:
        filled = file.read()
        assert file.nodata is None
        assert (file.crs, file.transform) == (errors.crs, errors.transform)
        deviation = errors.read()
    assert filled.dtype == np.int16
    seen = np.broadcast_to(image.observed, values.shape)
    assert np.array_equal(filled[seen], values[seen])
    assert (deviation[seen] == 0).all()
    assert (deviation[~seen] > 0).all()
    source = FoundFile(str(tmp_path / "a.tif"), "a.tif")
    fill_scene(source, [tmp_path / "c.tif"], density.eval(), largest=192)
    again = read_image(tmp_path / "c.tif").values.astype(int)
    assert np.abs(again - filled).max() <= 1  # where half a unit is rounded


def test_a_scene_that_cannot_be_filled_leaves_nothing_behind(tmp_path: Path) -> None:
    values = random_values((1, 60, 60), "uint8")
    write_raster(tmp_path / "a.tif", values, nodata=0)

    def broken(x: torch.Tensor, observed: torch.Tensor) -> Any:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        impute.scene(tmp_path / "a.tif", tmp_path / "b.tif", broken)
    write_raster(tmp_path / "void.tif", np.zeros_like(values), nodata=0)
    with pytest.raises(ValueError, match=r"void.tif has no pixel that was seen"):
        impute.scene(tmp_path / "void.tif", tmp_path / "b.tif", random_density(1))
    with pytest.raises(ValueError, match="out must be another file"):
        impute.scene(tmp_path / "a.tif", tmp_path / "a.tif", random_density(1))
    assert sorted(os.listdir(tmp_path)) == ["a.tif", "void.tif"]


# A file for every band -----------------------------------------------------------------------------------------------


def band_folder(folder: Path, side: int, suffix: str = ".tif") -> Any:
    """Three images of the bands B2, B3 and B10; the second has no B3. Returns their values, (3, 3, side, side)."""
    values = random_values((3, 3, side, side), "int16") // 8
    values[:, :, 4:9, 4:9] = -9999
    for number in range(3):
        for band, word in enumerate(("B2", "B3", "B10")):
            if (number, word) == (1, "B3"):
                continue
            path = folder / f"scene{number}_{word}{suffix}"
            if suffix == ".tif":
                write_raster(path, values[number, band, None], nodata=-9999)
            else:
                np.save(path, values[number, band])
    np.save(folder / "other.npy", np.zeros((2, 2)))
    return values


@pytest.mark.parametrize("suffix", [".tif", ".npy"])
def test_bands_that_are_files_of_their_own(suffix: str, tmp_path: Path) -> None:
    values = band_folder(tmp_path, 20, suffix)
    images = data.images(tmp_path, nodata=-9999, bands=("B2", "B3", "B10"))
    assert [file.name.name for file in images.files] == [f"scene{number}{suffix}" for number in range(3)]
    expected = torch.from_numpy(values.astype(np.float32))
    expected[expected == -9999] = torch.nan
    expected[1, 1] = torch.nan
    assert torch.equal(torch.stack([images[n] for n in range(3)]).nan_to_num(7), expected.nan_to_num(7))
    crops = Crops(images, 16, [(3, 20, 20)] * 3)
    assert torch.equal(crops[0].nan_to_num(7), expected[0, :, :16, :16].nan_to_num(7))
    folders = tmp_path / "by_folder"
    for word in ("t1", "flair"):
        (folders / word).mkdir(parents=True)
        np.save(folders / word / "a.npy", np.full((2, 2), len(word)))
    assert data.images(folders, bands=("flair", "t1"))[0][:, 0, 0].tolist() == [5, 2]


def test_bands_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    for word, shape in (("A", (4, 4)), ("B", (4, 5))):
        np.save(tmp_path / f"x-{word}.npy", np.zeros(shape))
    with pytest.raises(ValueError, match=r"x-B.npy must have one band of the size and type of x-A.npy"):
        data.images(tmp_path, bands=("A", "B"))[0]
    np.save(tmp_path / "x-B.npy", np.zeros((3, 4, 4)))
    with pytest.raises(ValueError, match=r"must have one band"):
        data.images(tmp_path, bands=("B", "C"))[0]
    with pytest.raises(ValueError, match="bands must be words in the names of files, got Q"):
        data.images(tmp_path, bands=("Q",))
    with pytest.raises(ValueError, match="bands must be different words"):
        data.images(tmp_path, bands=("A", "A"))
    with pytest.raises(TypeError, match="bands must be a list of words"):
        data.images(tmp_path, bands="AB")


def test_scenes_of_several_files_are_filled_window_by_window(tmp_path: Path) -> None:
    """Window by window as in one piece, into a file for every band, also for the one that was not there."""
    values = band_folder(tmp_path, 150)
    (file,) = [file for file in find_files(tmp_path, ("B2", "B3", "B10")) if file.name.name == "scene1.tif"]
    density = random_density(3).eval()
    outs, errors = ([tmp_path / f"{kind}{n}.tif" for n in range(3)] for kind in ("out", "sd"))
    fill_scene(file, outs, density, errors, largest=192)
    coded = data.images(tmp_path, bands=("B2", "B3", "B10"))[1]
    with torch.no_grad():
        p = density(coded.unsqueeze(0))
    for band in range(3):
        with rasterio.open(outs[band]) as made, rasterio.open(errors[band]) as deviation:
            filled, sd = made.read(1), deviation.read(1)
            assert (made.crs.to_epsg(), made.nodata, made.dtypes[0]) == (32633, None, "int16")
        seen = ~coded[band].isnan().numpy()
        assert np.array_equal(filled[seen], values[1, band][seen])
        np.testing.assert_allclose(filled, p.mean[0, band].numpy(), atol=0.51)
        np.testing.assert_allclose(sd, p.variance[0, band].sqrt().numpy(), rtol=1e-3, atol=1e-3)
