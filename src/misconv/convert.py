"""Any network, one line: let it read images with missing pixels."""

from __future__ import annotations

import copy
import warnings
from contextlib import nullcontext
from dataclasses import replace
from typing import Any, Self

import torch
from torch import Tensor, nn

from misconv._backend import plain
from misconv._checks import (
    as_batch,
    channels_last,
    check_images,
    check_observed,
    check_seen_finite,
    describe,
    readable,
)
from misconv._convert import (
    Response,
    Search,
    Stem,
    SyncBatchNorm,
    Tracker,
    acceptable_image,
    answer,
    find,
    mark,
    prove,
    same_randomness,
)
from misconv._torch import first_of
from misconv.mfa import MFA

__all__ = ["Converted", "convert"]


def convert(
    model: nn.Module,
    density: nn.Module | None = None,
    *,
    stem: str | tuple[str, ...] | None = None,
    train_density: bool = False,
) -> Converted:
    """Make a network that reads images with missing pixels out of one that reads complete images.

    Its stem (the first convolution, the batch normalization and the activation behind it) then returns the expected
    activation over everything the missing pixels may be; the rest stays as it is. For complete images the result is
    the network's own, which is tried on random images before anything is returned. `model` itself is left as it was.

    The density is frozen: a loss of the network tells it nothing of missing pixels, and a fine-tuning of all of
    ``net.parameters()`` would make it forget what they may be. The network holds a copy of it, whose parameters require
    no gradient and which stays in evaluation mode when ``net.train()`` is called. The `density` that was passed is left
    as it was; training it later does not reach the copy, so train it first. Gradients of images go through it as ever.

    Args:
        model: any network whose first convolution receives the images, as they are or after arithmetic with a number
            per channel, padding or a choice of channels.
        density: any module (x, observed) → `MFA`; None where the converted network is always called with an MFA.
        stem: names of the convolution, the normalization and the activation as in ``model.named_modules()``, where
            they are not to be searched for: ``"conv1"`` or ``("conv1", "bn1", "act")``.
        train_density: train the density together with the network. Then `density` itself is in the network, not a copy,
            with the flags and the mode that it has.

    Example:
        >>> from misconv import ConvDMFA
        >>> model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.AdaptiveMaxPool2d(1))
        >>> net = convert(model, ConvDMFA(channels=3))
        >>> x = torch.rand(4, 3, 16, 16)
        >>> x[:, :, 4:9, 4:9] = float("nan")
        >>> net(x).shape
        torch.Size([4, 8, 1, 1])
        >>> print(net.stem)
        0 → 1 → 2
    """
    _check_model(model, density)
    if not isinstance(train_density, bool):
        raise TypeError(f"train_density must be True or False, got {describe(train_density)}")
    names = _check_names(model, stem)
    # An ordinary copy, wherever this is called.
    with torch.inference_mode(False), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # runs that nobody has asked for
        network = _copied(model)
        modes = [(module, module.training) for module in network.modules()]
        if not train_density:
            density = _copied_density(density)
        converted, others = _converted(network.eval(), density, names, train_density)
    for module, training in modes:
        module.training = training
    converted.training = model.training
    _tell(converted.stem, others, explicit=bool(names))
    return converted


def _converted(
    network: nn.Module, density: nn.Module | None, names: tuple[str, ...], train_density: bool
) -> tuple[Converted, list[str]]:
    """The network behind the density, and what reads the image besides its stem."""
    with same_randomness(network):
        image = acceptable_image(network, density)
        search = Search(image.clone())
        _follow_once(search, network)
        found, activation, others = find(network, search, names)
        if found.named:
            assert found.activation is not None
            mark(network.get_submodule(found.activation))
        converted = Converted(network, density, found, activation, image.shape[1], train_density)
        with plain() if image.is_cuda else nullcontext():  # fused kernels round otherwise, and have tests of their own
            prove(converted, image)
    return converted, others


