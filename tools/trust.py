"""Write the tables of `trust.md` from the records of the fuzz harness: `make docs` runs this.

    python tools/trust.py [--results results/fuzz] [--page docs/trust.md]

Every file in the folder is the record of one run, `python -m tests.fuzz --json FILE`; the runs are added up.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
Record = dict[str, Any]

# What a case of each kind is, in the order of the table.
KINDS = {
    "maths": "a random stem, density or imputer against dense float64 oracles, values or gradients",
    "leak": "two runs that differ in hidden values alone: results and gradients bit for bit",
    "networks": "a random network, converted: complete images, incomplete images, nothing else changed",
    "kills": "a process killed while it saves, trains or keeps results; what resumes has the same bits",
    "files": "a damaged or hostile file: refused shortly, or the very bits that were saved",
    "calls": "a call with one or two arguments that do not belong there: works, or names the argument",
}


def load(folder: Path) -> list[Record]:
    """The records of all runs, by name; the same cases may not count twice."""
    records = [json.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.json"))]
    if not records:
        raise ValueError(f"{folder} must hold the record of at least one run of python -m tests.fuzz --json FILE")
    for kind in KINDS:
        seen: dict[str, list[tuple[int, int]]] = {}
        for record in records:
            tally = record["kinds"].get(kind)
            if not tally or not tally["cases"]:
                continue
            ranges = seen.setdefault(record["device"], [])
            first, last = tally["first_seed"], tally["last_seed"]
            if any(first <= end and start <= last for start, end in ranges):
                raise ValueError(
                    f"{folder} must hold other seeds of {kind} in every run on {record['device']}, got some twice"
                )
            ranges.append((first, last))
    return records


def table_of_kinds(records: Sequence[Record]) -> str:
    """Cases of each kind, over all runs."""
    lines = [
        "| kind | a case is | tried | right | refused, with a reason | wrong |",
        "| :-- | :-- | --: | --: | --: | --: |",
    ]
    for kind, what in KINDS.items():
        tallies = [record["kinds"][kind] for record in records if kind in record["kinds"]]
        tried, right, refused, wrong = (sum(t[name] for t in tallies) for name in ("cases", "ok", "refused", "failed"))
        lines.append(f"| {kind} | {what} | {tried:,} | {right:,} | {refused:,} | {wrong:,} |")
    return "\n".join(lines)


def table_of_reasons(records: Sequence[Record]) -> str:
    """The most frequent reasons for which networks were refused."""
    total: dict[str, int] = {}
    for record in records:
        for reason, count in record["kinds"].get("networks", {}).get("reasons", {}).items():
            total[reason] = total.get(reason, 0) + count
    lines = ["| networks | refused because |", "| --: | :-- |"]
    for reason, count in sorted(total.items(), key=lambda item: (-item[1], item[0]))[:10]:
        lines.append(f"| {count:,} | {reason.replace('|', '/')} |")
    return "\n".join(lines)


def table_of_runs(records: Sequence[Record]) -> str:
    """Where, when in the history and with what each run was made, and which seeds it had."""
    lines = ["| device | commit | torch | minutes | seeds |", "| :-- | :-- | :-- | --: | :-- |"]
    for record in records:
        seeds = [
            f"{kind} {tally['first_seed']:,} to {tally['last_seed']:,}"
            for kind, tally in record["kinds"].items()
            if tally["cases"]
        ]
        commit = (record["commit"] or "unknown")[:10]
        minutes = f"{record['seconds'] / 60:.0f}"
        lines.append(
            f"| {record['device']} | {commit} | {record['versions']['torch']} | {minutes} | {', '.join(seeds)} |"
        )
    return "\n".join(lines)


def fill(page: str, records: Sequence[Record]) -> str:
    """The page with these tables between their markers."""
    tables = {"kinds": table_of_kinds, "reasons": table_of_reasons, "runs": table_of_runs}
    for name, table in tables.items():
        start, end = f"<!-- table: {name} -->\n", "<!-- end -->"
        if page.count(start) != 1:
            raise ValueError(f"trust.md must hold the markers of table {name!r} once, found {page.count(start)}")
        before, after = page.split(start)
        page = before + start + table(records) + "\n" + after[after.index(end) :]
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    """Fill the tables of the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "results" / "fuzz")
    parser.add_argument("--page", type=Path, default=ROOT / "docs" / "trust.md")
    options = parser.parse_args(arguments)
    page = options.page.read_text(encoding="utf-8")
    options.page.write_text(fill(page, load(options.results)), encoding="utf-8")


if __name__ == "__main__":
    main()
