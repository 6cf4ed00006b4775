"""Where the time of a converted network goes beyond that of the plain one, kernel by kernel, on a GPU.

    python benchmarks/kernels.py --out results/bench/kernels-cuda.json

Steps of the networks of `misconv bench --only network` are profiled, plain and converted with the MFA given. What both
launch equally often and within a twentieth of each other's time is left out.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from misconv._store import commit, device_name, versions
from misconv.bench.network import Networks, NetworkSetting

SETTINGS = [
    NetworkSetting("resnet18", "training", "bfloat16", 128),
    NetworkSetting("resnet50", "training", "bfloat16", 64),
    NetworkSetting("resnet50", "training", "float32", 64),
    NetworkSetting("resnet50", "evaluation", "bfloat16", 256),
    NetworkSetting("efficientnet_b0", "training", "bfloat16", 64),
]
STEPS = 5


def main() -> None:
    """Profile every setting, print what differs, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    device = torch.device("cuda")
    rows: list[dict[str, Any]] = []
    record = {"commit": commit(), "versions": versions(device), "device": device_name(device), "rows": rows}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    for setting in SETTINGS:
        rows.append(compare(setting, torch.Generator(device).manual_seed(0)))
        options.out.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")  # a run that is cut off leaves it


def compare(setting: NetworkSetting, generator: torch.Generator) -> dict[str, Any]:
    """Time of all kernels of a step, plain and converted, and of those that differ."""
    networks = Networks(setting, generator)
    networks.check()
    contenders = networks.contenders(setting.task, graph=False)
    times = {name: kernels(partial(contenders[name].run, 0)) for name in ("network", "given")}
    total = {name: sum(us for us, _ in found.values()) for name, found in times.items()}
    nothing = (0.0, 0.0)
    differ: list[dict[str, Any]] = []
    for kernel in {**times["network"], **times["given"]}:
        plain, given = (times[name].get(kernel, nothing) for name in ("network", "given"))
        if plain[1] != given[1] or abs(plain[0] - given[0]) > 0.05 * plain[0]:
            differ.append({"kernel": kernel, "plain_us": plain[0], "plain_calls": plain[1], "given_us": given[0],
                           "given_calls": given[1]})  # fmt: skip
    differ.sort(key=lambda row: -abs(row["given_us"] - row["plain_us"]))
    print(f"{setting}: {total['network']:.0f} µs, converted {total['given']:.0f} µs")
    for row in differ[:12]:
        print("  {plain_us:8.0f} µs ×{plain_calls:<4g} {given_us:8.0f} µs ×{given_calls:<4g} {kernel}".format(**row))
    return {"setting": str(setting), "plain_us": total["network"], "given_us": total["given"], "kernels": differ[:20]}


def kernels(step: Callable[[], object]) -> dict[str, tuple[float, float]]:
    """Microseconds and launches of one step, by the name of the kernel."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize()
    found: dict[str, tuple[float, float]] = {}
    for event in seen.key_averages():
        us, calls = found.get(short(event.key), (0.0, 0.0))
        found[short(event.key)] = (us + event.self_device_time_total / STEPS, calls + event.count / STEPS)
    return {name: times for name, times in found.items() if times[0] > 0}


def short(name: str) -> str:
    """A kernel's name without the types of its arguments, but with what tells one elementwise kernel from another."""
    name = re.sub(r"^void |\(anonymous namespace\)::|at::native::|\(.*\)$", "", name)
    return re.sub(r"\s+", " ", name)[:110]


if __name__ == "__main__":
    main()
