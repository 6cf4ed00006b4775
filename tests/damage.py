"""Files that are damaged by chance, and files that are made to do harm; for the tests of `misconv.store`.

`damaged` returns bytes that must be refused. `hostile` returns bytes with a right checksum and a wrong description:
they must be refused too, or load quickly as the harmless file they happen to be.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from typing import Any

from misconv._store import format as _format

__all__ = ["content_of", "damaged", "hostile", "sealed", "with_content", "with_table"]

ODD_VALUES: tuple[Any, ...] = (
    None, True, -1, 0, 1, 2**31, 2**63, 10**40, 1.5, -0.0, float("nan"), float("inf"), "", "a", "\x00", "\ud800", "__metadata__",
    [], [[]], {}, {"a": {}}, [None] * 50, {"class": "torch.nn.ReLU", "arguments": {}}, {"function": "sin"}, {"module": None},
)  # fmt: skip


# A file in its parts -------------------------------------------------------------------------------------------------


def table_of(data: bytes) -> dict[str, Any]:
    """The table of tensors, with the metadata, at the start of a file."""
    table: dict[str, Any] = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return table


def content_of(data: bytes) -> dict[str, Any]:
    """The header of ours in the metadata of a file."""
    content: dict[str, Any] = json.loads(table_of(data)["__metadata__"]["misconv"])
    return content


def with_table(data: bytes, table: Any) -> bytes:
    """The file with another table, and its old checksum if the table has one."""
    text = (table if isinstance(table, str) else json.dumps(table, separators=(",", ":"))).encode("utf-8", "replace")
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text + data[8 + int.from_bytes(data[:8], "little") :]


def with_content(data: bytes, content: Any) -> bytes:
    """The file with another header, and a checksum that fits."""
    table = table_of(data)
    table["__metadata__"]["misconv"] = content if isinstance(content, str) else json.dumps(content)
    return sealed(with_table(data, table))


def sealed(data: bytes) -> bytes:
    """The file with a checksum that fits, where it has a place for one."""
    try:
        table = table_of(data)
        table["__metadata__"]["misconv_sha256"] = "0" * 64
        return b"".join(bytes(part) for part in _format.add_checksum(with_table(data, table)))
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return data


# By chance -----------------------------------------------------------------------------------------------------------


def _flip(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    # Half of them in the header, which is the smaller part of most files.
    end = len(data) if rng.random() < 0.5 else 8 + int.from_bytes(data[:8], "little")
    place, bit = rng.randrange(min(end, len(data))), rng.randrange(8)
    return f"bit {bit} of byte {place} flipped", data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :]


def _overwrite(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    place, size = rng.randrange(len(data)), rng.choice((1, 2, 16, 512))
    new = rng.choice((bytes(size), b"\xff" * size, rng.randbytes(size)))
    return f"{size} bytes from {place} overwritten", (data[:place] + new + data[place + size :])[: len(data)]


def _cut(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    place = rng.randrange(len(data))
    return f"cut after {place} bytes", data[:place]


def _lose(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    place, size = rng.randrange(len(data)), rng.choice((1, 8, 100))
    return f"{size} bytes lost at {place}", data[:place] + data[place + size :]


def _extend(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    more = rng.choice((b"\0", b"more", data, rng.randbytes(64), b"\n"))
    return f"{len(more)} bytes added", rng.choice((data + more, more + data))


def _splice(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """The start of one file, the end of another one that differs in its numbers."""
    start = 8 + int.from_bytes(data[:8], "little")
    other = data[:start] + bytes(byte ^ 1 for byte in data[start:])
    place = rng.randrange(len(data))
    return f"spliced with another file at {place}", data[:place] + other[place:]


def _exchange(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    first, second = sorted(rng.sample(range(len(data)), 2))
    return f"turned around at {first} and {second}", data[:first] + data[second:] + data[first:second]


def _edit_table(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    table = table_of(data)
    what = _edit(table, rng)
    return f"table edited: {what}", with_table(data, table)


def _edit_text(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """Keys twice, comments, other encodings: what is JSON for some readers alone."""
    text = json.dumps(table_of(data), separators=(",", ":"))
    changed = rng.choice((
        text[:-1] + ',"__metadata__":{}}', text.replace('"shape"', '"shape":[1],"shape"', 1), text + "//", "[" * 5000, "{" * 5000, text[:-1], "null",
        text.replace("0", "NaN", 1), text.replace('"', "'"), text * 2, "\ufeff" + text, text.upper(), '{"a":' * 3000 + "1" + "}" * 3000,
    ))  # fmt: skip
    return "table no longer plain JSON", with_table(data, changed)


_CHANCE: tuple[Callable[[bytes, random.Random], tuple[str, bytes]], ...] = (
    _flip, _flip, _flip, _overwrite, _cut, _lose, _extend, _splice, _exchange, _edit_table, _edit_text,
)  # fmt: skip


def damaged(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done to the bytes of a sound file, and bytes that differ from it and must be refused."""
    for _ in range(20):
        what, changed = rng.choice(_CHANCE)(data, rng)
        if changed != data:
            return what, changed
    return "first bit flipped", bytes([data[0] ^ 1]) + data[1:]


# On purpose ----------------------------------------------------------------------------------------------------------


def hostile(data: bytes, rng: random.Random) -> tuple[str, bytes]:
    """What was done to the description or the table of a sound file, and bytes whose checksum fits again."""
    if rng.random() < 0.25:
        table = table_of(data)
        what = _edit({name: entry for name, entry in table.items() if name != "__metadata__"}, rng)
        return f"table, sealed again: {what}", sealed(with_table(data, table))
    content = content_of(data)
    what = _edit(content, rng)
    for _ in range(rng.choice((0, 0, 1, 3))):
        what += f", {_edit(content, rng)}"
    return f"description: {what}", with_content(data, content)


def _places(value: Any, path: str = "") -> list[tuple[str, Any, Any]]:
    """Every place in a tree: its path, the object that holds it and the key."""
    keys = list(value) if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else []
    found = []
    for key in keys:
        found.append((f"{path}/{key}", value, key))
        found += _places(value[key], f"{path}/{key}")
    return found


def _edit(tree: Any, rng: random.Random) -> str:
    """Change one place of a tree of JSON: another value or type, nothing, twice as much, or that of another place."""
    places = _places(tree)
    if not places:
        return "nothing to edit"
    path, holder, key = rng.choice(places)
    action = rng.choice(("value", "value", "number", "remove", "copy", "rename", "repeat", "nest"))
    value = holder[key]
    if action == "remove":
        del holder[key]
    elif action == "copy":
        holder[key] = copy.deepcopy(rng.choice(places)[1])
    elif action == "rename" and isinstance(holder, dict):
        holder[rng.choice(("", "0", "weight", "forward", "class", "a.b", "__class__", "arguments"))] = holder.pop(key)
    elif action == "repeat" and isinstance(value, list | str) and len(value) < 1000:
        holder[key] = value * rng.choice((2, 50))
    elif action == "nest":
        for _ in range(rng.choice((3, 60, 100))):
            value = {"class": "torch.nn.Sequential", "children": {"0": value}}
        holder[key] = value
    elif action == "number" and isinstance(value, int):
        holder[key] = rng.choice((value + 1, value - 1, -value, value * 10**7, 10**12, 2**64, 0))
    else:
        holder[key] = copy.deepcopy(rng.choice(ODD_VALUES))
    return f"{action} at {path}"