class Converted(nn.Module):
    """A network behind a density: what `convert` returns.

    `network` is a copy of the user's network, with all its names; called directly with complete images it is that
    network. `density` says what missing pixels may be, and is frozen unless `train_density`. `stem` names the layers
    that were found.
    """

    def __init__(
        self,
        network: nn.Module,
        density: nn.Module | None,
        stem: Stem,
        activation: nn.Module | None,
        channels: int,
        train_density: bool = False,
    ) -> None:
        super().__init__()
        self.network = network
        self.density = density
        self.stem = stem
        self.activation = activation  # has no parameters; one that has stays in the network
        self.channels = channels
        self.train_density = train_density
        if isinstance(density, nn.Module) and not train_density:
            density.requires_grad_(False).eval()

    def train(self, mode: bool = True) -> Self:
        """Set the mode of the network; a frozen density stays in evaluation mode, for batch statistics would move."""
        super().train(mode)
        if isinstance(self.density, nn.Module) and not self.train_density:
            self.density.eval()
        return self

    def forward(self, x: Any, observed: Any = None, **kwargs: Any) -> Any:
        """What the network returns, expected over the missing pixels at its stem.

        Args:
            x: images (B, C, H, W) in which NaN marks missing pixels; or images and `observed`; or an MFA. Images may
                have any form that `misconv.observe` takes: one is a batch of one, integers get the type of the network.
            observed: bool (B, 1, H, W) or (B, C, H, W), True where the pixel was seen; of one image also without B.
            kwargs: passed on to the network.
        """
        return self._run(Tracker(answer, self.to_mfa(x, observed), self._stem_now(), self._activation()), kwargs)

    def _run(self, tracker: Tracker, kwargs: dict[str, Any]) -> Any:
        if tracker.table is None:
            result = self._modules["network"](tracker.start(), **kwargs)  # type: ignore[misc]  # never None
        else:
            with tracker.following():
                result = self.network(tracker.start(), **kwargs)
        if not tracker.finished:
            raise RuntimeError(
                f"the network did not run its stem {self.stem} as it did when it was converted; convert it again in "
                "the form it has now"
            )
        result = tracker.finish(result)
        if not self.stem.kept and not torch.is_grad_enabled() and tracker.keeps_response():
            warnings.warn(
                f"the network keeps what lies between the convolution {self.stem.convolution!r} and its activation, "
                "which holds NaN; convert the network with what keeps it (a hook, for example) in place",
                stacklevel=4,
            )
        return result

    def run_stem(self, p: MFA) -> tuple[Any, list[tuple[Response, Tensor]]]:
        """What the network returns for an MFA; and the response in its stem, with what becomes of it."""
        tracker = Tracker(answer, p, self._stem_now(), self._activation())
        tracker.outputs = []
        return self._run(tracker, {}), tracker.outputs

    def _stem_now(self) -> Stem:
        """The stem, with what has been done to its modules since the conversion."""
        if torch.compiler.is_compiling():
            return self.stem
        stem, network = self.stem, self._modules["network"]
        assert network is not None
        norm = None if stem.norm is None else _submodule(network, stem.norm)
        if type(norm) is nn.SyncBatchNorm:
            norm.__class__ = SyncBatchNorm  # ours can be followed
        if not stem.kept:
            for part in (_submodule(network, stem.convolution), norm):
                if part is not None and part is not network and part._forward_hooks:
                    return replace(stem, kept=True)
        return stem

    def to_mfa(self, x: Any, observed: Any = None) -> MFA:
        """The MFA of the arguments of `forward`."""
        if isinstance(x, MFA):
            if observed is not None:
                raise TypeError("observed must be None where x is an MFA, which knows what was observed")
            p = x
        else:
            ours = first_of(self.network.get_submodule(self.stem.convolution).parameters())
            images, seen = as_batch(x, observed, ours)
            check_images("x", images)
            self._check_channels(images)
            self._check_devices(images, seen, ours)
            images = _in_type_of(ours, images)
            p = self._ask(images, seen) if self.density is not None else self._complete(images, seen, observed)
        self._check_channels(p.means)
        return p

    def _complete(self, x: Tensor, seen: Tensor | None, observed: object) -> MFA:
        """The MFA of complete images; `seen` may be there because of `observed`, or because of the images."""
        if seen is not None or (readable(x) and bool(x.isnan().any())):
            what = "x with missing pixels" if observed is None else "observed"
            raise ValueError(
                f"{what} needs a density that says what the missing pixels may be; pass one to "
                "convert(model, density), or call the network with an MFA"
            )
        return MFA.point(x)

    def _ask(self, x: Tensor, observed: Tensor | None) -> MFA:
        assert self.density is not None
        observed = ~x.isnan() if observed is None else check_observed("observed", observed, x)
        check_seen_finite("x", x, observed)
        p = self.density(x.where(observed, 0), observed)
        if not isinstance(p, MFA) or p.shape != x.shape:
            raise TypeError(f"density must return a misconv.MFA of images {tuple(x.shape)}, got {describe(p)}")
        return p

    def _check_channels(self, images: Tensor) -> None:
        # A network that chooses channels may take more of them than it was tried on; compiled, it repeats its choice.
        flexible = self.stem.selections and not torch.compiler.is_compiling()
        if images.shape[-3] != self.channels and not flexible:
            raise ValueError(
                f"x must have the {self.channels} channels that the network reads, got {describe(images)}"
                f"{channels_last(images, self.channels)}"
            )

    def _check_devices(self, x: Tensor, observed: Tensor | None, ours: Tensor | None) -> None:
        """All that takes part is on one device; if not, say what is where."""
        theirs = first_of(self.density.parameters()) if isinstance(self.density, nn.Module) else None
        parts = {"x": x, "observed": observed, "the density": theirs, "the network": ours}
        places = [f"{name} on {part.device}" for name, part in parts.items() if isinstance(part, Tensor)]
        if len({part.device for part in parts.values() if isinstance(part, Tensor)}) > 1:
            places[0] = places[0].replace(" on ", " is on ")
            raise ValueError(f"x must be on one device with all that reads it, but {', '.join(places)}")

    def _activation(self) -> nn.Module | None:
        if self.stem.named:
            assert self.stem.activation is not None
            return self.network.get_submodule(self.stem.activation)
        return self._modules.get("activation")  # sooner found than by asking the module

    def extra_repr(self) -> str:
        """The stem."""
        return f"stem: {self.stem}"


