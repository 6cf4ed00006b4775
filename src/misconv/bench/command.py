"""How fast the layer is, against the convolution and ReLU it replaces: `misconv bench`.

Checks first that the fast path computes what the plain one does, then times everything side by side in one run. These
functions need torch alone, but for whole networks, which are torchvision's; the command line is `misconv.cli`.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any

import torch

from misconv._backend import is_plain
from misconv._conv import why_no_replays
from misconv._store import JsonObject, commit, device_name, versions
from misconv.bench.checks import BOUNDS, CASES, MODES, WrongResultError, check
from misconv.bench.clock import Pace, memory, times
from misconv.bench.layer import Contender, Kind, Layer, Setting, likelihood, normalized
from misconv.bench.network import MODELS, Networks, NetworkSetting, network_settings
from misconv.bench.record import Keeper, check_out, write
from misconv.bench.warm_up import Job, checks, compile_ahead

__all__ = ["KINDS", "QUICK", "SECTIONS", "Keeper", "WrongResultError", "choose", "run", "summary", "write"]

QUICK = "A quick run on tiny settings: its numbers mean nothing, it only shows that everything runs."

# Przewięźlikowski et al., "MisConv: Convolutional Neural Networks for Missing Data", WACV 2022, Table 10: seconds of a
# forward pass through a classical layer and through MisConv (L = 4), mean ± standard deviation of 5000 passes, on a
# GeForce GTX 1080 or RTX 2080 (the paper does not say which); by image size and batch.
PAPER = {
    (28, 16): (0.00016, 0.00006, 0.00092, 0.00030),
    (28, 32): (0.00017, 0.00006, 0.00097, 0.00041),
    (28, 64): (0.00020, 0.00008, 0.00138, 0.00061),
    (32, 16): (0.00022, 0.00012, 0.00109, 0.00039),
    (32, 32): (0.00037, 0.00020, 0.00111, 0.00046),
    (32, 64): (0.00034, 0.00016, 0.00121, 0.00047),
    (64, 16): (0.00034, 0.00017, 0.00091, 0.00025),
    (64, 32): (0.00031, 0.00012, 0.00115, 0.00037),
    (64, 64): (0.00029, 0.00008, 0.00109, 0.00029),
}
SHARES = (0.0, 0.05, 0.25, 0.5, 0.75, 1.0)
GROWTH: dict[str, list[Setting]] = {
    "size": [Setting(size=n) for n in (28, 64, 112, 224, 448)],
    "batch": [Setting(batch=n) for n in (1, 4, 16, 64, 256)],
    "share": [Setting(share=share) for share in SHARES],
    "components": [Setting(components=n) for n in (1, 2, 4, 8)],
    "rank": [Setting(rank=n) for n in (0, 1, 2, 4, 8, 16)],
}
LARGE = Setting(size=224, filters=64)
WIDE = replace(LARGE, kernel=7, stride=2, padding=3)
EAGER = ("conv", "misconv", "plain")
LONGER = 4  # times the seconds of a layer for whole networks, whose steps are long and vary with the host
PLAIN_MOST_BYTES = 40e9  # what the plain path may allocate; a row that needs more is left out
# The kinds of a row, and who takes part; conv_image is conv with the gradient of the images.
TRAINING: dict[Kind, tuple[str, ...]] = {"weights": EAGER, "everything": ("conv", "conv_image", "misconv", "plain")}

Row = JsonObject


# The sections ------------------------------------------------------------------------------------------------------


@dataclass
class Bench:
    """One run: where, how long, and what it has found."""

    generator: torch.Generator
    pace: Pace
    quick: bool
    say: Callable[[str], None]
    section: str = ""

    @property
    def device(self) -> torch.device:
        """Where everything runs."""
        return self.generator.device

    def layer(self, setting: Setting) -> Layer:
        """Weights and inputs for a setting, or for a tiny one like it."""
        if self.device.type == "cuda":
            torch.cuda.empty_cache()  # blocks that fitted the last setting would only be in the way
        return Layer(setting.tiny() if self.quick else setting, self.generator)

    def row(self, layer: Layer, kind: Kind, names: Sequence[str], peak: bool = False, **more: Any) -> Row:
        """Time the contenders of one setting side by side."""
        setting, skipped = layer.setting, {}
        if "plain" in names and (needed := setting.plain_bytes(kind)) > PLAIN_MOST_BYTES:
            skipped["plain"] = f"would allocate about {needed / 1e9:.0f} GB"
        contenders = {name: layer.contender(name, kind) for name in names if name not in skipped}
        return self.timed(setting, kind, contenders, peak, **({"skipped": skipped} if skipped else {}), **more)

    def timed(
        self, setting: Setting | NetworkSetting, kind: str, contenders: dict[str, Contender], peak: bool, **more: Any
    ) -> Row:
        """The times, peaks and ratios of these contenders."""
        longer = LONGER if isinstance(setting, NetworkSetting) else 1
        pace = replace(self.pace, seconds=longer * self.pace.seconds)
        row: Row = {"setting": asdict(setting), "kind": kind, "times": times(contenders, self.device, pace)}
        row["ratios"] = _ratios({name: t["median_us"] for name, t in row["times"].items()})
        if peak and self.device.type == "cuda":
            row["memory"] = {name: memory(contender, self.device) for name, contender in contenders.items()}
            row["memory_ratios"] = _ratios({name: m["added_mb"] for name, m in row["memory"].items()})
        self.say(_line(self.section, setting, {**row, **more}))
        return {**row, **more}


class Rehearsal(Bench):
    """A run in which nothing runs: it finds out what a run will launch."""

    def jobs(self, sections: Sequence[str]) -> list[Job]:
        """Every setting once, for all kinds; how much is missing changes no kernel."""
        self.found: dict[Setting, dict[Kind, None]] = {}
        for section in sections:
            if section not in ("norm", "nll", "network"):
                list(SECTIONS[section](self))
        return [Job(setting, tuple(kinds)) for setting, kinds in self.found.items()]

    def layer(self, setting: Setting) -> Any:
        """The setting alone."""
        return setting

    def row(self, layer: Any, kind: Kind, names: Sequence[str], peak: bool = False, **more: Any) -> Row:
        """Make a note of it."""
        self.found.setdefault(replace(layer, share=Setting.share), {})[kind] = None
        return {}


def table10(bench: Bench) -> Iterator[Row]:
    """The nine settings of the paper's Table 10, forward as there and forward and backward."""
    graphs = ("conv_graph", "misconv_graph") if bench.device.type == "cuda" else ()
    for (size, batch), (conv, conv_sd, ours, ours_sd) in PAPER.items():
        layer = bench.layer(Setting(batch, 1 if size == 28 else 3, size))
        paper = {"conv_s": conv, "conv_sd_s": conv_sd, "misconv_s": ours, "misconv_sd_s": ours_sd, "batch": batch}
        yield bench.row(layer, "forward", ("conv", "conv_inplace", *EAGER[1:], *graphs), paper={"size": size, **paper})
        for kind, names in TRAINING.items():
            yield bench.row(layer, kind, names, peak=True)


