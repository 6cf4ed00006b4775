"""Take the records of `misconv table` into `results/paper`, and give a folder of `misconv table` those that are there.

    python tools/records.py merge misconv-paper/table-B-svhn.json … [--results results/paper] [--commit COMMIT]
    python tools/records.py seed misconv-paper [--only recipe …] [--results results/paper]

A GPU is often rented, and its folder of finished work is gone afterwards. What was copied from it is merged:
a new record replaces that of the same row, seed and region. Where the code had gone there without its history, and
MISCONV_COMMIT was not set, ``--commit`` says of which commit it was. Rows of one table are compared with each other, so
all have the same images and epochs, and those that have a density the same one: records of others are left out, and
told. A folder that was seeded does not train again what its settings have not changed.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from misconv import store
from misconv.paper.cache import Cache, key
from misconv.paper.scores import Record

ROOT = Path(__file__).parent.parent

# The file of each kind of records, after the name of the data set; those of block one lie by what is missing.
FILES = {
    "classification": "{shape}",
    "density": "{shape}",
    "fit": "{shape}",
    "recipe": "recipe",
    "transfer": "transfer",
    "share": "shares",
    "ingredient": "ingredients",
    "coding": "coding",
    "slanted": "slanted",
    "objective": "objectives",
    "wae": "generation",
    "flow_matching": "generation",
}
ONE_RECIPE = ("recipe", "transfer", "share")  # the kinds whose rows differ by how missing pixels are treated alone
INGREDIENT = "ingredient"  # whose rows differ otherwise, but not in images, epochs and the kind of density
PARTS = (
    "kind", "dataset", "shape", "method", "seed", "variant", "share", "coding", "objective", "density",
)  # of a row  # fmt: skip
# What the record of a unit is in a folder: its kind, and what a table that shows it has added.
UNITS: dict[str, tuple[str, tuple[str, ...]]] = {
    **{kind: (kind, ()) for kind in ("recipe", "transfer", "share", "classification", "wae", "flow_matching")},
    "ingredient": ("recipe", ("variant",)),
    "coding": ("classification", ("coding",)),
    "objective": ("classification", ("objective",)),
    "slanted": ("classification", ()),
}


def read(path: Path) -> list[Record]:
    """The records of a file; or the one of a unit, in the folder `records` of a table that was not finished."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        listed = [content["record"]] if "record" in content else content["records"]
        found = [record for record in listed if isinstance(record["kind"], str)]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise SystemExit(f"{path} must be a file of records, which misconv table writes: {error}") from error
    return found


def write(path: Path, records: Sequence[Record]) -> None:
    """One record to a line."""
    lines = ",\n".join(json.dumps(record, ensure_ascii=False) for record in records)
    store.write_bytes(path, f'{{"records": [\n{lines}\n]}}\n'.encode())


def is_known(commit: str | None) -> bool:
    """Whether this is a commit; it may be None, or one with changes that nobody knows."""
    return commit is not None and re.fullmatch("[0-9a-f]{40}", commit) is not None


def row_of(record: Record) -> tuple[Any, ...]:
    """What a record is about; two of the same do not stand in one table.

    Trainings of densities differ by their settings alone.
    """
    settings = json.dumps(record["settings"], sort_keys=True) if record["kind"] == "fit" else None
    return (*(record.get(part) for part in PARTS), settings)


def density_of(record: Record) -> str | None:
    """The settings of its density, if it has one, and how long it learned with the classifier.

    Ingredients may differ in both the latter and the number of components.
    """
    settings = record.get("settings", {})
    recipe = settings.get("recipe", {})
    found = recipe.get("density") or settings.get("density")
    if found is None:
        return None
    if record["kind"] == INGREDIENT:
        return json.dumps({name: value for name, value in found.items() if name != "components"}, sort_keys=True)
    return json.dumps([found, recipe.get("tuned")], sort_keys=True)


def basis_of(record: Record) -> tuple[Any, ...]:
    """The images and epochs of a row; a quick run has few of both."""
    settings = record.get("settings", {})
    return settings.get("crc32"), settings.get("recipe", {}).get("epochs")


