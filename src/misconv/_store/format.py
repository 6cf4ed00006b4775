"""Tensors and JSON as the bytes of one safetensors file with a checksum over all of it.

The metadata of the file hold ``misconv``, JSON text with the number of the format, the names that are one and the same
tensor and the caller's content, and ``misconv_sha256``, the SHA-256 of the whole file with 64 zeros in its own place.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import zipfile
from typing import Any, BinaryIO, TypeAlias

import torch
from torch import Tensor, nn

from misconv._checks import describe
from misconv._store.files import os_error, shown
from misconv._version import __version__

__all__ = ["FORMAT", "JsonObject", "add_checksum", "check_storable", "pack", "unpack"]

JsonObject: TypeAlias = dict[str, Any]  # what JSON calls an object, and a file may hold

FORMAT = 2
_EMPTY = "0" * 64
_KEY = "misconv_sha256"
_LONGEST_HEADER = 100_000_000  # as in safetensors itself
# Complex types that safetensors does not know are stored as pairs of real numbers.
_PAIRS = {"complex32": torch.complex32, "complex128": torch.complex128}
_DAMAGED = "the file is damaged or cut short; copy it again from where it came, or save the model again"


# Out -----------------------------------------------------------------------------------------------------------------


def pack(tensors: dict[str, Tensor], content: JsonObject) -> list[bytes | memoryview]:
    """The file in pieces."""
    from safetensors.torch import save as serialize

    unique, aliases = _deduplicate(tensors)
    pairs = {name: _short(t) for name, t in unique.items() if _short(t) in _PAIRS}
    header = {"format": FORMAT, "misconv": __version__, "aliases": aliases, "pairs": pairs, "content": content}
    text = _dump(header)
    stored = {name: torch.view_as_real(t).contiguous() if name in pairs else t for name, t in unique.items()}
    try:
        data = serialize(stored, {"misconv": text, _KEY: _EMPTY})
    except Exception as error:  # of a type or a name that safetensors does not know
        raise ValueError(f"tensors must be of types and names that safetensors can store: {_line(error)}") from error
    return add_checksum(data)


def add_checksum(data: bytes) -> list[bytes | memoryview]:
    """A serialized file with its checksum in place of the zeros."""
    place = _find(data, _EMPTY)
    return [data[:place], _digest(data, place).encode(), memoryview(data)[place + 64 :]]


def _dump(header: JsonObject) -> str:
    _check_keys(header["content"], 0)
    try:
        return json.dumps(header)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(f"metadata must hold only what JSON can say, got {_line(error)}") from error


def _check_keys(value: Any, depth: int) -> None:
    """JSON would turn other keys than text into text."""
    if depth > 200:
        raise TypeError("metadata must hold only what JSON can say, got something nested in itself or too deeply")
    if isinstance(value, dict):
        odd = [key for key in value if not isinstance(key, str)]
        if odd:
            raise TypeError(
                f"metadata must hold only what JSON can say, got the key {describe(odd[0])}, which is no str"
            )
        value = list(value.values())
    if isinstance(value, list | tuple):
        for part in value:
            _check_keys(part, depth + 1)


def _deduplicate(tensors: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Tensors on the CPU that share no memory, and the other names of those that were there more than once."""
    unique: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    first: dict[object, str] = {}
    storages: set[int] = set()
    for name, tensor in tensors.items():
        check_storable(name, tensor)
        kind = isinstance(tensor, nn.Parameter), tensor.dtype, tensor.device, tensor.is_conj(), tensor.is_neg()
        place = (tensor.data_ptr(), tensor.shape, tensor.stride(), kind) if tensor.numel() else name
        if first.setdefault(place, name) != name:
            aliases[name] = first[place]
            continue
        # A conjugate or negative view is a flag on other numbers until it is resolved.
        plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
        pointer = plain.untyped_storage().data_ptr()
        unique[name] = plain.clone() if pointer in storages else plain  # two views of one memory become two tensors
        storages.add(pointer)
    return unique, aliases


def check_storable(name: object, tensor: object) -> None:
    """An ordinary tensor with values, under a name that a file can hold."""
    if not isinstance(name, str) or name == "__metadata__":
        raise TypeError(f"tensors must have names of type str, other than '__metadata__', got {describe(name)}")
    if not isinstance(tensor, Tensor):
        extra = " (what get_extra_state of a module returns)" if name.endswith("_extra_state") else ""
        raise TypeError(f"{shown(name)}{extra} must be a tensor to be stored, got {describe(tensor)}")
    if nn.parameter.is_lazy(tensor):
        raise ValueError(f"{shown(name)} has no shape yet; call the model once before it is saved")
    if type(tensor) not in (Tensor, nn.Parameter):
        raise TypeError(
            f"{shown(name)} must be a torch.Tensor or a Parameter to be stored, got {type(tensor).__name__}"
        )
    if tensor.is_meta or tensor.layout != torch.strided or tensor.is_quantized:
        raise ValueError(
            f"{shown(name)} must be an ordinary tensor with values in memory to be stored, got {describe(tensor)} "
            f"of layout {str(tensor.layout).removeprefix('torch.')}"
        )


# In ------------------------------------------------------------------------------------------------------------------


def unpack(file: BinaryIO, name: str) -> tuple[dict[str, Tensor], JsonObject]:
    """Tensors and content of an open file; whatever is wrong with it, a ValueError says it."""
    try:
        return _unpack(file)
    except RecursionError as error:
        raise ValueError(f"cannot load {shown(name)}: its description is broken, it is nested too deeply") from error
    except MemoryError as error:
        raise ValueError(f"cannot load {shown(name)}: it does not fit into memory") from error
    except OSError as error:
        raise os_error(error.errno, f"cannot load {shown(name)}: {error.strerror or error}") from error
    except ValueError as error:
        raise ValueError(f"cannot load {shown(name)}: {error}") from error