def large(bench: Bench) -> Iterator[Row]:
    """Photographs: 3×3 filters as in VGG, 7×7 with stride 2 as in ResNet."""
    for setting in (LARGE, WIDE):
        for components in (1, 3):
            layer = bench.layer(replace(setting, components=components))
            yield bench.row(layer, "forward", ("conv", "conv_inplace", *EAGER[1:]), peak=True)
            for kind, names in TRAINING.items():
                yield bench.row(layer, kind, names, peak=True)
            del layer


def shares(bench: Bench) -> Iterator[Row]:
    """How the time depends on how much is missing, for one and several components and ranks."""
    for setting in (Setting(), LARGE):
        for components in (1, 3):
            for rank in (4, 8):
                for share in SHARES:
                    layer = bench.layer(replace(setting, components=components, rank=rank, share=share))
                    yield bench.row(layer, "forward", ("conv", "misconv"))
                    yield bench.row(layer, "weights", ("conv", "misconv"))
                    yield bench.row(layer, "everything", ("conv", "conv_image", "misconv"))
                    del layer


def growth(bench: Bench) -> Iterator[Row]:
    """One number varied at a time around 64×3×64×64, 3×3→32, K = 1, L = 4, a quarter missing."""
    for name, settings in GROWTH.items():
        for setting in settings:
            layer = bench.layer(setting)
            yield bench.row(layer, "forward", EAGER, varied=name)
            yield bench.row(layer, "weights", EAGER, varied=name)
            del layer


def norm(bench: Bench) -> Iterator[Row]:
    """Convolution, BatchNorm and ReLU in training, forward and backward."""
    for setting in (LARGE, WIDE):
        layer = bench.layer(setting)
        yield bench.timed(layer.setting, "norm", {n: normalized(layer, n) for n in ("conv", "misconv")}, peak=True)
        del layer


def nll(bench: Bench) -> Iterator[Row]:
    """`MFA.log_prob` of the seen pixels, forward and backward, as a density is trained."""
    layer = bench.layer(Setting())
    yield bench.timed(layer.setting, "log_prob", {n: likelihood(layer, n) for n in ("misconv", "plain")}, peak=True)


def cpu(bench: Bench) -> Iterator[Row]:
    """A small and a large first layer on a CPU, by how much is missing."""
    for setting in (Setting(size=32), replace(WIDE, batch=8)):
        for share in SHARES:
            layer = bench.layer(replace(setting, share=share))
            yield bench.row(layer, "forward", EAGER)
            for kind, names in TRAINING.items():
                yield bench.row(layer, kind, names)