def merged(old: Sequence[Record], new: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """All records of one file, in the order of the old ones, and those that were left out: of another recipe."""
    by_row = {row_of(record): record for record in [*old, *new]}
    bases = {basis_of(record) for record in new}
    densities = {density_of(record) for record in new if record["kind"] in (*ONE_RECIPE, INGREDIENT)} - {None}
    if len(densities) > 1:
        places = ", ".join(sorted({f"{record['dataset']} ({record['kind']})" for record in new}))
        raise SystemExit(f"records that are merged must have one density, got {len(densities)} of {places}")

    def fits(record: Record) -> bool:
        if record["kind"] not in (*ONE_RECIPE, INGREDIENT):
            return True
        density = density_of(record)
        return basis_of(record) in bases and (density is None or not densities or density in densities)

    found = list(by_row.values())
    return [record for record in found if fits(record)], [record for record in found if not fits(record)]


def merge(paths: Iterable[Path], results: Path, commit: str | None = None) -> list[str]:
    """Merge the records of some files; returns what was done, a line for every file that was written.

    Args:
        commit: that of records which do not know their own.
    """
    by_file: dict[str, list[Record]] = {}
    for path in paths:
        for record in read(path):
            if commit is not None and not is_known(record.get("commit")):
                record["commit"] = commit
            if record["kind"] not in FILES:
                raise SystemExit(f"{path} must hold records of {', '.join(FILES)}, got {record['kind']!r}")
            name = FILES[record["kind"]].format(shape=record["shape"])
            by_file.setdefault(f"{record['dataset']}-{name}.json", []).append(record)
    told = []
    for name, new in sorted(by_file.items()):
        old = read(results / name) if (results / name).exists() else []
        kept, left_out = merged(old, new)
        write(results / name, kept)
        rows = sorted({str(record["method"]) for record in left_out})
        told.append(f"{name}: {len(kept)} records" + (f", without {', '.join(rows)} of another recipe" * bool(rows)))
    return told


def seed(folder: Path, results: Path, only: Sequence[str] = ()) -> int:
    """Put the records of units into a folder of `misconv table`; returns how many.

    Args:
        only: kinds of records; if none is named all but ingredients, which are often of another run than Table B.
    """
    units: dict[str, tuple[Path, Record]] = {}
    for path in sorted(results.glob("*.json")):
        for record in read(path):
            if record["kind"] not in (only or UNITS.keys() - {INGREDIENT}):
                continue
            kind, added = UNITS[record["kind"]]
            kept = {name: value for name, value in record.items() if name not in added} | {"kind": kind}
            other, same = units.setdefault(key(record["settings"]), (path, kept))
            if numbers_of(same) != numbers_of(kept):
                raise SystemExit(
                    f"{other.name} and {path.name} hold different numbers of {record['method']}, seed "
                    f"{record['seed']}, by the same settings, as of two runs, which are not to be mixed: name kinds, "
                    "as --only recipe"
                )
    cache = Cache(folder)
    for _, record in units.values():
        cache.keep(record["settings"], record)
    return len(units)


def numbers_of(record: Record) -> dict[str, float]:
    """What was measured, but for the time it took."""
    return {name: value for name, value in record.items() if isinstance(value, float) and name != "seconds"}


def main(arguments: Sequence[str] | None = None) -> None:
    """Merge, or seed."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "paper")
    commands = parser.add_subparsers(dest="command", required=True)
    merging = commands.add_parser("merge")
    merging.add_argument("files", type=Path, nargs="+")
    merging.add_argument("--commit", help="of records that do not know their own")
    seeding = commands.add_parser("seed")
    seeding.add_argument("folder", type=Path)
    seeding.add_argument("--only", nargs="+", choices=list(UNITS), default=[], help="kinds of records")
    options = parser.parse_args(arguments)
    if options.command == "merge":
        if options.commit is not None and not is_known(options.commit):
            raise SystemExit(f"--commit must be a whole commit, of 40 digits, got {options.commit!r}")
        print("\n".join(merge(options.files, options.results, options.commit)))
    else:
        print(f"{seed(options.folder, options.results, options.only)} records in {options.folder}")


if __name__ == "__main__":
    main()
