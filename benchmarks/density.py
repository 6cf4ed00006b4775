"""Can densities be believed? Train them on incomplete images, and test them on what was never seen.

    python benchmarks/density.py photos32 --augment --out results/density/photos32.json
    python benchmarks/density.py cifar10 --data cifar10.npz --steps 5000 --out results/density/cifar10.json

Densities of several components and ranks are trained side by side on images of which one fixed region is missing, of
one shape, or ("mixed") of a square, a trapezoid, noise or stripes, whichever comes up. Of the test images, which are
complete, each kind of region is hidden, free forms too, which no density learned. Beside them stand fills that learn
nothing: nearest pixel, push–pull, and, where scikit-image and OpenCV are installed, biharmonic, Telea's and
Navier–Stokes inpainting.

Data: `photos32`, `photos64` (crops of scikit-learn's photographs, of their left halves to learn from and of their right
halves for the test), `depth` (synthetic depth maps), `scene` (crops of one synthetic scene of 6 bands); others from an
.npz file with uint8 arrays x_train and x_test (N, H, W) or (N, H, W, C).
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from misconv import MFA, UNetDMFA, missing
from misconv._assess import Scores
from misconv._store import commit, device_name, versions
from misconv._train import Budget, Job, density_job, one_device, train, warm_up_cosine
from misconv.functional import expected_conv2d
from misconv.impute import nearest, push_pull

# What is hidden, and how much of the image; of these free forms are never learned …
USUAL = {"square": 1 / 4, "trapezoid": 1 / 2, "noise": 3 / 4, "stripes": 1 / 4, "free_form": 1 / 4}
# … but for a scene, where they are clouds. A depth camera has dead pixels.
SPECIAL = {"depth": {"noise": 2 / 5}, "scene": {"stripes": 1 / 4, "free_form": 1 / 4}}
GRID = [(components, rank) for components in (1, 3) for rank in (0, 4, 8)]


def main() -> None:
    """Read the command line, train and test, write JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("dataset")
    parser.add_argument("--data", type=Path)
    parser.add_argument("--learn", nargs="+", choices=["mixed", *USUAL], default=["mixed"])
    parser.add_argument("--steps", type=int, default=3000)
    parser.add_argument("--minutes", type=float, help="instead of steps, for all densities side by side")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--patch", type=int, default=2)
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 48, 64, 96, 96])
    parser.add_argument("--depths", type=int, nargs="+", default=[1, 1, 2, 2, 2])
    parser.add_argument("--objective", default="joint+marginal+moments", help="of fit_density")
    parser.add_argument("--augment", action="store_true", help="mirror and move, for few images")
    parser.add_argument(
        "--grid", nargs="+", default=[f"{components}x{rank}" for components, rank in GRID], help="components x rank"
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--limit", type=int, default=10_000, help="test images")
    parser.add_argument(
        "--only", choices=["densities", "fills"],
        help="a part; the other stays as it is in --out, and so do densities that are not in the grid",
    )  # fmt: skip
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    images, test = load(options.dataset, options.data)
    test = test[: options.limit]
    record: dict[str, Any] = {}
    if options.only is not None and options.out.exists():
        record = json.loads(options.out.read_text(encoding="utf-8"))
    device, shapes = torch.device(options.device), SPECIAL.get(options.dataset, USUAL)
    settings = {name: str(value) if isinstance(value, Path) else value for name, value in vars(options).items()}
    about = {"settings": settings, "commit": commit(), "versions": versions(device), "device": device_name(device)}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    if options.only != "fills":
        runs = [*record.get("runs", []), about]
        replaced = {(learned, entry) for learned in options.learn for entry in options.grid}
        rows = [row for row in record.get("rows", []) if (row["learned"], named(row)) not in replaced]
        record |= {"runs": runs, "rows": rows}
        for learned in options.learn:
            for row in train_and_test(learned, images, test, options):
                rows.append({**row, "run": len(runs) - 1})
                write(options.out, record)  # so that a run that is cut off leaves what it has
    if options.only != "densities":
        fills = {}
        for shape in shapes:
            fills[shape] = classical(test[:200], region(shape, test, shapes, seed=2)[:200])
            print(shape, fills[shape], flush=True)
        record |= {"fills": fills} if options.only is None else {"fills": fills, "fills_made_by": about}
    write(options.out, record)


def named(row: dict[str, Any]) -> str:
    """A density as an entry of the grid."""
    return f"{row['components']}x{row['rank']}"


def write(path: Path, record: dict[str, Any]) -> None:
    """As JSON."""
    path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def train_and_test(learned: str, images: Tensor, test: Tensor, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All densities of the grid, side by side, on images of which such a region is missing; figures for every shape."""
    shapes = SPECIAL.get(options.dataset, USUAL)
    observed = region(learned, images, shapes, seed=1)
    fabric = one_device(options.device)
    grid = [tuple(map(int, entry.split("x"))) for entry in options.grid]
    jobs = [job(k, rank, images, observed, fabric, options) for k, rank in grid]
    began = time.perf_counter()
    by_time = options.minutes is not None
    budget = Budget(minutes=options.minutes) if by_time else Budget(steps=options.steps)
    histories = train(jobs, fabric, budget=budget, progress=False)
    seconds = (time.perf_counter() - began) / len(jobs)
    for (components, rank), trained, history in zip(grid, jobs, histories, strict=True):
        density = trained.module.to(options.device).eval()
        assert isinstance(density, UNetDMFA)
        for shape in shapes:
            found = measure(density, test, region(shape, test, shapes, seed=2), options.device)
            row: dict[str, Any] = {
                "learned": learned,
                "tested": shape,
                "components": components,
                "rank": rank,
                "seconds": seconds,
            }
            row["steps"] = history[-1]["step"]
            row |= found
            print({k: v for k, v in row.items() if not isinstance(v, list)}, flush=True)
            yield row


def job(components: int, rank: int, images: Tensor, observed: Tensor, fabric: Any, options: argparse.Namespace) -> Job:
    """The training of one density, by the recipe of `misconv.fit_density`."""
    torch.manual_seed(0)
    sizes = {"widths": tuple(options.widths), "depths": tuple(options.depths), "patch": options.patch}
    density = UNetDMFA(images.shape[1], components, rank, **sizes)
    made = density_job(
        density, images, observed, fabric, batch_size=options.batch_size, learning_rate=0.0,
        objective=options.objective, shape=missing.like(observed), augment=options.augment,
        validation=min(0.1, 2000 / len(images)), clip=1.0, divisor=255,
    )  # fmt: skip
    made.schedule, made.betas = warm_up_cosine(2e-3), (0.9, 0.99)
    return made


@torch.no_grad()
def measure(density: UNetDMFA, test: Tensor, shown: Tensor, device: str) -> dict[str, Any]:
    """What is hidden of complete images, against what the density says of it; and whether it keeps its bounds."""
    scores, images = Scores(), 0
    errors, beyond = torch.zeros(2, dtype=torch.float64), -math.inf
    for x, less in batches(test, shown, device):
        p = density(x, less)
        scores.add(p, x, torch.ones_like(less), less)
        errors += responses(p, x, density.center).cpu()
        beyond = max(beyond, out_of_bounds(p, density))
        images += len(x)
    found = scores.means()
    figures = {
        **found, "ratio": found["deviation"] / found["rmse"], "nll_image": scores.nll / images,
        "layer": math.sqrt(errors[0] / errors[1]), "out_of_bounds": beyond,
    }  # fmt: skip
    curve = [[level, round(share, 4)] for level, share in scores.calibration()]
    return {name: float(f"{value:.5g}") for name, value in figures.items()} | {"calibration": curve}


def responses(p: MFA, x: Tensor, center: Tensor) -> Tensor:
    """Squared errors of the expected responses of random filters with ReLU, and of those to the mean image."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(32, x.shape[1], 3, 3, generator=generator).to(x) / math.sqrt(9 * x.shape[1])
    moved = MFA(p.logits, p.means - center, p.factors, p.noise, p.observed, check=False)
    truth = torch.relu(F.conv2d(x - center, weight))
    filled = torch.relu(F.conv2d(moved.mean, weight))
    return torch.stack([(y - truth).square().sum() for y in (expected_conv2d(moved, weight), filled)]).double()


def out_of_bounds(p: MFA, density: UNetDMFA) -> float:
    """The farthest that a mean or a variance lies beyond its bound, as a share of the range; below 0 if none does."""
    assert density.low is not None
    assert density.high is not None
    span = density.high - density.low
    mean, variance = p.mean, p.variance
    most = (mean - density.low) * (density.high - mean)
    beyond = [(density.low - mean) / span, (mean - density.high) / span, (variance - most) / span.square()]
    hidden = torch.ones_like(mean, dtype=torch.bool) if p.observed is None else ~p.observed.expand(mean.shape)
    return max(float(b[hidden].max()) for b in beyond)


def classical(test: Tensor, shown: Tensor) -> dict[str, float]:
    """RMSE of inpainting that learns nothing."""
    x, hidden = test.float() / 255 if test.dtype == torch.uint8 else test, (~shown).expand(test.shape)
    # Push–pull too: these are fewer images than the densities were tested on, and so others can be compared with it.
    fills: dict[str, Callable[[Tensor, Tensor], Tensor]] = {"nearest": nearest, "push_pull": push_pull}
    if find_spec("skimage") is not None:
        fills["biharmonic"] = biharmonic
    if find_spec("cv2") is not None and x.shape[1] in (1, 3):
        fills |= {
            "telea": lambda x, o: opencv(x, o, "INPAINT_TELEA"),
            "navier_stokes": lambda x, o: opencv(x, o, "INPAINT_NS"),
        }
    errors = {name: float((fill(x, shown) - x)[hidden].square().mean().sqrt()) for name, fill in fills.items()}
    return {name: float(f"{error:.5g}") for name, error in errors.items()}


def biharmonic(x: Tensor, shown: Tensor) -> Tensor:
    """scikit-image's."""
    from skimage.restoration import inpaint_biharmonic  # type: ignore[import-not-found, unused-ignore]

    pairs = zip(x.permute(0, 2, 3, 1).numpy(), (~shown)[:, 0].numpy(), strict=True)
    filled = [inpaint_biharmonic(image, hole, channel_axis=-1) for image, hole in pairs]
    return torch.tensor(np.stack(filled)).permute(0, 3, 1, 2).to(x.dtype)


def opencv(x: Tensor, shown: Tensor, method: str) -> Tensor:
    """OpenCV's, which takes bytes: of all that is seen the least becomes 0 and the largest 255."""
    import cv2  # type: ignore[import-not-found, unused-ignore]

    def fill(image: Any, hole: Any) -> Any:
        done = cv2.inpaint(image, hole, 3, getattr(cv2, method))
        return done[..., None] if done.ndim == 2 else done

    seen = x[shown.expand(x.shape)]
    low, span = seen.min(), seen.max() - seen.min()
    bytes_ = (255 * ((x - low) / span).clamp(0, 1)).round().byte()
    pairs = zip(bytes_.permute(0, 2, 3, 1).numpy(), (~shown)[:, 0].byte().numpy(), strict=True)
    filled = [fill(np.ascontiguousarray(image), np.ascontiguousarray(hole)) for image, hole in pairs]
    return low + span * torch.tensor(np.stack(filled)).permute(0, 3, 1, 2).to(x.dtype) / 255


# Data --------------------------------------------------------------------------------------------------------------


def region(shape: str, images: Tensor, shapes: dict[str, float], seed: int) -> Tensor:
    """`observed` (N, 1, H, W): regions of one shape, or, if it is "mixed", each of one that is learned."""
    generator, count = torch.Generator().manual_seed(seed), len(images)
    if shape == "mixed":
        learned = [name for name in shapes if shapes is not USUAL or name != "free_form"]
        every = torch.stack([region(name, images, shapes, seed) for name in learned])
        return every[torch.randint(len(learned), (count,), generator=generator), torch.arange(count)]
    draw = getattr(missing, shape)
    observed: Tensor = draw(count, *images.shape[2:], fraction=shapes[shape], generator=generator)
    return observed


def batches(test: Tensor, shown: Tensor, device: str, size: int = 500) -> Iterator[tuple[Tensor, Tensor]]:
    """As numbers from 0 to 1, on the device."""
    for x, less in zip(torch.split(test, size), torch.split(shown, size), strict=True):
        yield x.to(device).float() / (255 if x.dtype == torch.uint8 else 1), less.to(device)


def load(name: str, file: Path | None) -> tuple[Tensor, Tensor]:
    """Images to learn from and test images, (N, C, H, W)."""
    if file is not None:
        with np.load(file) as arrays:
            x, test = (torch.tensor(arrays[part]) for part in ("x_train", "x_test"))
        x, test = (t.unsqueeze(-1) if t.dim() == 3 else t for t in (x, test))
        return x.permute(0, 3, 1, 2).contiguous(), test.permute(0, 3, 1, 2).contiguous()
    if name in ("photos32", "photos64"):
        return photographs(int(name[-2:]), 3000, left=True), photographs(int(name[-2:]), 1000, left=False)
    if name == "depth":
        return depth(240, seed=0), depth(24, seed=1)
    if name == "scene":
        return scene(600, left=True), scene(100, left=False)
    raise SystemExit(f"{name} needs --data, an .npz file")


def photographs(side: int, count: int, *, left: bool) -> Tensor:
    """Crops of one half of scikit-learn's two photographs."""
    from sklearn.datasets import load_sample_images

    halves = []
    for image in load_sample_images().images:
        photograph = torch.tensor(image).permute(2, 0, 1)
        halves.append(photograph.tensor_split(2, dim=2)[0 if left else 1])
    return crops(halves, side, count, seed=int(left))


def crops(images: list[Tensor], side: int, count: int, seed: int) -> Tensor:
    """Squares from anywhere in some images (C, H, W), in turn."""
    generator, found = torch.Generator().manual_seed(seed), []
    for number in range(count):
        image = images[number % len(images)]
        y, x = (int(torch.randint(n - side, (), generator=generator)) for n in image.shape[1:])
        found.append(image[:, y : y + side, x : x + side])
    return torch.stack(found)


def depth(count: int, seed: int, side: int = 96) -> Tensor:
    """Depth maps: a floor that rises to a wall, with boxes and balls before it."""
    generator = torch.Generator().manual_seed(seed)
    rows, columns = torch.meshgrid(torch.arange(side) / side, torch.arange(side) / side, indexing="ij")
    maps = []
    for _ in range(count):
        u = torch.rand(4 + 8 * 5, generator=generator)
        depth = torch.minimum(4 + 2 * u[0] + u[1] * columns, 1 / (rows - 0.3 * u[2]).clamp_min(0.15))
        for box in u[4:].view(8, 5):
            y, x, radius, distance = box[0], box[1], 0.05 + 0.15 * box[2], 0.8 + 3 * box[3]
            squared = ((rows - y) ** 2 + (columns - x) ** 2) / radius**2
            inside = squared < 1 if box[4] < 0.5 else torch.maximum((rows - y).abs(), (columns - x).abs()) < radius
            surface = distance - radius * (1 - squared).clamp_min(0).sqrt() * (box[4] < 0.5)
            depth = torch.where(inside, torch.minimum(depth, surface), depth)
        maps.append(depth + 0.01 * torch.randn(depth.shape, generator=generator))
    return torch.stack(maps).unsqueeze(1)


def scene(count: int, *, left: bool, side: int = 64, size: int = 512) -> Tensor:
    """Crops of one half of a satellite scene: fields, a river, noise; six bands that depend on three."""
    generator = torch.Generator().manual_seed(7)
    rough = torch.zeros(1, 3, size, size)
    for level in (4, 8, 16, 32, 64, 128):
        noise = torch.randn(1, 3, level, level, generator=generator)
        rough += F.interpolate(noise, size=(size, size), mode="bicubic", align_corners=False) / level**0.6
    fields = F.interpolate(torch.randn(1, 3, 24, 24, generator=generator), size=(size, size), mode="nearest")
    bands = torch.einsum("oc,bchw->bohw", torch.randn(6, 3, generator=generator), rough + 0.3 * fields)
    bands = 0.25 + 0.05 * bands + 0.005 * torch.randn(bands.shape, generator=generator)
    half = bands[0].tensor_split(2, dim=2)[0 if left else 1]
    return crops([half], side, count, seed=int(left))


if __name__ == "__main__":
    main()