def network(bench: Bench) -> Iterator[Row]:
    """Whole networks of torchvision: as they are, converted with the MFA given, and converted with a `UNetDMFA`."""
    settings = network_settings(bench.device, MODELS[:1] if bench.quick else MODELS)
    for _, rows in groupby(settings, lambda s: (s.model, s.mode, s.batch)):
        group = [setting.tiny() if bench.quick else setting for setting in rows]
        if bench.device.type == "cuda":
            torch.cuda.empty_cache()
        networks = Networks(group[0], bench.generator)
        more = {"error": networks.check(), "density": networks.about_density()}
        for setting in group:
            contenders = networks.contenders(setting.task, setting.graph)
            yield bench.timed(setting, setting.task, contenders, peak=not setting.graph, **more)
            del contenders
        del networks


SECTIONS: dict[str, Callable[[Bench], Iterator[Row]]] = {
    function.__name__: function for function in (table10, large, norm, shares, growth, nll, network, cpu)
}
# What runs where nothing else is said; the large settings would keep a CPU busy for hours.
USUAL = {"cuda": ("table10", "large", "norm", "shares", "growth", "nll", "network"), "cpu": ("cpu", "nll")}


# A run -------------------------------------------------------------------------------------------------------------


def choose(device: str | None, only: Sequence[str], out: Path | None) -> tuple[torch.device, list[str]]:
    """The device and the sections that were asked for; a ValueError says what cannot be had, before any work."""
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device not in USUAL:
        raise ValueError(f"--device must be cuda or cpu, got {device!r}")
    if device == "cuda" and not torch.cuda.is_available():
        raise ValueError("--device cuda needs a GPU that torch can use, and there is none; --device cpu works anywhere")
    for name in only:
        if name not in SECTIONS:
            raise ValueError(f"--only must be one of {', '.join(SECTIONS)}, got {name!r}")
    has_networks = None not in map(find_spec, ("torchvision", "PIL"))  # which torchvision cannot do without
    if "network" in only and not has_networks:
        raise ValueError("--only network needs torchvision, from which its networks are: pip install 'misconv[vision]'")
    if out is not None:
        check_out(Path(out))
    if is_plain():
        raise ValueError("the plain path is forced (MISCONV_PLAIN?): there would be no fast path to compare with it")
    usual = [name for name in USUAL[device] if has_networks or name != "network"]
    return torch.device(device), list(dict.fromkeys(only)) or usual


def run(
    device: torch.device,
    sections: Sequence[str],
    *,
    quick: bool = False,
    seed: int | None = None,
    say: Callable[[str], None] = print,
    keep: Callable[[JsonObject], None] = lambda record: None,
) -> JsonObject:
    """Check, measure, and return the record; a `WrongResultError` before anything is timed if a check fails.

    `keep` gets the record after every row, so that a run which is stopped was not for nothing.
    """
    begin = time.perf_counter()
    if quick:  # before the numbers and after them: a reader may see one end alone
        say(QUICK)
    seed = int.from_bytes(os.urandom(3)) if seed is None else seed  # fresh inputs for every run, and recorded
    generator = torch.Generator(device).manual_seed(seed)
    record: JsonObject = {
        "benchmark": "the layer MisConv2d, beside the convolution and ReLU it replaces",
        "quick": quick,
        "warning": QUICK if quick else None,
        **_circumstances(device),
        "settings": {
            "seed": seed,
            "quick": quick,
            "dtype": "float32",
            "pace": asdict(pace := Pace(0.002, 2, 3, 0.0005, 3) if quick else Pace()),
            "networks_longer": LONGER,
            "bounds": BOUNDS,
        },
    }
    # Whole networks are checked where they are timed.
    cases = [] if set(sections) == {"network"} else [case.tiny() for case in CASES] if quick else CASES
    if device.type == "cuda":
        record["replays"] = why_no_replays() or True  # a user who trains has waited for that as well
    if device.type == "cuda" and not quick:
        compile_ahead([*checks(cases), *Rehearsal(generator, pace, quick, say).jobs(sections)], say)
    record["checks"] = check(cases, generator, say)
    bench = Bench(generator, pace, quick, say)
    record["sections"] = {}
    for bench.section in sections:
        measured = record["sections"][bench.section] = []
        for row in SECTIONS[bench.section](bench):
            measured.append(row)
            keep(record)
    record["seconds"] = time.perf_counter() - begin
    record["load_average_after"] = _load()
    for what, value in summary(record):
        say(f"{what}: {value}")
    if quick:
        say(QUICK)
    return record


