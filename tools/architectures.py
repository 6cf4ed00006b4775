"""Convert many architectures and measure what came of it: `python tools/architectures.py`.

Writes every number to `results/architectures.json` and the table made of them to `docs/architectures.md`. Weights are
random, but batch normalizations get statistics as if they had been trained.
"""

from __future__ import annotations

import copy
import json
import platform
import time
import warnings
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import misconv
from misconv import MFA
from misconv._store import commit
from misconv.convert import Converted, convert

ROOT = Path(__file__).parents[1]
DOCS, RESULTS = ROOT / "docs", ROOT / "results"

SETTINGS: dict[str, Any] = {
    "seed": 0,
    "images": 2,
    "missing": "misconv.missing.square, fraction 1/4",
    "density": "misconv.ConvDMFA(channels=3, components=2, rank=2, widths=(8, 16), depths=(1, 1, 1)), as it begins",
    "completions": 500,
    "Monte Carlo": "8 images of 32×32 with random means, factors and noise; two components of rank 2",
    "dtype": "float32",
}

# (library, family, model, arguments, side of the images). Smallest variants; small images where the network takes them.
NO_BACKBONE = {"weights_backbone": None}
CASES: list[tuple[str, str, str, dict[str, Any], int]] = [
    ("torchvision", "AlexNet", "alexnet", {}, 96),
    ("torchvision", "VGG", "vgg11", {}, 64),
    ("torchvision", "VGG", "vgg11_bn", {}, 64),
    ("torchvision", "SqueezeNet", "squeezenet1_0", {}, 64),
    ("torchvision", "SqueezeNet", "squeezenet1_1", {}, 64),
    ("torchvision", "Inception v3", "inception_v3", {"init_weights": False, "transform_input": False}, 299),
    ("torchvision", "GoogLeNet", "googlenet", {"init_weights": False}, 96),
    ("torchvision", "ResNet", "resnet18", {}, 64),
    ("torchvision", "ResNet", "resnet50", {}, 64),
    ("torchvision", "ResNeXt", "resnext50_32x4d", {}, 64),
    ("torchvision", "Wide ResNet", "wide_resnet50_2", {}, 64),
    ("torchvision", "DenseNet", "densenet121", {}, 64),
    ("torchvision", "MobileNet v2", "mobilenet_v2", {}, 64),
    ("torchvision", "MobileNet v3", "mobilenet_v3_small", {}, 64),
    ("torchvision", "MNASNet", "mnasnet0_5", {}, 64),
    ("torchvision", "ShuffleNet v2", "shufflenet_v2_x0_5", {}, 64),
    ("torchvision", "EfficientNet", "efficientnet_b0", {}, 64),
    ("torchvision", "EfficientNet v2", "efficientnet_v2_s", {}, 64),
    ("torchvision", "RegNet", "regnet_x_400mf", {}, 64),
    ("torchvision", "RegNet", "regnet_y_400mf", {}, 64),
    ("torchvision", "ConvNeXt", "convnext_tiny", {}, 64),
    ("torchvision", "MaxViT", "maxvit_t", {}, 224),
    ("torchvision", "FCN", "fcn_resnet50", NO_BACKBONE, 64),
    ("torchvision", "DeepLab v3", "deeplabv3_mobilenet_v3_large", NO_BACKBONE, 64),
    ("torchvision", "LR-ASPP", "lraspp_mobilenet_v3_large", NO_BACKBONE, 64),
    ("torchvision", "(transformer) ViT", "vit_b_16", {}, 224),
    ("torchvision", "(transformer) Swin", "swin_t", {}, 64),
    ("torchvision", "(transformer) Swin v2", "swin_v2_t", {}, 64),
    ("torchvision", "(own preprocessing) GoogLeNet", "googlenet", {"init_weights": False, "transform_input": True}, 96),
    ("timm", "ResNet-D", "resnet18d", {}, 64),
    ("timm", "ResNet v2", "resnetv2_50", {}, 64),
    ("timm", "Big Transfer", "resnetv2_50x1_bit", {}, 64),
    ("timm", "NFNet", "dm_nfnet_f0", {}, 64),
    ("timm", "EfficientNet, TensorFlow padding", "tf_efficientnet_b0", {}, 64),
    ("timm", "EfficientNet-Lite", "efficientnet_lite0", {}, 64),
    ("timm", "MobileNet v3", "mobilenetv3_small_100", {}, 64),
    ("timm", "MobileNet v4", "mobilenetv4_conv_small", {}, 64),
    ("timm", "GhostNet", "ghostnet_050", {}, 64),
    ("timm", "HRNet", "hrnet_w18_small", {}, 64),
    ("timm", "DLA", "dla34", {}, 64),
    ("timm", "CSPDarknet", "cspdarknet53", {}, 64),
    ("timm", "RepVGG", "repvgg_a0", {}, 64),
    ("timm", "Xception", "xception41", {}, 64),
    ("timm", "ECA-ResNet", "ecaresnet26t", {}, 64),
    ("timm", "RegNet-Z", "regnetz_b16", {}, 64),
    ("timm", "VovNet", "ese_vovnet19b_dw", {}, 64),
    ("timm", "LeViT", "levit_128", {}, 224),
    ("timm", "EdgeNeXt", "edgenext_xx_small", {}, 64),
    ("timm", "ConvNeXt v2", "convnextv2_atto", {}, 64),
    ("timm", "PoolFormer", "poolformer_s12", {}, 64),
    ("timm", "ConvMixer", "convmixer_768_32", {}, 64),
    ("timm", "DeiT", "deit_tiny_patch16_224", {}, 224),
]


