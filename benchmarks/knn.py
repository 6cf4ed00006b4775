"""How long k-nearest-neighbour imputation takes, here and in scikit-learn, on the same incomplete images.

    python benchmarks/knn.py [--out results/bench/knn.json]

Prints a table and writes it as JSON with the commit, the versions and the settings it belongs to.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import sklearn
import torch
from sklearn.impute import KNNImputer
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]
from torch import Tensor

import misconv
from misconv import impute, missing, store
from misconv._store import commit

SETTINGS = {"fitted": 5000, "queries": 1000, "size": 28, "fraction": 1 / 4, "neighbours": 5, "rank": 20, "seed": 0}


def main() -> None:
    """Check that the results are equal, then measure, with one thread and with all."""
    options = arguments()
    x, observed, y, y_observed = incomplete_images(SETTINGS, torch.float64)
    rows, query_rows = table(x, observed), table(y, y_observed)
    images = [t.to(options.device) for t in (x, observed, y, y_observed)]
    runs: dict[str, Callable[[], Any]] = {
        "misconv": lambda: ours(*images),
        "scikit-learn": lambda: KNNImputer(n_neighbors=int(SETTINGS["neighbours"])).fit(rows).transform(query_rows),
    }
    difference = float(np.abs(runs["misconv"]().flatten(1).cpu().numpy() - runs["scikit-learn"]()).max())
    if difference > 1e-9:
        raise SystemExit(f"the results differ by up to {difference}: there is nothing to compare")
    print(f"the results differ by at most {difference:.1e}")
    measured = [measure(runs, options.repeats, threads, options.device) for threads in options.threads]
    result = {
        "benchmark": "k-nearest-neighbour imputation, fit and fill",
        "settings": SETTINGS | {"repeats": options.repeats, "dtype": "float64"},
        "max_abs_difference": difference,
        "measured": measured,
        **circumstances(options.device),
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    store.write_bytes(options.out, (json.dumps(result, indent=2) + "\n").encode())


def arguments() -> argparse.Namespace:
    """What to run on, how often, and where the result goes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parents[1] / "results" / "bench" / "knn.json")
    parser.add_argument("--device", default="cpu", help="of misconv; scikit-learn knows the CPU alone")
    parser.add_argument("--threads", type=int, nargs="+", default=sorted({1, torch.get_num_threads()}))
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


def incomplete_images(settings: dict[str, Any], dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Fitted images and queries, each with one square missing: a few smooth patterns mixed at random, and noise."""
    generator = torch.Generator().manual_seed(settings["seed"])
    total, size, rank = settings["fitted"] + settings["queries"], settings["size"], settings["rank"]
    patterns = torch.randn(rank, 1, size, size, generator=generator, dtype=dtype)
    patterns = torch.nn.functional.avg_pool2d(patterns, 5, stride=1, padding=2).flatten(1)
    mixed = torch.randn(total, rank, generator=generator, dtype=dtype) @ patterns
    noise = 0.1 * torch.randn(mixed.shape, generator=generator, dtype=dtype)
    x = (mixed + noise).view(total, 1, size, size)
    observed = missing.square(total, size, size, fraction=settings["fraction"], generator=generator)
    fitted = settings["fitted"]
    return x[:fitted], observed[:fitted], x[fitted:], observed[fitted:]


def table(x: Tensor, observed: Tensor) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Rows of pixels, NaN where missing."""
    rows: np.ndarray[Any, np.dtype[np.float64]] = torch.where(observed, x, torch.nan).flatten(1).numpy()
    return rows


def ours(x: Tensor, observed: Tensor, y: Tensor, y_observed: Tensor) -> Tensor:
    """The filled queries."""
    filled: Tensor = impute.KNN(int(SETTINGS["neighbours"])).fit(x, observed)(y, y_observed)
    return filled


def measure(runs: dict[str, Callable[[], Any]], repeats: int, threads: int, device: str) -> dict[str, Any]:
    """Median and spread of every run; they take turns, so that whatever else the machine does meets them alike."""
    seconds: dict[str, list[float]] = {name: [] for name in runs}
    torch.set_num_threads(threads)
    with threadpool_limits(threads, "blas"):
        runs["misconv"]()  # the first one with so many threads
        for name, run in [*runs.items()] * repeats:
            start = time.perf_counter()
            run()
            if device.startswith("cuda"):
                torch.cuda.synchronize()
            seconds[name].append(time.perf_counter() - start)
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    for name, taken in seconds.items():
        print(f"{threads} threads, {name:14} {median[name]:8.3f} s   ({min(taken):.3f} to {max(taken):.3f})")
    ratio = median["scikit-learn"] / median["misconv"]
    print(f"{threads} threads, {ratio:.1f} times as fast")
    times = {name: {"median_s": median[name], "min_s": min(t), "max_s": max(t)} for name, t in seconds.items()}
    return {"threads": threads, "times": times, "ratio": ratio, "load_average": os.getloadavg()[0]}


def circumstances(device: str) -> dict[str, Any]:
    """Where the numbers come from."""
    return {
        "commit": commit(),
        "versions": {
            "misconv": misconv.__version__,
            "numpy": np.__version__,
            "python": platform.python_version(),
            "scikit-learn": sklearn.__version__,
            "torch": torch.__version__,
        },
        "device": torch.cuda.get_device_name(device) if device.startswith("cuda") else f"cpu ({platform.machine()})",
        "cores": os.cpu_count(),
    }


if __name__ == "__main__":
    main()
