"""Files: written whole or not at all, checked when they are read, never a pickle."""

from misconv._store.description import describe_model, rebuild
from misconv._store.files import AnyPath, check_path, open_regular, shown, write_bytes, write_parts
from misconv._store.format import check_storable, pack, unpack
from misconv._store.places import check_new_or_ours, probe, read_json, try_place
from misconv._store.provenance import commit, device_name, versions
from misconv._store.restore import fill, is_channels_last, lay_out, share, unchanged_on_failure

__all__ = [
    "AnyPath",
    "check_new_or_ours",
    "check_path",
    "check_storable",
    "commit",
    "describe_model",
    "device_name",
    "fill",
    "is_channels_last",
    "lay_out",
    "open_regular",
    "pack",
    "probe",
    "read_json",
    "rebuild",
    "share",
    "shown",
    "try_place",
    "unchanged_on_failure",
    "unpack",
    "versions",
    "write_bytes",
    "write_parts",
]
