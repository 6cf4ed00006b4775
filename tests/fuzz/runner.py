"""Run random cases of the kinds asked for, over processes, for a number of cases or minutes; report what failed.

python -m tests.fuzz [kind ...] [--cases N] [--minutes M] [--processes P] [--seed S] [--device D] [--json FILE]
python -m tests.fuzz maths 123456        one case again, with its traceback
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from misconv._store.provenance import commit, device_name, versions
from misconv._train import cpu_by_default
from tests.fuzz.outcome import Outcome, failure

# Kinds, and how many cases a process does at once: about a second's worth.
KINDS = {"maths": 100, "leak": 40, "networks": 10, "kills": 3, "files": 20, "calls": 50}
SHOWN = 20  # failures and reasons of each kind


@dataclass
class Tally:
    """What came of many cases of one kind."""

    cases: int = 0
    ok: int = 0
    refused: int = 0
    failed: int = 0
    seconds: float = 0.0  # of all processes together
    first_seed: int | None = None
    last_seed: int | None = None
    reasons: Counter[str] = field(default_factory=Counter)
    failures: list[dict[str, Any]] = field(default_factory=list)

    def add(self, other: Tally) -> None:
        for name in ("cases", "ok", "refused", "failed", "seconds"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        seeds = [s for s in (self.first_seed, self.last_seed, other.first_seed, other.last_seed) if s is not None]
        self.first_seed, self.last_seed = min(seeds), max(seeds)
        self.reasons.update(other.reasons)
        self.failures += other.failures


@contextmanager
def quiet() -> Iterator[None]:
    """Warnings are errors, as in the tests, but for those that torch gives about itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.filterwarnings("ignore", message="Using padding='same' with even kernel")
        warnings.filterwarnings("ignore", message="None of the inputs have requires_grad=True")  # checkpoint
        warnings.filterwarnings("ignore", message=".*multi-threaded, use of fork")  # torch has threads, which wait
        warnings.filterwarnings("ignore", message="the density is not reliable yet")  # after two epochs it is not
        warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
        yield


@contextmanager
def _repeatable(kind: str, device: str) -> Iterator[None]:
    """On a GPU: float32 as it is, without TF32; and the same bits twice where bits are compared."""
    if not device.startswith("cuda"):
        yield
        return
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.backends.cudnn.deterministic = True
    torch.use_deterministic_algorithms(kind == "leak", warn_only=True)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*does not have a deterministic implementation")
        yield


def run_case(kind: str, seed: int, device: str = "cpu") -> Outcome:
    """One case; any error that it does not expect is a failure."""
    module = importlib.import_module(f"tests.fuzz.{kind}")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with cpu_by_default(), quiet(), _repeatable(kind, device):
            outcome: Outcome = module.case(seed, device)
    except Exception as error:
        return failure(error)
    finally:
        torch.set_default_dtype(dtype)
    return outcome


def run_many(kind: str, first: int, count: int, device: str = "cpu") -> Tally:
    """Cases with consecutive seeds."""
    tally, start = Tally(first_seed=first, last_seed=first + count - 1), time.perf_counter()
    for seed in range(first, first + count):
        outcome = run_case(kind, seed, device)
        tally.cases += 1
        setattr(tally, outcome.status, getattr(tally, outcome.status) + 1)
        if outcome.status == "refused":
            tally.reasons[outcome.what] += 1
        elif outcome.status == "failed":
            tally.failures.append({"seed": seed, "what": outcome.what})
    tally.seconds = time.perf_counter() - start
    return tally


def run(
    kinds: Sequence[str], *, cases: int | None, minutes: float | None, processes: int, seed: int, device: str
) -> dict[str, Tally]:
    """All kinds side by side, each `cases` times or all together for `minutes`."""
    tallies = {kind: Tally() for kind in kinds}
    ends = time.monotonic() + 60 * (minutes if minutes is not None else 1e9)
    following = dict.fromkeys(kinds, seed)  # the next seed of each

    def unfinished(kind: str) -> bool:
        return time.monotonic() < ends and (cases is None or following[kind] < seed + cases)

    pool: Executor = _pool(processes) if processes > 1 else _Here()
    running: dict[Future[Tally], tuple[str, int, int]] = {}
    while True:
        while len(running) < 2 * processes and any(map(unfinished, kinds)):
            left = [kind for kind in kinds if unfinished(kind)]
            if not left:
                break  # the time has just run out
            kind = min(left, key=lambda k: (tallies[k].seconds, following[k]))  # the one that had least time
            count = KINDS[kind] if cases is None else min(KINDS[kind], seed + cases - following[kind])
            running[pool.submit(run_many, kind, following[kind], count, device)] = (kind, following[kind], count)
            following[kind] += count
        if not running:
            break
        done, _ = wait(running, return_when=FIRST_COMPLETED)
        for future in done:
            kind, first, count = running.pop(future)
            try:
                tallies[kind].add(future.result())
            except BrokenProcessPool:  # its other work is lost as well
                what = f"a process died in one of the seeds {first} to {first + count - 1}"
                lost = Tally(count, failed=1, first_seed=first, last_seed=first + count - 1)
                lost.failures.append({"seed": first, "what": what})
                tallies[kind].add(lost)
                pool = _pool(processes)
    pool.shutdown()
    return tallies


