"""The tables and figures of our own for `results.md`: block two of the page, which `tools/results.py` puts together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from misconv.paper import evidence, scores
from misconv.paper.scores import Record

__all__ = ["BLOCK_ONE", "BLOCK_TWO", "KINDS", "PICTURES", "sections"]

KINDS = {
    "A": "transfer",
    "B": "recipe",
    "C": "ingredient",
    "D": "coding",
    "E": "slanted",
    "F": "objective",
    "figure-A": "share",
}  # of their records
PICTURES = {
    "B": ("recipe.png", "Accuracy by one recipe"),
    "C": ("ingredients.png", "What ingredients are worth"),
    "figure-A": ("shares.png", "Accuracy by how much is missing"),
}
BLOCK_ONE = (
    "## Block one: the paper's settings\n\nNetworks, densities, epochs and learning rates are those of the paper and "
    "of its authors' code, but for three things: ACFlow is smaller and learns for 40 epochs (60 on CelebA), the "
    "autoencoders of SVHN and CelebA learn for fewer epochs, and the density of CIFAR-10 has the learning rates of "
    "SVHN's; Table F has it with those of the authors."
)
BLOCK_TWO = (
    "## Block two: one recipe for all\n\nEvery method is trained by one recipe: shifts (and flips on CIFAR-10), more "
    "hidden of every second image, a cosine schedule, the same batches and epochs. The density of MFA imputation, "
    "MisConv and sampled completions is one `UNetDMFA`, trained by `misconv.fit_density`'s objective and recipe on "
    "incomplete images alone. What differs between two rows is how missing pixels are treated; besides, supMIWAE has a "
    "learning rate of its own, and of GT's complete images nothing is hidden. All seeds of a run begin with the same "
    "trained density, so that p says nothing of how results differ from one density to another. Its objective names "
    "its terms, see [the maths](maths.md#density-networks). In today's recipe a copy of the density learns together "
    "with each of their classifiers in the last epochs (joint fine-tuning). Where the epochs below a table do not name "
    "it, its numbers were measured before, without it."
)
WORDS = {
    "B": "*mask, hiding more* hides regions anew in every epoch, as augmentations of frameworks do. *U-Net, splitting "
    "losses* fills images in; it learns by deepinv's `SplittingLoss` with its `Inpainting` physics. *supMIWAE* (Ipsen "
    "et al. 2022) trains a variational autoencoder and the classifier together. *sampled completions* trains on a "
    "fresh sample of the density every time, and averages probabilities over 16 at the test.",
    "C": "What changes when an ingredient is left out, or one more added; all rows are without joint fine-tuning but "
    "for those that name it. It was chosen for today's recipe because its validation accuracy was the highest of all "
    "additions. MFA imputation is given the same additions. "
    "*The deviation of the activation* joins its mean through a convolution of 1×1 that begins with zeros; *factors "
    "drawn*: those of the density are drawn and its noise is integrated out; *an averaged teacher* is a moving average "
    "of the network, whose answers to images with less hidden it learns, too.",
    "A": "No retraining: the networks are those of the row *GT*, and the density learns from the same complete images, "
    "of which it hides regions of all shapes. Missing: a square of 1/4 of the area, 3/4 of the pixels at random "
    "(noise), a trapezoid of 1/2, stripes of 1/2, or one of three channels. *samples averaged*: probabilities, over 16 "
    "samples of the density (`predictive` takes 32); *MisConv over draws of the factors*: the same over draws "
    "of its factors, with its noise integrated out.",
    "figure-A": "The networks of Table B, trained with a quarter missing, meet squares of other sizes. Bars: the "
    "standard deviation over seeds.",
    "D": "In the authors' code a region that is missing in training is coded −1 on SVHN and CIFAR-10, and in the test "
    "0. The mask channel then holds numbers in the test that it never held in training; partial convolution sees "
    "hidden pixels with their sign turned in training; an SMFA takes missing pixels for zeros that were seen. Trained "
    "that way, and coded right:",
    "E": "The published code lacks the paper's trapezoids. Ours of Table 9 lie anywhere, and hide far more of a digit "
    "than the paper's numbers suggest; here all of their sides are straight, which they were not there. Half of an "
    "image, on one side of a slanted cut through its centre, is a trapezoid, too, and leaves about as much to see as a "
    "missing square does. Its numbers are nearer to the printed ones, for all methods but PC; all of ours are higher. "
    "So the paper's regions were probably of that kind, and hid somewhat more. The printed number of PC fits neither; "
    "whether it has the cause that Table D shows on other data sets is not known.",
    "F": "The settings of block one, and the same with our objective of the density: the likelihood of each hidden "
    "pixel by itself, and the squared error of the mean, beside the joint likelihood. The authors' code trains the "
    "density of CIFAR-10 with a learning rate of 4e-5 and batches of 128; that of block one has SVHN's settings, 4e-4 "
    "for 10 epochs and 1e-4 for the rest, and batches of 64.",
}


LONGER = (
    "In these runs joint fine-tuning came on top of the usual epochs, so that a part of what it gains may be due to "
    "the longer training; the recipe now takes it out of them."
)


def is_longer(records: Sequence[Record]) -> bool:
    """Whether variants of Table C with joint fine-tuning had more epochs than others."""
    variants = [r for r in scores.of(records, kind=KINDS["C"]) if "epochs" in r]
    is_tuned = [bool(r.get("settings", {}).get("recipe", {}).get("tuned")) for r in variants]
    epochs_of = [(r["dataset"], r["epochs"]) for r in variants]
    tuned = {each for each, here in zip(epochs_of, is_tuned, strict=True) if here}
    plain = {each for each, here in zip(epochs_of, is_tuned, strict=True) if not here}
    return any(dataset == other and epochs > usual for dataset, epochs in tuned for other, usual in plain)


def sections(records: Sequence[Record], pictures: Mapping[str, bool]) -> list[str]:
    """All of block two; a table without records says so."""
    parts = [BLOCK_TWO]
    for letter, words in WORDS.items():
        made = evidence.make_letter(letter, records)
        parts += [f"## {made.heading}", f"{words} {LONGER}" if letter == "C" and is_longer(records) else words]
        if not scores.of(records, kind=KINDS[letter]):
            parts.append(f"Not measured yet: `misconv table {letter}`.")
            continue
        name, text = PICTURES.get(letter, ("", ""))
        parts += [f"![{text}](pictures/{name})"] if pictures.get(name) else []
        parts.append(made.markdown())
    return parts