def build(library: str, name: str, arguments: dict[str, Any]) -> nn.Module:
    """The network with random weights, and batch normalizations that have seen something."""
    torch.manual_seed(SETTINGS["seed"])
    model: nn.Module
    if library == "torchvision":
        model = torchvision.models.get_model(name, weights=None, **arguments)
    else:
        model = timm.create_model(name, pretrained=False, **arguments)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d) and module.running_mean is not None and module.running_var is not None:
            module.running_mean.normal_(std=0.1)
            module.running_var.uniform_(0.5, 1.5)
        elif isinstance(module, nn.Dropout):
            module.p = 0.0  # so that two runs in training mode can be compared
        elif isinstance(module, nn.Linear) and not module.weight.any():
            nn.init.normal_(module.weight, std=0.02)  # a head that begins at zero would hide every difference
    return model


def small_density() -> nn.Module:
    """See the settings."""
    return misconv.ConvDMFA(channels=3, components=2, rank=2, widths=(8, 16), depths=(1, 1, 1))


def leaves(result: Any) -> list[Tensor]:
    """All tensors of a result."""
    return [leaf for leaf in pytree.tree_leaves(result) if isinstance(leaf, Tensor)]


def difference(ours: Any, theirs: Any) -> float:
    """The largest absolute difference of two results."""
    return max(float((a - b).abs().max()) for a, b in zip(leaves(ours), leaves(theirs), strict=True))


def stem_of(net: Converted, p: MFA) -> Tensor:
    """What the stem of a converted network hands to the rest."""
    _, outputs = net.run_stem(p)
    return outputs[-1][1]