def summary(record: JsonObject) -> list[tuple[str, str]]:
    """What to remember of a run: a sentence and a number or a range each."""
    found = []
    for mode, bound in BOUNDS.items():
        errors = [e for c in record["checks"] if c["mode"] == mode for e in c["errors"].values()]
        if errors:
            found.append((f"largest error against float64, {MODES[mode]}", f"{max(errors):.1e} (bound {bound:.0e})"))
    sections: dict[str, list[Row]] = record["sections"]
    groups = {"the paper's nine settings": sections.get("table10", [])}
    for section in ("large", "cpu"):
        for row in sections.get(section, []):
            name = str(Setting(**{**row["setting"], "share": 0})).removesuffix(" 0 %")
            groups.setdefault(f"{section}, {name}", []).append(row)
    for group, rows in groups.items():
        for kind, title in KINDS.items():
            chosen = [r for r in rows if r["kind"] == kind]
            for pair, words in PAIRS.items():
                found += _range(f"{group}, {title}: {words}", [r["ratios"].get(pair) for r in chosen])
            peaks = [r.get("memory_ratios", {}).get("misconv/conv") for r in chosen]
            found += _range(f"{group}, {title}: peak memory, {PAIRS['misconv/conv']}", peaks)
    for row in sections.get("norm", []):
        name = f"{Setting(**row['setting'])} with BatchNorm in training, forward and backward"
        found += _range(f"{name}: {PAIRS['misconv/conv']}", [row["ratios"]["misconv/conv"]])
        peak = row.get("memory_ratios", {}).get("misconv/conv")
        found += _range(f"{name}: peak memory, {PAIRS['misconv/conv']}", [peak])
    for row in sections.get("nll", []):
        found += _range(f"log_prob, forward and backward: {PAIRS['plain/misconv']}", [row["ratios"]["plain/misconv"]])
    for row in sections.get("network", []):
        for pair in ("network/given", "network/density"):
            found += _range(f"{NetworkSetting(**row['setting'])}: {PAIRS[pair]}", [row["ratios"][pair]])
    return found


KINDS: dict[Kind, str] = {
    "forward": "forward",
    "weights": "forward and backward (weight, bias)",
    "everything": "forward and backward (weight, bias and the density)",
}
PAIRS = {
    "misconv/conv": "MisConv / conv+ReLU",
    "misconv/conv_image": "MisConv / conv+ReLU with the gradient of the image",
    "misconv_graph/conv_graph": "MisConv / conv+ReLU in CUDA graphs",
    "plain/misconv": "plain PyTorch / MisConv",
    "network/given": "share of the network's speed, MFA given",
    "network/density": "share of the network's speed, with the density",
}
OTHERS = ("plain/conv", "misconv/conv_inplace", "given/network", "density/network")


# Inside ------------------------------------------------------------------------------------------------------------


def _ratios(values: dict[str, float]) -> dict[str, float]:
    """Whatever can be compared of these."""
    pairs = {pair: pair.split("/") for pair in (*PAIRS, *OTHERS)}
    return {pair: round(values[a] / values[b], 4) for pair, (a, b) in pairs.items() if a in values and values.get(b)}


def _range(what: str, values: Sequence[float | None]) -> list[tuple[str, str]]:
    known = sorted(v for v in values if v is not None)
    if not known:
        return []
    low, high = (f"{v:.2f}" for v in (known[0], known[-1]))
    return [(what, low if low == high else f"{low} to {high}")]


def _line(section: str, setting: Setting | NetworkSetting, row: Row) -> str:
    parts = [f"{name} {t['median_us']:.1f} µs" for name, t in row["times"].items()]
    parts += [f"{name} skipped, {why}" for name, why in row.get("skipped", {}).items()]
    parts += [f"{pair} {ratio:.2f}" for pair, ratio in row["ratios"].items()]
    parts += [f"{name} {m['added_mb']:.0f} MB" for name, m in row.get("memory", {}).items()]
    return f"{section}  {setting}  {row['kind']}:  {', '.join(parts)}"


def _circumstances(device: torch.device) -> JsonObject:
    """Where the numbers come from."""
    return {
        "commit": commit(),
        "versions": versions(device),
        "device": device_name(device),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load_average": _load(),
        # While timing, as torch has them by default; the checks set the first two themselves.
        "flags": {
            "cudnn.allow_tf32": torch.backends.cudnn.allow_tf32,
            "cuda.matmul.allow_tf32": torch.backends.cuda.matmul.allow_tf32,
            "cudnn.benchmark": torch.backends.cudnn.benchmark,
            "cudnn.deterministic": torch.backends.cudnn.deterministic,
        },
    }


def _load() -> float | None:
    """How busy the machine has been for a minute; Windows does not say."""
    return os.getloadavg()[0] if hasattr(os, "getloadavg") else None