def _pool(processes: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(processes, mp_context=get_context("spawn"), initializer=_begin)


class _Here(Executor):
    """One process is this one."""

    def __init__(self) -> None:
        _begin()

    def submit(self, function: Any, /, *arguments: Any, **options: Any) -> Future[Any]:
        done: Future[Any] = Future()
        done.set_result(function(*arguments, **options))
        return done


def _begin() -> None:
    torch.set_num_threads(1)  # one process a core
    torch.backends.cudnn.deterministic = True
    torch.backends.cudnn.allow_tf32 = False


def summary(tallies: dict[str, Tally]) -> str:
    """Counts, reasons of refusals and failures of every kind."""
    lines = []
    for kind, tally in tallies.items():
        rate = 1000 * tally.seconds / max(tally.cases, 1)
        lines.append(
            f"{kind}: {tally.cases:,} cases, {tally.ok:,} right, {tally.refused:,} refused, {tally.failed:,} failed "
            f"({rate:.1f} ms per case)"
        )
        lines += [f"    {count:6,} refused: {reason}" for reason, count in tally.reasons.most_common(SHOWN)]
        for bad in tally.failures[:SHOWN]:
            lines.append(f"    FAILED  python -m tests.fuzz {kind} {bad['seed']}    # {bad['what']}")
        if len(tally.failures) > SHOWN:
            lines.append(f"    … and {len(tally.failures) - SHOWN} more failures")
    return "\n".join(lines)


def record(tallies: dict[str, Tally], device: str, seconds: float) -> dict[str, Any]:
    """What a run was and what came of it, as JSON; `tools/trust.py` makes a table of such records."""
    where = torch.device(device)
    kinds = {}
    for kind, tally in tallies.items():
        kinds[kind] = asdict(tally) | {
            "seconds": round(tally.seconds, 1),
            "reasons": dict(tally.reasons.most_common(SHOWN)),
            "failures": tally.failures[:200],
        }
    return {
        "commit": commit(),
        "versions": versions(where),
        "device": device_name(where),
        "seconds": round(seconds, 1),
        "kinds": kinds,
    }


def parse(arguments: Sequence[str] | None) -> tuple[argparse.Namespace, list[str], list[int]]:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)  # fmt: skip
    parser.add_argument("what", nargs="*", help=f"kinds ({', '.join(KINDS)}; all if none), or one kind and seeds")
    parser.add_argument("--cases", type=int, help="of each kind")
    parser.add_argument("--minutes", type=float, help="for all kinds together; 1 if neither is given")
    parser.add_argument("--processes", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--seed", type=int, default=0, help="of the first case of each kind")
    parser.add_argument("--device", default="cpu", help="where tensors live: cpu or cuda")
    parser.add_argument("--json", type=Path, help="file for the record of this run")
    options = parser.parse_args(arguments)
    seeds = [int(word) for word in options.what if re.fullmatch(r"\d+", word)]
    kinds = [word for word in options.what if not re.fullmatch(r"\d+", word)]
    unknown = [kind for kind in kinds if kind not in KINDS]
    if unknown or (seeds and len(kinds) != 1):
        parser.error(f"name kinds among {', '.join(KINDS)}, or one kind and seeds; got {' '.join(options.what)}")
    return options, kinds or list(KINDS), seeds


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line; 1 where something failed."""
    options, kinds, seeds = parse(arguments)
    if seeds:
        return _again(kinds[0], seeds, options.device)
    minutes = 1.0 if options.minutes is None and options.cases is None else options.minutes
    start = time.monotonic()
    tallies = run(
        kinds, cases=options.cases, minutes=minutes, processes=options.processes, seed=options.seed,
        device=options.device,
    )  # fmt: skip
    print(summary(tallies))
    if options.json is not None:
        text = json.dumps(record(tallies, options.device, time.monotonic() - start), indent=1, ensure_ascii=False)
        options.json.write_text(text + "\n", encoding="utf-8")
    return int(any(tally.failed for tally in tallies.values()))


def _again(kind: str, seeds: list[int], device: str) -> int:
    """Single cases, with the traceback of the first that fails."""
    _begin()
    module = importlib.import_module(f"tests.fuzz.{kind}")
    for seed in seeds:
        with quiet():
            print(seed, module.case(seed, device), file=sys.stdout)
    return 0
