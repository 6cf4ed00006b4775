"""Files: written whole or not at all, checked when they are read, never a pickle."""

from misconv._store.description import describe_model, rebuild
from misconv._store.files import AnyPath, check_path, open_regular, shown, write_bytes, write_parts
from misconv._store.format import JsonObject, check_storable, pack, unpack
from misconv._store.places import check_output_folder, check_replaceable, check_writable, read_json
from misconv._store.provenance import commit, device_name, versions
from misconv._store.registries import set_channels
from misconv._store.restore import (
    is_channels_last,
    load_tensors,
    restore_channels_last,
    tie_tensors,
    unchanged_on_failure,
)

__all__ = [
    "AnyPath",
    "JsonObject",
    "check_output_folder",
    "check_path",
    "check_replaceable",
    "check_storable",
    "check_writable",
    "commit",
    "describe_model",
    "device_name",
    "is_channels_last",
    "load_tensors",
    "open_regular",
    "pack",
    "read_json",
    "rebuild",
    "restore_channels_last",
    "set_channels",
    "shown",
    "tie_tensors",
    "unchanged_on_failure",
    "unpack",
    "versions",
    "write_bytes",
    "write_parts",
]