# Inside ------------------------------------------------------------------------------------------------------------


def _submodule(network: nn.Module, name: str) -> nn.Module:
    """`network.get_submodule(name)`, which takes its time for questions that have been answered at the conversion."""
    module: nn.Module | None = network
    for part in name.split(".") if name else ():
        module = None if module is None else module._modules.get(part)
    return network.get_submodule(name) if module is None else module


def _in_type_of(weight: Tensor | None, x: Tensor) -> Tensor:
    """Images in the type of a network's weights, where that is wider, or where the images are float64.

    A network of half precision may scale images before it rounds them, so float32 stays as it is.
    """
    if weight is None or not weight.is_floating_point():
        return x
    return x.to(torch.promote_types(weight.dtype, torch.float32 if x.dtype == torch.float64 else x.dtype))


def _check_model(model: nn.Module, density: nn.Module | None) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a torch.nn.Module, got {describe(model)}")
    if isinstance(model, Converted):
        raise TypeError("model is converted already; pass its .network, the network inside")
    if density is not None and not callable(density):
        raise TypeError(f"density must be a module (x, observed) -> MFA or None, got {describe(density)}")
    if isinstance(model, torch.jit.ScriptModule):
        raise TypeError(f"model must be a network in Python, which can be followed, got a scripted {describe(model)}")
    for name, module in model.named_modules():
        if hasattr(module, "_orig_mod"):
            raise TypeError(
                f"model must not be compiled yet, but {name or 'it'} is; convert the network that was compiled (its "
                "_orig_mod), then compile the converted one"
            )
        lazy = [key for key, value in module._parameters.items() if nn.parameter.is_lazy(value)]
        if lazy:
            raise ValueError(
                f"model must have all its parameters, but {lazy[0]} of the lazy layer {name!r} has no shape yet; call "
                "the model once on an image before it is converted"
            )
    if not any(isinstance(module, nn.Conv2d) for module in model.modules()):
        raise ValueError(
            f"model must hold a torch.nn.Conv2d, but there is none in {type(model).__name__}; for other networks, fill "
            "the holes first, for example with misconv.impute"
        )


def _copied(model: nn.Module) -> nn.Module:
    """A copy of the network that shares nothing with it."""
    # Pruning and the old weight normalization keep a computed weight, which torch does not copy; a hook computes it.
    computed = [
        value
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    ]
    return copy.deepcopy(model, {id(value): value.detach().clone() for value in computed})


def _copied_density(density: nn.Module | None) -> nn.Module | None:
    """A copy to be frozen; a function has nothing that could be trained."""
    if not isinstance(density, nn.Module):
        return density
    try:
        return _copied(density)
    except Exception as error:
        raise ValueError(
            f"density must be one that copy.deepcopy can copy, but of {describe(density)} it failed with "
            f"{type(error).__name__}; with train_density=True the density itself is used"
        ) from error


def _follow_once(search: Search, network: nn.Module) -> None:
    try:
        search.run(network)
    except Exception as error:
        raise ValueError(
            f"model must be a network whose torch functions can be followed, but with them watched it failed with "
            f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
        ) from error


def _check_names(model: nn.Module, stem: str | tuple[str, ...] | None) -> tuple[str, ...]:
    if stem is None:
        return ()
    names = (stem,) if isinstance(stem, str) else tuple(stem) if isinstance(stem, (list, tuple)) else ()
    modules = dict(model.named_modules())
    if not 1 <= len(names) <= 3 or not all(isinstance(name, str) for name in names):
        raise ValueError(
            f"stem must be the names of a convolution, a normalization and an activation, got {describe(stem)}"
        )
    for name in names:
        if name not in modules or not name:
            raise ValueError(
                f"stem must hold names of modules of the network, and {describe(name)} is none; they are listed by "
                f"model.named_modules() and begin with {', '.join(repr(n) for n in list(modules)[1:6])}"
            )
    if not isinstance(modules[names[0]], nn.Conv2d):
        raise ValueError(f"stem must begin with a torch.nn.Conv2d, got {names[0]!r}, {describe(modules[names[0]])}")
    return names


def _tell(stem: Stem, others: list[str], *, explicit: bool) -> None:
    if stem.kept:
        warnings.warn(
            f"the network keeps what lies between the convolution {stem.convolution!r} and its activation (as an "
            "attribute or in a hook): that will be its mean over everything the missing pixels may be",
            stacklevel=3,
        )
    if stem.activation is None and not explicit:
        warnings.warn(
            f"no pointwise activation follows the first convolution, {stem.convolution!r}: the stem is linear, and the "
            "expectation of a linear stem equals imputing the mean. If an activation of your own follows, name the "
            f"parts: stem=({stem.convolution!r}, normalization, activation)",
            stacklevel=3,
        )
    if others:
        warnings.warn(
            f"besides the convolution {stem.convolution!r} the image is also read by {', '.join(others)}, which gets "
            "the mean image in place of missing pixels",
            stacklevel=3,
        )
