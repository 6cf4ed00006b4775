"""How the benchmark measures: bursts of calls in turns, medians, and peaks of memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from misconv.bench.layer import Contender

__all__ = ["Pace", "memory", "times"]


@dataclass(frozen=True)
class Pace:
    """How much time a row may take."""

    seconds: float = 0.15  # for each contender of a row …
    least: int = 5  # … but at least this many bursts, or three where that would take four times as long
    most: int = 60
    burst: float = 0.005  # seconds a burst should last
    calls: int = 50  # in a burst, at most


def times(contenders: Mapping[str, Contender], device: torch.device, pace: Pace) -> dict[str, dict[str, Any]]:
    """Microseconds of one call of every contender: median, quartiles and range of its bursts.

    A burst is many calls in a row between two events of the GPU (on a CPU, two looks at the clock), so what it costs to
    launch them counts as it does for a user. The contenders take turns, so that noise meets all alike; one that has
    used its time leaves the others to go on.
    """
    calls = {name: _calls(contender, device, pace) for name, contender in contenders.items()}
    taken: dict[str, list[float]] = {name: [] for name in contenders}
    spent = dict.fromkeys(contenders, 0.0)
    for turn in range(pace.most):
        for name, contender in contenders.items():
            if spent[name] > (pace.seconds if turn >= pace.least else 4 * pace.seconds) and turn >= min(pace.least, 3):
                continue
            start = time.perf_counter()
            taken[name].append(_burst(contender, calls[name], device) / (calls[name] * contender.calls))
            spent[name] += time.perf_counter() - start
    return {name: _summary(seconds, calls[name] * contenders[name].calls) for name, seconds in taken.items()}


def memory(contender: Contender, device: torch.device) -> dict[str, float]:
    """Megabytes at the peak of one call: what was allocated on top of its inputs, and with them."""
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    with contender.around():
        result = contender.run(0)
    torch.cuda.synchronize(device)
    added = torch.cuda.max_memory_allocated(device) - before
    del result
    return {"added_mb": round(added / 1e6, 2), "total_mb": round((added + contender.input_bytes) / 1e6, 2)}


def _calls(contender: Contender, device: torch.device, pace: Pace) -> int:
    """Warm up (kernels are compiled, algorithms chosen), then see how many runs make a burst."""
    _burst(contender, 1, device)
    each = _burst(contender, 1, device)
    if each < pace.burst:
        each = _burst(contender, 3, device) / 3
    return min(max(round(pace.burst / max(each, 1e-9)), 1), max(pace.calls // contender.calls, 1))


def _burst(contender: Contender, runs: int, device: torch.device) -> float:
    """Seconds of `runs` runs in a row."""
    run = contender.run
    with contender.around():
        if device.type != "cuda":
            start = time.perf_counter()
            for i in range(runs):
                run(i)
            return time.perf_counter() - start
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize(device)
        first.record()
        for i in range(runs):
            run(i)
        last.record()
        torch.cuda.synchronize(device)
        return float(first.elapsed_time(last)) / 1e3


def _summary(seconds: list[float], calls: int) -> dict[str, Any]:
    micro = [float(f"{1e6 * s:.5g}") for s in seconds]
    quartiles = statistics.quantiles(micro, n=4, method="inclusive") if len(micro) > 1 else micro * 3
    return {
        "median_us": statistics.median(micro),
        "quartiles_us": [float(f"{q:.5g}") for q in (quartiles[0], quartiles[2])],
        "range_us": [min(micro), max(micro)],
        "bursts": len(micro),
        "calls_per_burst": calls,
    }
