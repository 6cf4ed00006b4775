"""Files: written whole or not at all, checked when they are read, never a pickle."""

from misconv._store.description import describe_model, rebuild
from misconv._store.files import AnyPath, check_path, open_regular, shown, write_bytes, write_parts
from misconv._store.format import JsonObject, check_storable, pack, unpack
from misconv._store.places import check_new_or_ours, probe, read_json, try_place
from misconv._store.provenance import commit, device_name, versions
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
    "check_new_or_ours",
    "check_path",
    "check_storable",
    "commit",
    "describe_model",
    "device_name",
    "is_channels_last",
    "load_tensors",
    "open_regular",
    "pack",
    "probe",
    "read_json",
    "rebuild",
    "restore_channels_last",
    "shown",
    "tie_tensors",
    "try_place",
    "unchanged_on_failure",
    "unpack",
    "versions",
    "write_bytes",
    "write_parts",
]
