"""The numbers printed in Przewięźlikowski et al., "MisConv: Convolutional Neural Networks for Missing Data" (2022).

As they stand there, by the number of the table. The paper's "MisConv" is MisConv with DMFA. Table 10 stands beside the
measurements in `misconv.bench.command`.
"""

from __future__ import annotations

__all__ = [
    "CLASSIFIED",
    "TABLE1",
    "TABLE2",
    "TABLE3",
    "TABLE4",
    "TABLE5",
    "TABLE6",
    "TABLE7",
    "TABLE8",
    "TABLE9",
    "TITLES",
    "incomplete",
]

TITLES = {"mnist": "MNIST", "svhn": "SVHN", "cifar10": "CIFAR-10", "celeba": "CelebA"}
CLASSIFIED = ("mnist", "svhn", "cifar10")  # CelebA is for generation alone

# Section 4, "Classification accuracy when training and testing on incomplete images": data set, method.
TABLE1: dict[str, dict[str, float]] = {
    "mnist": {
        "zero": 0.910,
        "mask": 0.925,
        "knn": 0.875,
        "partial": 0.920,
        "acflow": 0.908,
        "misconv_dmfa": 0.931,
        "gt": 0.990,
    },
    "svhn": {
        "zero": 0.679,
        "mask": 0.493,
        "knn": 0.523,
        "partial": 0.376,
        "acflow": 0.666,
        "misconv_dmfa": 0.757,
        "gt": 0.889,
    },
    "cifar10": {
        "zero": 0.709,
        "mask": 0.563,
        "knn": 0.660,
        "partial": 0.522,
        "acflow": 0.671,
        "misconv_dmfa": 0.722,
        "gt": 0.811,
    },
}

# Section 4, "… when training on incomplete images and testing on complete images": data set, method.
TABLE2: dict[str, dict[str, float]] = {
    "mnist": {
        "zero": 0.984,
        "mask": 0.986,
        "knn": 0.957,
        "partial": 0.987,
        "acflow": 0.983,
        "misconv_dmfa": 0.986,
        "gt": 0.990,
    },
    "svhn": {
        "zero": 0.843,
        "mask": 0.827,
        "knn": 0.805,
        "partial": 0.759,
        "acflow": 0.845,
        "misconv_dmfa": 0.860,
        "gt": 0.889,
    },
    "cifar10": {
        "zero": 0.761,
        "mask": 0.752,
        "knn": 0.742,
        "partial": 0.731,
        "acflow": 0.746,
        "misconv_dmfa": 0.769,
        "gt": 0.811,
    },
}

# Section 4, generation and reconstruction: FID, SSIM and PSNR, by data set and method. MFA imputation is not printed.
_ROWS = ("zero", "mask", "knn", "partial", "acflow", "misconv_dmfa", "gt")


def _by_method(**columns: tuple[float, ...]) -> dict[str, dict[str, float]]:
    return {dataset: dict(zip(_ROWS, numbers, strict=True)) for dataset, numbers in columns.items()}


TABLE3 = _by_method(
    mnist=(9.72, 10.96, 9.46, 9.75, 9.08, 9.60, 6.45),
    svhn=(21.97, 24.36, 19.90, 22.61, 21.49, 19.53, 19.65),
    celeba=(56.62, 59.45, 61.48, 64.92, 59.04, 56.60, 51.75),
)
TABLE4 = _by_method(
    mnist=(0.696, 0.658, 0.770, 0.662, 0.628, 0.803, 0.944),
    svhn=(0.777, 0.775, 0.771, 0.774, 0.787, 0.792, 0.811),
    celeba=(0.795, 0.802, 0.798, 0.786, 0.805, 0.812, 0.832),
)
TABLE5 = _by_method(
    mnist=(15.05, 14.26, 16.01, 14.15, 14.91, 16.27, 21.48),
    svhn=(23.81, 23.64, 23.62, 23.74, 24.09, 24.25, 24.70),
    celeba=(22.74, 22.94, 22.74, 22.64, 23.14, 23.40, 24.02),
)

# Section 5, "Classification accuracy of MisConv using SMFA and DMFA": data set, method.
TABLE6: dict[str, dict[str, float]] = {
    "mnist": {"misconv_smfa": 0.922, "misconv_dmfa": 0.931},
    "svhn": {"misconv_smfa": 0.554, "misconv_dmfa": 0.757},
    "cifar10": {"misconv_smfa": 0.640, "misconv_dmfa": 0.722},
}

# Section 5, "Quality of SMFA and DMFA on SVHN dataset": data set, density, measure.
TABLE7: dict[str, dict[str, dict[str, float]]] = {
    "svhn": {
        "SMFA": {"nll": -1127.71, "mse": 5.81, "psnr": 26.90, "ssim": 0.86},
        "DMFA": {"nll": -1584.08, "mse": 5.34, "psnr": 30.14, "ssim": 0.94},
    },
}

# Section 5, "Comparing MisConv with MFA imputation in terms of classification accuracy": data set, method.
TABLE8: dict[str, dict[str, float]] = {
    "mnist": {"mfa": 0.923, "misconv_dmfa": 0.931},
    "svhn": {"mfa": 0.720, "misconv_dmfa": 0.757},
    "cifar10": {"mfa": 0.716, "misconv_dmfa": 0.722},
}

# Appendix B, "Classification accuracy when testing on various kinds of incomplete MNIST datasets": data set, shape,
# method. For the square, some numbers differ a little from Table 1: mask (.925 there), k-NN (.875) and GT (.990).
TABLE9: dict[str, dict[str, dict[str, float]]] = {
    "mnist": {
        "square": {
            "zero": 0.91,
            "mask": 0.926,
            "knn": 0.874,
            "partial": 0.920,
            "acflow": 0.908,
            "misconv_dmfa": 0.931,
            "gt": 0.992,
        },
        "trapezoid": {
            "zero": 0.891,
            "mask": 0.905,
            "knn": 0.854,
            "partial": 0.674,
            "acflow": 0.799,
            "misconv_dmfa": 0.918,
            "gt": 0.992,
        },
        "noise": {
            "zero": 0.946,
            "mask": 0.703,
            "knn": 0.912,
            "partial": 0.804,
            "acflow": 0.788,
            "misconv_dmfa": 0.966,
            "gt": 0.992,
        },
    },
}


def incomplete(dataset: str) -> dict[str, float]:
    """Accuracies on incomplete images, which stand in Tables 1, 6 and 8; empty for a data set of our own."""
    return TABLE1.get(dataset, {}) | TABLE6.get(dataset, {}) | TABLE8.get(dataset, {})
