"""Files whole or not at all, whatever they meet: full disks, kills, pipes, links, other writers, flipped bits."""

from __future__ import annotations

import errno
import os
import random
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from misconv import MisConv2d, store
from misconv._store import files as _files
from tests import damage
from tests.processes import run

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="pipes, links, locks and permissions of POSIX")


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


@pytest.fixture(params=["anonymous", "named"])
def temporary(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to write: into an anonymous file, and into a named one where the system has no other."""
    if request.param == "named":
        monkeypatch.setattr(_files, "_open_anonymous", lambda folder: None)
    return str(request.param)


# Failures ------------------------------------------------------------------------------------------------------------


def full_disk(*_: object, **__: object) -> None:
    raise OSError(28, "No space left on device")


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


@pytest.mark.parametrize("step", ["open", "fsync", "replace", "link"])
@pytest.mark.parametrize("failure", [full_disk, interrupted])
def test_a_failed_write_keeps_the_old_file(
    step: str, failure: Callable[..., None], temporary: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if step == "link" and temporary == "named":
        return
    path = tmp_path / "model"
    store.save(nn.Linear(2, 3), path)
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, step, failure)
        with pytest.raises((OSError, KeyboardInterrupt)) as caught:
            store.save(nn.Linear(20, 30), path)
    if failure is full_disk:
        assert f"cannot write {path}: No space left on device; what was there is untouched" in str(caught.value)
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == 28
    assert path.read_bytes() == before
    assert files(tmp_path) == {"model"}


LIMITED = """
import importlib.util, resource, sys
spec = importlib.util.spec_from_file_location("_files", sys.argv[3])  # by itself, for torch takes long to import
_files = importlib.util.module_from_spec(spec)
spec.loader.exec_module(_files)
if sys.argv[2] == "named": _files._open_anonymous = lambda folder: None
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
try: _files.write_bytes(sys.argv[1], bytes(10_000_000))
except OSError as error: print(error)
"""


def test_a_disk_that_fills_up_while_writing(temporary: str, tmp_path: Path) -> None:
    """For real: a limit on the size of files stops the write half-way."""
    path = tmp_path / "report"
    path.write_bytes(b"old")
    command = [sys.executable, "-c", LIMITED, str(path), temporary, str(_files.__file__)]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert f"cannot write {path}: File too large; what was there is untouched" in result.stdout
    assert path.read_bytes() == b"old"
    assert files(tmp_path) == {"report"}


# Places --------------------------------------------------------------------------------------------------------------


def test_places_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError, match=r"cannot write .*model: there is no folder .*nowhere; create it first"):
        store.save(nn.Linear(2, 3), tmp_path / "nowhere" / "model")
    for folder in (tmp_path, f"{tmp_path}/", f"{tmp_path}/new/", "."):
        with pytest.raises(OSError, match=r"cannot write .*: (it is a folder; name a file|there is no folder)"):
            store.save(nn.Linear(2, 3), folder)
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match=r"cannot write .*: .*file is no folder"):
        store.save(nn.Linear(2, 3), tmp_path / "file" / "model")

    def denied(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "open", denied)
        with pytest.raises(
            PermissionError, match=r"cannot write .*model: Permission denied; what was there is untouched"
        ):
            store.save(nn.Linear(2, 3), tmp_path / "model")
    with monkeypatch.context() as patch:
        patch.setattr(os, "access", lambda *_: False)  # root may write everywhere
        with pytest.raises(PermissionError, match=r"cannot write .*file: it is write-protected; what was there"):
            store.write_bytes(tmp_path / "file", b"new")
    assert files(tmp_path) == {"file"}
    with pytest.raises(OSError, match="cannot write .*: File name too long"):
        store.write_bytes(tmp_path / ("n" * 256), b"")


@pytest.fixture
def special(tmp_path: Path) -> Iterator[dict[str, Path]]:
    """Things in a folder that are no ordinary files."""
    made = {name: tmp_path / name for name in ("pipe", "socket", "folder", "loop", "null", "linked pipe")}
    os.mkfifo(made["pipe"])
    made["folder"].mkdir()
    made["loop"].symlink_to(made["loop"])
    made["linked pipe"].symlink_to(made["pipe"])
    made["null"].symlink_to("/dev/null")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.path.relpath(made["socket"]) if len(str(made["socket"])) > 100 else str(made["socket"]))
        yield made


KINDS = {
    "pipe": r"it is a pipe \(FIFO\); name a file",
    "linked pipe": r"it is a pipe \(FIFO\); name a file",
    "socket": "it is a socket; name a file",
    "folder": "it is a folder; name a file",
    "null": "it is a device; name a file",
    "loop": "Too many levels of symbolic links",
}


@pytest.mark.parametrize("name", KINDS)
def test_what_is_no_file_is_refused_at_once(name: str, special: dict[str, Path]) -> None:
    path, before = special[name], os.lstat(special[name])
    begin = time.monotonic()
    with pytest.raises(OSError, match=f"cannot load .*: {KINDS[name]}"):
        store.load(path)
    with pytest.raises(OSError, match=f"cannot write .*: {KINDS[name]}"):
        store.save(nn.Linear(2, 3), path)
    assert time.monotonic() - begin < 5
    assert (os.lstat(path).st_mode, os.lstat(path).st_ino) == (before.st_mode, before.st_ino)


def test_permissions_and_links_stay(tmp_path: Path, temporary: str) -> None:
    path, link, dangling = tmp_path / "model", tmp_path / "link", tmp_path / "dangling"
    ordinary = tmp_path / "ordinary"
    ordinary.touch()
    store.write_bytes(path, b"first")
    assert path.read_bytes() == b"first"
    assert stat.S_IMODE(path.stat().st_mode) == stat.S_IMODE(ordinary.stat().st_mode)
    path.chmod(0o640)
    link.symlink_to(path)
    store.write_bytes(link, b"second")
    assert link.is_symlink()
    assert path.read_bytes() == b"second"
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    dangling.symlink_to(tmp_path / "new")
    store.write_bytes(dangling, b"third")
    assert dangling.is_symlink()
    assert (tmp_path / "new").read_bytes() == b"third"


@pytest.mark.parametrize(
    "name",
    ["n" * 255, "ä" * 127, b"not \xff\xfe text", "two\nlines", "-rf", "~", " ", "a\tb", b"bytes", "\u202egnp.ledom"],
)
def test_names(name: str | bytes, tmp_path: Path, temporary: str) -> None:
    path = os.path.join(os.fsencode(tmp_path), os.fsencode(name))
    for given in (path, os.fsdecode(path), Path(os.fsdecode(path))):
        store.save(nn.Linear(2, 3), given)
        assert isinstance(store.load(given), nn.Linear)
    assert [os.fsencode(entry) for entry in os.listdir(tmp_path)] == [os.fsencode(name)]
    (tmp_path / os.fsdecode(name)).write_bytes(b"damaged")
    with pytest.raises(ValueError, match="cannot load ") as caught:
        store.load(path)
    str(caught.value).encode()
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    "call", [store.load, store.read, lambda p: store.save(nn.Linear(1, 1), p), lambda p: store.write_bytes(p, b"")]
)
def test_what_is_no_name(call: Callable[[Any], object]) -> None:
    for path in (3, None, ["a"], open, object(), torch.ones(2)):
        with pytest.raises(TypeError, match=f"path must be a str, bytes or os.PathLike, got {type(path).__name__}"):
            call(path)

    class Odd(os.PathLike):  # type: ignore[type-arg]
        def __fspath__(self) -> Any:
            return 3

    with pytest.raises(TypeError, match="path must be a str, bytes or os.PathLike, got Odd: .* not int"):
        call(Odd())
    with pytest.raises(
        ValueError, match="path must be the name of a file, got one in characters that this system does not"
    ):
        call("\ud800")
    for path, what in (("", "nothing"), ("a\0b", "one with a null byte"), (b"a\0b", "one with a null byte")):
        with pytest.raises(ValueError, match=f"path must be the name of a file, got {what}"):
            call(path)
    with pytest.raises(TypeError, match="data must be bytes, got str"):
        store.write_bytes("a", "text")  # type: ignore[arg-type]


# Several writers -----------------------------------------------------------------------------------------------------


def test_what_killed_writers_left_is_removed(tmp_path: Path) -> None:
    stale = tmp_path / ".model.misconv-0123456789abcdef.tmp"
    odd = tmp_path / (".two\nlines.misconv-" + "a" * 16 + ".tmp")
    foreign = [".model.0123.tmp", "model.misconv-0123456789abcdef.tmp", ".x.tmp", ".model.misconv-0123456789ABCDEF.tmp"]
    held = tmp_path / ".held.misconv-0123456789abcdef.tmp"
    for path in (stale, odd, held, *(tmp_path / name for name in foreign)):
        path.write_bytes(b"part")
    (tmp_path / ".pipe.misconv-0123456789abcdef.tmp").mkdir()  # no file, and not ours
    link = tmp_path / ".link.misconv-0123456789abcdef.tmp"
    link.symlink_to(tmp_path / ".x.tmp")
    with open(held, "rb") as file:
        assert _files._lock(file.fileno())
        store.write_bytes(tmp_path / "other", b"whole")
        assert not stale.exists()
        assert not odd.exists()
        assert held.exists()  # somebody writes it
    store.write_bytes(tmp_path / "other", b"whole")
    assert files(tmp_path) == {"other", *foreign, link.name, ".pipe.misconv-0123456789abcdef.tmp"}


def test_a_file_swept_away_before_it_is_held_is_made_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_files, "_open_anonymous", lambda folder: None)
    lock, swept = _files._lock, []

    def late(number: int, *, wait: bool = True) -> bool:
        if wait and not swept:
            swept.append(files(tmp_path))
            _files._remove_stale_files(tmp_path)
            assert not files(tmp_path)
        return lock(number, wait=wait)

    monkeypatch.setattr(_files, "_lock", late)
    store.write_bytes(tmp_path / "model", b"whole")
    assert len(swept[0]) == 1
    assert (tmp_path / "model").read_bytes() == b"whole"


def test_many_threads_write_one_file(tmp_path: Path, temporary: str) -> None:
    path = tmp_path / "model"
    failures: list[BaseException] = []

    def work(value: int) -> None:
        try:
            for _ in range(10):
                store.write(path, {"t": torch.full((5000,), float(value))}, {"value": value})
                tensors, metadata = store.read(path)
                assert (tensors["t"] == metadata["value"]).all()
        except BaseException as error:  # handed to the test
            failures.append(error)

    threads = [threading.Thread(target=work, args=(value,)) for value in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert files(tmp_path) == {"model"}


def test_two_sweep_away_a_file_that_is_not_held_yet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two writers that found it the second one is late, and takes no file that has come since."""
    lock, sync, late = _files._lock, os.fsync, []
    monkeypatch.setattr(_files, "_open_anonymous", lambda folder: None)

    def sweep_before_it_is_held(number: int, **options: bool) -> bool:
        if not late:
            (found,) = (path for path in tmp_path.iterdir() if path.name.endswith(".tmp"))
            late.append((os.open(found, os.O_RDONLY), found))
            _files._remove_stale(str(found))
            assert not found.exists()
        return lock(number, **options)

    def sweep_late(number: int) -> None:
        other, path = late[0]
        assert lock(other, wait=False)
        path.unlink(missing_ok=True)
        sync(number)

    monkeypatch.setattr(_files, "_lock", sweep_before_it_is_held)
    monkeypatch.setattr(_files.os, "fsync", sweep_late)
    store.write(tmp_path / "model", {"t": torch.ones(1)}, {})
    os.close(late[0][0])
    assert files(tmp_path) == {"model"}


def kill_writers(path: Path, temporary: str, kills: int) -> tuple[int, int]:
    """Fork writers and kill them: how many versions were seen, and how many other files.

    The runner has threads, which no fork survives, so this is called in a process of its own.
    """
    torch.set_num_threads(1)
    if temporary == "named":
        _files._open_anonymous = lambda folder: None
    store.write(path, {"t": torch.zeros(200_000)}, {"value": 0})
    chance, seen, left = random.Random(0), [0], 0
    for _ in range(kills):
        child = os.fork()
        if not child:
            value = seen[-1]
            while True:
                value += 1
                store.write(path, {"t": torch.full((200_000,), float(value))}, {"value": value})
        time.sleep(chance.random() * 0.06)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        left += len(files(path.parent)) - 1
        tensors, metadata = store.read(path)
        assert tensors["t"].shape == (200_000,)
        assert (tensors["t"] == metadata["value"]).all()
        seen.append(metadata["value"])
    return len(set(seen)), left


def test_a_killed_process_leaves_a_whole_file_and_nothing_else(temporary: str, tmp_path: Path) -> None:
    versions, left = run(kill_writers, tmp_path / "state", temporary, 40)
    store.write(tmp_path / "state", {}, {})
    assert files(tmp_path) == {"state"}
    assert versions > 3  # there was writing between the kills
    if temporary == "anonymous":
        assert left < 20  # a name exists for a moment only
    else:
        assert left > 0  # what the last write has removed


# Damage --------------------------------------------------------------------------------------------------------------


def small_file(folder: Path) -> tuple[Path, bytes]:
    path = folder / "model"
    store.save(nn.PReLU().eval(), path)
    return path, path.read_bytes()


def refused(path: Path, data: bytes) -> str:
    path.write_bytes(data)
    with pytest.raises(ValueError, match=r"^cannot load [^\n]*$") as caught:
        store.load(path)
    assert len(str(caught.value)) < 600
    return str(caught.value)


def test_every_flipped_bit_is_refused(tmp_path: Path) -> None:
    path, data = small_file(tmp_path)
    reasons = set()
    for place in range(len(data)):
        for bit in range(8):
            changed = bytearray(data)
            changed[place] ^= 1 << bit
            reasons.add(refused(path, bytes(changed)).split(": ", 1)[1].split(" (")[0])
    assert reasons <= {_format_damaged(), "this is not a file of misconv; give one that misconv.save has written"}
    path.write_bytes(data)
    store.load(path)


def _format_damaged() -> str:
    return "the file is damaged or cut short; copy it again from where it came, or save the model again"


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path, data = small_file(tmp_path)
    for size in range(len(data)):
        reason = refused(path, data[:size])
        assert "damaged or cut short" in reason or size < 9
    for more in (b"\0", b"more", data):
        assert "damaged" in refused(path, data + more)


@pytest.mark.parametrize("seed", range(4))
def test_damage_of_every_kind_is_refused(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = nn.Sequential(MisConv2d(3, 4, 3, norm=nn.BatchNorm2d(4)), nn.Flatten(), nn.Linear(3, 2, bias=False))
    model.append(model[2])  # with aliases
    store.save(model, tmp_path / "sound")
    data = (tmp_path / "sound").read_bytes()
    for _ in range(100):
        what, changed = damage.damaged(data, rng)
        assert changed != data
        try:
            refused(tmp_path / "model", changed)
        except BaseException as error:
            raise AssertionError(f"seed {seed}: {what}") from error


def outcome(path: Path) -> str:
    """Why a file is refused; nothing where it loads."""
    try:
        store.load(path)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("seed", range(4))
def test_hostile_descriptions_are_refused_or_harmless(seed: int, tmp_path: Path) -> None:
    rng = random.Random(seed)
    model = nn.Sequential(MisConv2d(3, 4, 3, norm=nn.BatchNorm2d(4)), nn.Upsample(2), nn.Linear(3, 2, bias=False))
    model.append(model[2])
    store.save(model, tmp_path / "sound")
    data = (tmp_path / "sound").read_bytes()
    assert damage.sealed(data) != b""
    (tmp_path / "again").write_bytes(damage.with_content(data, damage.content_of(data)))
    store.load(tmp_path / "again")  # what is sealed again is sound
    loaded = 0
    for _ in range(100):
        what, changed = damage.hostile(data, rng)
        (tmp_path / "model").write_bytes(changed)
        begin = time.monotonic()
        reason = outcome(tmp_path / "model")
        loaded += not reason
        assert not reason or reason.startswith("cannot load "), what
        assert "\n" not in reason, what
        assert len(reason) < 900, what
        assert time.monotonic() - begin < 5, what
    assert loaded < 50


def test_a_file_that_cannot_be_read_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = small_file(tmp_path)

    class Broken:
        def __init__(self, file: Any) -> None:
            self.file, self.fileno, self.seek = file, file.fileno, file.seek

        def read(self, size: int = -1) -> bytes:
            if size < 0:
                raise OSError(errno.EIO, "Input/output error")
            data: bytes = self.file.read(size)
            return data

        def __enter__(self) -> Broken:
            return self

        def __exit__(self, *_: object) -> None:
            self.file.close()

    opened = store.open_regular
    monkeypatch.setattr(store, "open_regular", lambda path: Broken(opened(path)))
    with pytest.raises(OSError, match="cannot load .*model: Input/output error") as caught:
        store.load(path)
    assert caught.value.errno == errno.EIO


def test_a_file_of_holes_is_not_read(tmp_path: Path) -> None:
    """10 TB of nothing, and a header that promises more than there is."""
    path = tmp_path / "model"
    for start in (b"", (2**62).to_bytes(8, "little") + b"{", (2**30).to_bytes(8, "little") + b"{"):
        path.write_bytes(start)
        os.truncate(path, 10 * 2**40)
        begin = time.monotonic()
        with pytest.raises(ValueError, match="cannot load .*: (this is not a file|the file is damaged)"):
            store.load(path)
        assert time.monotonic() - begin < 5
