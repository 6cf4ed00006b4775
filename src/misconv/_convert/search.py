"""Finding the stem of a network: run it once on random images and see who reads what."""

from __future__ import annotations

import gc
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from misconv._convert.follow import answer
from misconv._convert.image import Image
from misconv._convert.stem import Response, Stem, build_activation
from misconv._convert.tracker import Read, Record, Tracker
from misconv._torch import pytree
from misconv.mfa import MFA

__all__ = ["Search", "find"]


class Search:
    """Runs a network on images and records who reads them, and the responses of convolution and normalization."""

    def __init__(self, image: Tensor) -> None:
        self.tracker = Tracker(answer, MFA.point(image))
        self.inputs: dict[str, Record | None] = {}
        self.convolutions: list[str] = []  # that have run

    def run(self, network: nn.Module) -> None:
        """Let the network run."""
        handles = self._watch(network)
        try:
            with self.tracker.following():
                result = network(self.tracker.start())
        finally:
            for handle in handles:
                handle.remove()
        for leaf in pytree.tree_leaves(as_tree(result)):
            record = self.tracker.record(leaf)
            if record is not None:
                self.tracker.log.append(Read(record, "return", "other", ""))

    def _watch(self, network: nn.Module) -> list[Any]:
        """Know at every moment which module is running; returns the handles that end it."""
        handles = []
        for name, module in network.named_modules():
            if isinstance(module, torch.jit.ScriptModule):
                continue  # what runs inside is seen by nobody

            def enter(module: nn.Module, args: tuple[Any, ...], name: str = name) -> None:
                self.tracker.where.append(name)
                if isinstance(module, nn.Conv2d):
                    self.convolutions.append(name)
                self.inputs[name] = self.tracker.record(args[0]) if args else None

            def leave(_: nn.Module, args: tuple[Any, ...], result: Any) -> None:
                self.tracker.where.pop()

            handles += [module.register_forward_pre_hook(enter), module.register_forward_hook(leave)]
        return handles

    def of(self, record: Record | None) -> list[Read]:
        """Who read what stands for this."""
        return [read for read in self.tracker.log if read.source is record]

    def kept(self, records: list[Record]) -> bool:
        """Whether the network still holds a tensor that stands for one of these."""

        def held() -> bool:
            tensors = [reference() for reference in self.tracker.stand_ins]
            return any(self.tracker.record(tensor) in records for tensor in tensors if tensor is not None)

        if held():
            gc.collect()  # a cycle of objects may keep it for a while
        return held()


def as_tree(result: Any) -> Any:
    """Results of classes that torch's trees do not know, as dictionaries."""
    return dict(vars(result)) if hasattr(result, "__dict__") and not isinstance(result, (Tensor, dict)) else result


def find(model: nn.Module, search: Search, names: tuple[str, ...]) -> tuple[Stem, nn.Module | None, list[str]]:
    """The stem in what `search` has seen, its activation where that is a function, and who else reads the image.

    `names` are the parts the user has named, if any.
    """
    start, others = _first_convolution(search)
    if names and start.where != names[0]:
        raise ValueError(f"stem must begin with the convolution that reads the image, {start.where!r}, got {names!r}")
    reads = [read for read in search.tracker.log if read.kind == "convolution"]
    stem = Stem(start.where, calls=len(reads), selections=tuple(search.tracker.selections))
    stem, activation, passed = _after(model, search, start, names, stem)
    return replace(stem, kept=search.kept(passed)), activation, others


def _after(
    model: nn.Module, search: Search, start: Read, names: tuple[str, ...], stem: Stem
) -> tuple[Stem, nn.Module | None, list[Record]]:
    """What follows the convolution: the stem, its activation, and the responses that it passes."""
    wanted = [name for name in names[1:] if name]
    named = next((name for name in wanted if not _is_norm(model.get_submodule(name))), None)
    passed: list[Record] = []
    current, norm, arithmetic = start.result, None, None
    while True:
        assert isinstance(current, Response)
        passed.append(current)
        if named is not None and search.inputs.get(named) is current:
            readers = [read for read in search.of(current) if not f"{read.where}.".startswith(f"{named}.")]
            _check_single(readers, start, 0)
            steps = current.steps
            return replace(stem, norm=norm or arithmetic, activation=named, named=True, steps=steps), None, passed
        readers = search.of(current)
        follow = _followers(search, readers, names, wanted)
        if follow is None:
            break
        _check_single(readers, start, 1)
        if follow.kind == "activation":
            label, module = _activation(model, follow)
            found = replace(stem, norm=norm or arithmetic, activation=label, function=follow.name, steps=current.steps)
            return found, module, passed
        if follow.kind == "norm":
            norm = norm or follow.where
        else:
            arithmetic = arithmetic or (follow.where if follow.where not in ("", start.where) else None)
        assert isinstance(follow.result, Response)
        current = follow.result
    missing = [name for name in wanted if name not in (norm, arithmetic)]
    if missing:
        raise ValueError(
            f"stem must name parts that follow each other, but {missing[0]!r} does not receive what "
            f"{norm or start.where!r} returns; got {names!r}"
        )
    return replace(stem, norm=norm or arithmetic, steps=current.steps), None, passed[:-1]