def _unpack(file: BinaryIO) -> tuple[dict[str, Tensor], JsonObject]:
    from safetensors import SafetensorError
    from safetensors.torch import load as deserialize

    size = os.fstat(file.fileno()).st_size
    start = file.read(16)
    length = int.from_bytes(start[:8], "little")
    if start[8:9] != b"{" or length > min(size - 8, _LONGEST_HEADER):
        raise ValueError(_explain_other_file(file, start))
    file.seek(0)
    data = file.read()
    try:
        table = json.loads(data[8 : 8 + length], object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_DAMAGED} ({_line(error)})") from error
    header = _parse(data, table.get("__metadata__") if isinstance(table, dict) else None)
    try:
        with torch.device("cpu"):
            tensors = deserialize(data)
    except (SafetensorError, KeyError, ValueError, RuntimeError, AssertionError, TypeError) as error:
        raise ValueError(f"{_DAMAGED} ({_line(error)})") from error
    return _resolve(tensors, header), header["content"]


def _resolve(tensors: dict[str, Tensor], header: JsonObject) -> dict[str, Tensor]:
    """All tensors under all their names."""
    for name, kind in header["pairs"].items():
        pair = tensors.get(name)
        known = _PAIRS.get(kind) if isinstance(kind, str) else None
        if pair is None or known is None or pair.dtype != known.to_real() or pair.shape[-1:] != (2,):
            raise ValueError("its description is broken, the complex tensors do not fit the tensors")
        tensors[name] = torch.view_as_complex(pair)
    aliases = header["aliases"]
    if not all(isinstance(name, str) and name in tensors for name in aliases.values()) or aliases.keys() & tensors:
        raise ValueError("its description is broken, the aliases do not fit the tensors")
    return tensors | {name: tensors[original] for name, original in aliases.items()}


def _parse(data: bytes, metadata: object) -> JsonObject:
    """The checked header of a file."""
    metadata = metadata if isinstance(metadata, dict) else {}
    text, digest = metadata.get("misconv"), metadata.get(_KEY)
    if digest is not None:
        _verify(data, digest)
    if not isinstance(text, str):
        if _KEY.encode() in data[: 8 + int.from_bytes(data[:8], "little")]:
            raise ValueError(f"{_DAMAGED} (its metadata are gone)")
        raise ValueError(
            "this safetensors file was not written by misconv; load its tensors with safetensors.torch.load_file and "
            "give them to model.load_state_dict"
        )
    try:
        header = json.loads(text, object_pairs_hook=_reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"its description is broken, {type(error).__name__}: {_line(error)}") from error
    _check_format(header, sealed=digest is not None)
    if not all(isinstance(header.get(part), dict) for part in ("aliases", "pairs", "content")):
        raise ValueError("its description is broken, the aliases, the pairs or the content are missing")
    checked: JsonObject = header
    return checked


def _check_format(header: Any, *, sealed: bool) -> None:
    number = header.get("format") if isinstance(header, dict) else None
    if type(number) is not int or number < 1:
        raise ValueError("its description is broken, the format must be a number from 1 on")
    written = f"it has format {str(number)[:20]}, written by misconv {ascii(header.get('misconv'))[:40]}"
    if number > FORMAT:
        raise ValueError(f"{written}, and this misconv reads format {FORMAT}; install a newer misconv")
    if number < FORMAT:
        raise ValueError(f"{written}, which this misconv reads no more; save the model again with this misconv")
    if not sealed:
        raise ValueError(f"{_DAMAGED} (it has no checksum)")


def _reject_duplicate_keys(pairs: list[tuple[str, Any]]) -> JsonObject:
    made = dict(pairs)
    if len(made) != len(pairs):
        raise ValueError("a name is there twice")
    return made


def _verify(data: bytes, digest: object) -> None:
    """Every bit of the file is as it was written."""
    place = _find(data, digest) if isinstance(digest, str) and len(digest) == 64 else -1
    if place < 0 or _digest(data, place) != digest:
        raise ValueError(f"{_DAMAGED} (its checksum does not fit)")


def _find(data: bytes, digest: str) -> int:
    """Where the checksum stands; quotes inside of names and texts are escaped, so this is found only there."""
    label = f'"{_KEY}":"'.encode()
    place = data.find(label + digest.encode("ascii", "replace") + b'"', 8)
    return place + len(label) if place >= 0 else -1


def _digest(data: bytes, place: int) -> str:
    whole = memoryview(data)
    made = hashlib.sha256(whole[:place])
    made.update(_EMPTY.encode())
    made.update(whole[place + 64 :])
    return made.hexdigest()


def _explain_other_file(file: BinaryIO, start: bytes) -> str:
    """What to say of a file that is no sound safetensors file."""
    pickled = start[:1] == b"\x80" and start[1:2] <= b"\x05" and start[8:9] != b"{"
    # A damaged archive, or one of a kind that zipfile cannot read: then nothing more is known of it.
    with contextlib.suppress(zipfile.BadZipFile, OSError, ValueError, NotImplementedError):
        if zipfile.is_zipfile(file):
            with zipfile.ZipFile(file) as archive:
                pickled = any(name.endswith(".pkl") for name in archive.namelist())
    if pickled:
        return (
            "this is a pickle, as torch.save writes it, and misconv never loads pickles, which can run any code; "
            "load it with torch.load(..., weights_only=True) and store the model with misconv.save"
        )
    return _DAMAGED if start[8:9] == b"{" else "this is not a file of misconv; give one that misconv.save has written"


def _short(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _line(error: BaseException) -> str:
    """The first line of what others say, and not more than fits."""
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
