"""Finished work: named by what it was, written whole or not at all, and never taken for something else."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from misconv import store
from misconv.paper import cache as module
from misconv.paper.cache import FORMAT, Cache, as_json, key

SETTINGS: dict[str, Any] = {
    "dataset": "digits",
    "shape": "square",
    "fraction": 0.25,
    "method": "zero",
    "seed": 0,
    "classifier": {"kind": "small", "epochs": 3, "rates": [1e-3, 1e-4]},
    "density": None,
}


def files(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def the_record(cache: Cache) -> Path:
    (path,) = (cache.folder / "records").iterdir()
    return path


# Names -------------------------------------------------------------------------------------------------------------


def test_the_name_of_settings_is_the_same_everywhere_and_for_ever() -> None:
    """In another process too, where strings have other hashes; and the file of last year is found."""
    assert key({"seed": 0, "method": "zero"}) == "04d7bdd8a0f9b03a"
    code = f"from misconv.paper.cache import key; print(key({SETTINGS!r}))"
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert done.stdout.strip() == key(SETTINGS)


def test_the_order_of_settings_is_of_no_account() -> None:
    turned = {name: SETTINGS[name] for name in reversed(SETTINGS)}
    turned["classifier"] = {name: SETTINGS["classifier"][name] for name in reversed(SETTINGS["classifier"])}
    assert list(turned) != list(SETTINGS)
    assert key(turned) == key(SETTINGS)
    assert key(json.loads(json.dumps(SETTINGS))) == key(SETTINGS)
    assert key([SETTINGS, turned]) != key(SETTINGS)  # that of two is another


CHANGES: list[dict[str, Any]] = [
    {"dataset": "mnist"}, {"shape": "noise"}, {"fraction": 0.26}, {"fraction": 0.25 + 1e-15}, {"method": "mask"}, {"seed": 1},
    {"seed": "0"}, {"density": {}}, {"density": False}, {"variant": None}, {"classifier": {}},
    {"classifier": SETTINGS["classifier"] | {"epochs": 4}}, {"classifier": SETTINGS["classifier"] | {"rates": [1e-4, 1e-3]}},
    {"classifier": SETTINGS["classifier"] | {"rates": [1e-3]}}, {"classifier": SETTINGS["classifier"] | {"clip": 5.0}},
]  # fmt: skip


def test_whatever_differs_makes_another_name(tmp_path: Path) -> None:
    every = [SETTINGS, *(SETTINGS | change for change in CHANGES)]
    assert len({key(settings) for settings in every}) == len(every)
    cache = Cache(tmp_path)
    for number, settings in enumerate(every):
        cache.keep(settings, {"number": number})
    assert [cache.get(settings)["number"] for settings in every] == list(range(len(every)))  # type: ignore[index]
    assert len({cache.density(settings) for settings in every}) == len(every)
    assert len({cache.running(settings) for settings in [*every, every]}) == len(every) + 1


def test_settings_are_what_a_file_gives_back() -> None:
    """With lists for tuples, down to the last one; so a record equals the unit that it is the record of."""

    @dataclass(frozen=True)
    class Inner:
        widths: tuple[int, ...] = (1, 2)

    @dataclass(frozen=True)
    class Outer:
        rate: float = 0.1
        inner: Inner | None = Inner()
        nothing: Inner | None = None

    found = as_json(Outer())
    assert found == {"rate": 0.1, "inner": {"widths": [1, 2]}, "nothing": None}
    assert json.loads(json.dumps(found)) == found
    assert key(found) == key(json.loads(json.dumps(found)))
    with pytest.raises(ValueError, match="JSON"):
        as_json(Outer(rate=float("nan")))


@pytest.mark.parametrize(("bad", "error"), [(float("nan"), ValueError), ({1, 2}, TypeError), (Path("x"), TypeError)])
def test_settings_that_json_cannot_say_have_no_name(bad: object, error: type[Exception], tmp_path: Path) -> None:
    with pytest.raises(error):
        Cache(tmp_path).keep(SETTINGS | {"bad": bad}, {})
    assert not files(tmp_path)


# Kept and found ----------------------------------------------------------------------------------------------------


def test_what_was_kept_is_found_by_another_process_too(tmp_path: Path) -> None:
    cache = Cache(tmp_path / "deep" / "folder")
    assert cache.get(SETTINGS) is None
    record = {"accuracy": 0.1 + 0.2, "title": "Ziffern – 8×8", "history": [{"epoch": 0.0}], "nothing": None}
    kept = cache.keep(SETTINGS, record)
    assert kept == record | {"settings": SETTINGS}
    assert Cache(cache.folder).get(SETTINGS) == kept
    path = the_record(cache)
    assert path.name == f"digits-square-zero-0-{key(SETTINGS)}.json"  # people may look into the folder
    assert json.loads(path.read_text(encoding="utf-8"))["format"] == FORMAT


def test_a_name_for_people_is_a_name_of_a_file(tmp_path: Path) -> None:
    settings = SETTINGS | {"variant": "with/without the paper's density (zeros and mask)"}
    cache = Cache(tmp_path)
    cache.keep(settings, {"number": 1})
    assert cache.get(settings) == {"number": 1, "settings": settings}
    assert the_record(cache).parent == tmp_path / "records"
    assert cache.density(settings).parent == tmp_path / "densities"


def test_a_folder_that_is_there_stays_as_it_is(tmp_path: Path) -> None:
    Cache(tmp_path).keep(SETTINGS, {"number": 1})
    (tmp_path / "running" / "something").write_text("x")
    before = files(tmp_path)
    assert Cache(tmp_path).get(SETTINGS) is not None
    assert files(tmp_path) == before


# Whole or not at all -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", ["fsync", "replace"])
def test_a_write_that_fails_leaves_the_old_file(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = Cache(tmp_path)
    cache.keep(SETTINGS, {"number": 1})
    before = files(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(store.os, place, fail)
        with pytest.raises(OSError, match="cannot write .*: No space left on device; what was there is untouched"):
            cache.keep(SETTINGS, {"number": 2})
        with pytest.raises(OSError, match="cannot write"):
            cache.keep(SETTINGS | {"seed": 1}, {"number": 3})
    assert files(tmp_path) == before  # and no part of a file beside it
    assert cache.get(SETTINGS) == {"number": 1, "settings": SETTINGS}
    assert cache.get(SETTINGS | {"seed": 1}) is None


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), object()])
def test_a_record_that_json_cannot_say_is_not_written(bad: object, tmp_path: Path) -> None:
    cache = Cache(tmp_path)
    cache.keep(SETTINGS, {"number": 1})
    before = files(tmp_path)
    with pytest.raises((ValueError, TypeError), match="JSON"):
        cache.keep(SETTINGS, {"number": bad})
    assert files(tmp_path) == before


def test_what_a_killed_process_left_half_written_goes_after_a_while(tmp_path: Path) -> None:
    Cache(tmp_path)
    old, new = (tmp_path / "densities" / f".{name}.tmp" for name in ("old", "new"))
    for path in (old, new):
        path.write_text("half of")
    os.utime(old, (1e9, 1e9))
    Cache(tmp_path)
    assert not old.exists()
    assert new.exists()  # somebody may be writing it


# Refused -----------------------------------------------------------------------------------------------------------


def refused(cache: Cache, text: str | bytes, message: str) -> None:
    """The message names the file, and the file is left alone."""
    path = the_record(cache)
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    before = files(cache.folder)
    with pytest.raises(ValueError, match=message) as caught:
        cache.get(SETTINGS)
    assert str(path) in str(caught.value)
    assert files(cache.folder) == before


@pytest.fixture
def kept(tmp_path: Path) -> Cache:
    cache = Cache(tmp_path)
    cache.keep(SETTINGS, {"number": 1})
    return cache


@pytest.mark.parametrize("number", [FORMAT + 1, FORMAT - 1, "1", None])
def test_another_format_is_refused(kept: Cache, number: object) -> None:
    content = json.loads(the_record(kept).read_text())
    refused(
        kept, json.dumps(content | {"format": number}),
        f"must have the format {FORMAT} of this version, got {number}; use the version of misconv that wrote it, or another folder",
    )  # fmt: skip


def test_a_record_of_this_version_is_refused_by_the_next(kept: Cache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "FORMAT", FORMAT + 1)
    with pytest.raises(ValueError, match=f"must have the format {FORMAT + 1} of this version, got {FORMAT}"):
        kept.get(SETTINGS)


@pytest.mark.parametrize("cut", [0, 1, 0.5, -2])
def test_a_damaged_record_is_refused(kept: Cache, cut: float) -> None:
    text = the_record(kept).read_bytes()
    end = round(cut * len(text)) if isinstance(cut, float) else cut
    refused(kept, text[:end], "must be a record of misconv, got something else; move it away")


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "3", '"record"', "{}", f'{{"format": {FORMAT}}}', '{"record": {}}', b"\xff\xfe\x00",
     *(f'{{"format": {FORMAT}, "record": {record}}}' for record in ("null", "[]", '"x"'))],
)  # fmt: skip
def test_what_is_no_record_is_refused(kept: Cache, text: str | bytes) -> None:
    refused(kept, text, "must be a record of misconv, got something else; move it away")


@pytest.mark.parametrize("settings", [SETTINGS | {"seed": 1}, {}, None])
def test_a_record_whose_settings_do_not_match_its_name_is_refused(kept: Cache, settings: object) -> None:
    """Somebody has copied it there, or changed it by hand."""
    content = json.loads(the_record(kept).read_text())
    content["record"]["settings"] = settings
    refused(kept, json.dumps(content), "must hold the settings that its name stands for, got others; move it away")


def test_a_file_where_a_folder_should_be(tmp_path: Path) -> None:
    path = tmp_path / "results"
    path.write_text("mine")
    for folder in (path, path / "deeper"):
        with pytest.raises(NotADirectoryError, match="results.* must be a folder for results, but .* is a file"):
            Cache(folder)
    assert files(tmp_path) == {"results": b"mine"}
    half = tmp_path / "half"
    half.mkdir()
    (half / "densities").write_text("mine")
    with pytest.raises(NotADirectoryError, match="half must be a folder for results, but .*densities is a file"):
        Cache(half)
    assert (half / "densities").read_text() == "mine"


@pytest.mark.parametrize("place", ["records", "densities", "running"])
def test_a_folder_that_cannot_be_written_to(place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Asked for at the start, and not after the first training."""
    Cache(tmp_path)
    access = os.access
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path).name != place and access(path, mode))
    with pytest.raises(PermissionError, match=f"{tmp_path} must be a folder you may write to, got .*{place}"):
        Cache(tmp_path)


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_really_cannot_be_written_to(tmp_path: Path) -> None:
    Cache(tmp_path)
    (tmp_path / "records").chmod(0o555)
    try:
        with pytest.raises(PermissionError, match="must be a folder you may write to, got .*records"):
            Cache(tmp_path)
    finally:
        (tmp_path / "records").chmod(0o755)