def _followers(search: Search, readers: list[Read], names: tuple[str, ...], wanted: list[str]) -> Read | None:
    """The reader of a response that is the next part of the stem."""
    follow = [read for read in readers if read.kind in ("norm", "affine", "activation")]
    if names:
        follow = [read for read in follow if read.kind != "activation" and read.where in wanted]
    if not follow:
        return None
    # Arithmetic counts where an activation comes of it alone; an activation written out as a formula is linear to us.
    if follow[0].kind == "affine" and not names and (len(readers) > 1 or not _leads_on(search, follow[0])):
        return None
    return follow[0]


def _first_convolution(search: Search) -> tuple[Read, list[str]]:
    """The first convolution that receives the image; and what else reads the image."""
    reads = [read for read in search.tracker.log if isinstance(read.source, Image)]
    start = next((read for read in reads if read.kind == "convolution"), None)
    others = [read for read in reads if read is not start and read.kind in ("other", "convolution", "spoiled")]
    spoiled = next((read for read in others if read.kind == "spoiled"), None)
    if start is not None and (spoiled is None or reads.index(start) < reads.index(spoiled)):
        return start, [str(read) for read in others]
    culprit = spoiled.reason if spoiled is not None else _culprit(others)
    where = spoiled.where if spoiled is not None else next(iter(search.convolutions), None)
    if where is None:
        raise ValueError(
            "model must hold a convolution that runs, but none was called as torch.nn.functional.conv2d; convert works "
            "on networks whose first layer is a torch.nn.Conv2d"
        )
    raise ValueError(
        f"model must hand the image to its first convolution, {where!r}, as it is or with arithmetic per channel, but "
        f"{culprit} changes it before; do that to the images before they enter the network (normalise values, not "
        "holes) and convert the rest"
    )


def _culprit(others: list[Read]) -> str:
    if not others:
        return "something that torch functions do not show"
    likely = next((read for read in others if read.makes_image), others[0])
    return f"{likely} ({likely.reason})" if likely.reason else str(likely)


def _check_single(readers: list[Read], start: Read, allowed: int) -> None:
    if len(readers) > allowed:
        who = ", ".join(str(read) for read in readers)
        raise ValueError(
            f"model must read what lies between the convolution {start.where!r} and its activation only once, but it "
            f"is read by {who}, and an expectation cannot stand for both; pass stem={start.where!r} to take the "
            "expected response of the convolution alone, which equals imputing the mean"
        )


def _leads_on(search: Search, read: Read) -> bool:
    """Whether an activation or a normalization comes out at the end of arithmetic; if not, the mean does as well."""
    after = search.of(read.result)
    return any(r.kind in ("activation", "norm") or (r.kind == "affine" and _leads_on(search, r)) for r in after)


def _activation(model: nn.Module, read: Read) -> tuple[str, nn.Module | None]:
    """How to call the activation, and its module; None where it has parameters of its own."""
    owner = model.get_submodule(read.where)
    module = build_activation(read.name, read.args, read.kwargs or {})
    if module is None:
        raise ValueError(f"model must call the activation of its stem with its usual arguments, got {read}")
    leaf = not list(owner.children()) and read.where and (read.name == "prelu" or not list(owner.parameters()))
    label = read.where if leaf else f"{read.name}() in {read.where or 'forward'}"
    return label, None if read.name == "prelu" else module


def _is_norm(module: nn.Module) -> bool:
    return isinstance(module, nn.modules.batchnorm._BatchNorm) or "BatchNorm" in type(module).__name__