def against_monte_carlo(net: Converted, side: int) -> dict[str, float]:
    """The expected activation against the mean over completions: relative error, and error over standard error."""
    torch.manual_seed(SETTINGS["seed"])
    net.eval()
    batch = 8 if side < 100 else 1
    shape = (batch, 2, 3, side, side)
    observed = misconv.missing.square(batch, side, side, fraction=1 / 4)
    factors, noise = 0.3 * torch.randn(batch, 2, 2, 3, side, side), 0.2 * torch.rand(shape)
    p = MFA(torch.zeros(batch, 2), torch.randn(shape), factors, noise)
    p = p.fix(torch.randn(batch, 3, side, side), observed)
    expected = stem_of(net, p).double()
    total, squares = torch.zeros_like(expected), torch.zeros_like(expected)
    chunk = 20
    for _ in range(SETTINGS["completions"] // chunk):
        values = stem_of(net, MFA.point(p.sample(chunk).flatten(0, 1))).double()
        values = values.view(chunk, batch, *values.shape[1:])
        total += values.sum(0)
        squares += values.square().sum(0)
    mean = total / SETTINGS["completions"]
    variance = (squares / SETTINGS["completions"] - mean.square()).clamp_min(0)
    error = (variance / SETTINGS["completions"]).sqrt()
    random = error > 1e-3 * error.max()  # events too rare for the sample have no standard error
    z = ((expected - mean) / error.clamp_min(1e-30))[random]
    return {
        "mean squared z": float(z.square().mean()),
        "relative error": float((expected - mean).norm() / mean.norm()),
        "relative standard error": float(error.norm() / mean.norm()),
    }


def measure(library: str, family: str, name: str, arguments: dict[str, Any], side: int) -> dict[str, Any]:
    """Everything about one architecture."""
    row: dict[str, Any] = {"library": library, "family": family, "model": name, "arguments": arguments, "side": side}
    model = build(library, name, arguments)
    start = time.perf_counter()
    try:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            net = convert(model, small_density(), train_density=True)
    except (ValueError, TypeError) as error:
        return row | {"converted": False, "reason": str(error)}
    row |= {
        "converted": True,
        "seconds": round(time.perf_counter() - start, 2),
        "stem": [net.stem.convolution, net.stem.norm, net.stem.activation],
        "kinds": kinds(net),
        "told": [str(item.message) for item in told if "linear" in str(item.message) or "image" in str(item.message)],
    }
    x = torch.rand(SETTINGS["images"], 3, side, side)
    observed = misconv.missing.square(len(x), side, side, fraction=1 / 4)
    coded = x.masked_fill(~observed, float("nan"))
    net.eval()
    model.eval()
    with torch.no_grad():
        row["difference, evaluation"] = difference(net(x), model(x))
    row["same names"] = list(net.network.state_dict()) == list(model.state_dict())
    row["finite"] = all(bool(leaf.isfinite().all()) for leaf in leaves(net(coded)))
    row["stem against Monte Carlo"] = at_some_size(net, side)
    net.train()
    model.train()
    row["difference, training, float32"] = in_training(net, model, x)
    row["difference, training, float64"] = in_training(
        copy.deepcopy(net).double(), copy.deepcopy(model).double(), x.double()
    )
    result = net(coded)
    sum(leaf.square().mean() for leaf in leaves(result) if leaf.is_floating_point()).backward()  # type: ignore[union-attr]
    row["finite gradients"] = all(p.grad is None or bool(p.grad.isfinite().all()) for p in net.parameters())
    assert net.density is not None
    row["gradient reaches the density"] = any(
        p.grad is not None and bool((p.grad != 0).any()) for p in net.density.parameters()
    )
    return row


def in_training(net: Converted, model: nn.Module, x: Tensor) -> float:
    """The difference in training mode, where both draw the same random numbers, relative to the largest output."""
    results = []
    for network in (copy.deepcopy(net), copy.deepcopy(model)):
        torch.manual_seed(1)
        with torch.no_grad():
            results.append(network(x))
    return difference(*results) / max(1.0, *(float(leaf.abs().max()) for leaf in leaves(results[1])))


def at_some_size(net: Converted, side: int) -> dict[str, float]:
    """At 32×32, or at the only size that the network takes."""
    with torch.no_grad():
        try:
            return against_monte_carlo(net, 32)
        except (AssertionError, RuntimeError):
            return against_monte_carlo(net, side)


def kinds(net: Converted) -> str:
    """The stem in words: Conv2d → BatchNorm2d → ReLU."""
    words = [type(net.network.get_submodule(net.stem.convolution)).__name__]
    if net.stem.norm is not None:
        words.append(type(net.network.get_submodule(net.stem.norm)).__name__)
    modules = dict(net.network.named_modules())
    activation = modules.get(net.stem.activation or "-", net._activation())
    return " → ".join([*words, *([] if activation is None else [type(activation).__name__])])


# Writing -----------------------------------------------------------------------------------------------------------


def markdown(record: dict[str, Any]) -> str:
    """The document."""
    rows = record["results"]
    ours = [row for row in rows if row["library"] == "torchvision" and not row["family"].startswith("(")]
    families = sorted({row["family"] for row in ours})
    good = [f for f in families if all(row["converted"] for row in ours if row["family"] == f)]
    converted = [row for row in rows if row["converted"]]
    worst = max(row["difference, evaluation"] for row in converted)
    chi = [row["stem against Monte Carlo"]["mean squared z"] for row in converted]
    lines = [
        "# Architectures that `misconv.convert` was tried on",
        "",
        "Generated by `python tools/architectures.py`; every number is in `results/architectures.json`.",
        "",
        f"- {len(converted)} of {len(rows)} architectures convert without `stem=`. Of torchvision's {len(families)} "
        f"convolutional families: {len(good)} ({100 * len(good) / len(families):.0f} %).",
        f"- Complete images, evaluation mode: the largest difference from the network as it was is {worst:g}.",
        f"- The stem's expected activation against {SETTINGS['completions']} completions: the mean of (error / "
        f"standard error)² lies between {min(chi):.2f} and {max(chi):.2f}; 1 means that nothing but Monte Carlo's "
        "noise is left (8 images; responses of one share completions, so it scatters).",
        f"- torch {record['torch']}, torchvision {record['torchvision']}, timm {record['timm']}, {record['device']}.",
        "",
        "*eval* and *train*: largest absolute difference on complete images, in evaluation and in training mode "
        "(float32; in training relative to the largest output or 1). *holes*: NaN in, finite numbers out. "
        "*gradients*: all finite, and they reach the density. *MC*: relative error of the stem against Monte Carlo / "
        "Monte Carlo's own standard error.",
        "",
        "| library | family | model | stem | eval | train | holes | gradients | MC, % |",
        "| :-- | :-- | :-- | :-- | --: | --: | :-- | :-- | --: |",
    ]
    for row in rows:
        lines.append("| " + " | ".join(cells(row)) + " |")
    linear = [row["model"] for row in converted if row["stem"][2] is None]
    refused = [f"- `{row['model']}` {row['arguments'] or ''}: {row['reason']}" for row in rows if not row["converted"]]
    lines += [
        "",
        f"No pointwise activation follows the convolution of {', '.join(linear)}: there the stem is linear and its "
        "expectation equals imputing the mean, which `convert` says.",
        "",
        "Refused:",
        "",
        *refused,
        "",
    ]
    return "\n".join(lines)


def cells(row: dict[str, Any]) -> list[str]:
    """One line of the table."""
    first = [row["library"], row["family"], f"`{row['model']}`"]
    if not row["converted"]:
        return [*first, "refused, see below", "", "", "", "", ""]
    mc = row["stem against Monte Carlo"]
    gradients = row["finite gradients"] and row["gradient reaches the density"]
    return [
        *first,
        f"{row['kinds']} (`{'`, `'.join(part for part in row['stem'] if part)}`)",
        f"{row['difference, evaluation']:.0e}" if row["difference, evaluation"] else "0",
        f"{row['difference, training, float32']:.0e}" if row["difference, training, float32"] else "0",
        "finite" if row["finite"] else "**not finite**",
        "yes" if gradients else "**no**",
        f"{100 * mc['relative error']:.2f} / {100 * mc['relative standard error']:.2f}",
    ]


def main() -> None:
    """Measure, then write the record and the document."""
    torch.set_num_threads(1)
    results = []
    for case in CASES:
        results.append(measure(*case))
        print(json.dumps(results[-1], ensure_ascii=False), flush=True)
    record = {
        "commit": commit(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "timm": timm.__version__,
        "device": f"cpu, {platform.machine()}, one thread",
        "settings": SETTINGS,
        "results": results,
    }
    (RESULTS / "architectures.json").write_text(
        json.dumps(record, indent=2, ensure_ascii=False) + "\n", encoding="utf-8"
    )
    (DOCS / "architectures.md").write_text(markdown(record), encoding="utf-8")


if __name__ == "__main__":
    main()
