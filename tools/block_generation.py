"""Tables 3, 4 and 5 for `results.md`, with what the printed numbers are; `tools/results.py` puts the page together."""

from __future__ import annotations

from collections.abc import Sequence

from misconv.paper.generation_tables import KINDS, NUMBERS, make_generation
from misconv.paper.scores import Record

__all__ = ["sections"]

WORDS = {
    3: "Wasserstein autoencoders learn from incomplete images: their error is measured at seen pixels alone, and only "
    "the first layer of the encoder knows what is missing. The distance is that between the complete test images and "
    "as many samples of the decoder. *Flow matching* has no decoder: a network learns to carry noise to images, given "
    "any of their pixels. In training a region of the seen pixels, or all of them, is hidden as well, and predicted "
    "from a noisy copy. What is missing is neither given nor scored. No incomplete image shows all of its pixels, so "
    "where whole images are drawn the network extrapolates.",
    4: "Structural similarity of the reconstruction of an incomplete test image and the complete image, all pixels "
    "of it.",
    5: "Peak signal-to-noise ratio of the same reconstructions, and of their hidden pixels alone.",
}
WHY = """\
Compare the methods with each other, and not our numbers with the printed ones, which cannot be met:

- A printed number is the best epoch of one run, chosen on the images it is tested on, for each measure by itself. In
  the authors' logs the FID of the best and of the last epoch differ by 4 to 14 on SVHN and by 4 to 24 on CelebA, more
  than most methods do. Our columns *best test epoch* are chosen in the same way; the others are not.
- The features differ. On MNIST the authors train a network for the features anew in every run; on SVHN and CelebA they
  take torchvision's Inception, on images in another range than it learned. Neither is the usual FID. Ours is one
  network for all methods and seeds of a data set.
- The SSIM of the paper has a uniform window and a range of 2, which makes it larger. Its column of MNIST is that of
  another model, an autoencoder without an adversary.
- On SVHN and CelebA the authors hide another region of a training image in every epoch, so that in the end the loss has
  seen every pixel. Here what is missing is missing for good.
- The printed GT sees complete images but is not told its errors at hidden pixels; ours is.
- The autoencoders of SVHN and CelebA learn for 10 and 15 epochs here, for 50 in the paper.
- CelebA-10k has 9,000 training images in place of 162,770, and other crops of them.
- MFA imputation is not printed. In the authors' logs it is ahead of MisConv on MNIST in all three measures, and behind
  on SVHN and CelebA."""


def sections(records: Sequence[Record]) -> list[str]:
    """The three tables; one without records says so."""
    parts = []
    for number in NUMBERS:
        made = make_generation(number, records)
        parts += [f"## {made.heading}", WORDS[number]]
        is_measured = any(record.get("kind") in KINDS for record in records)
        parts.append(made.markdown() if is_measured else f"Not measured yet: `misconv table {number} --dataset mnist`.")
        parts += [WHY] if number == NUMBERS[0] else []
    return parts
