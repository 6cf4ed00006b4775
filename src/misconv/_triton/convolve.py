"""The fused convolution and its gradients: tensors are made, and the kernels of a plan launched with them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from misconv._triton.launch import dense
from misconv._triton.plan import BackwardWork, Layout, Plan

__all__ = ["backward", "backward_parameters", "forward", "is_channels_last", "respond", "squares"]


def forward(
    plan: Plan,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
) -> Tensor:
    """The expected activation, (B, O, H', W'), laid out in memory as the weights are."""
    last, filters = is_channels_last(weight), _widened(weight, plan.paired)
    return respond(plan, (logits, means, factors, noise), observed, filters, weight if bias is None else bias, last)


def respond(
    plan: Plan, density: Sequence[Tensor], observed: Tensor | None, filters: Tensor, offsets: Tensor, last: bool
) -> Tensor:
    """The expected activation, (B, O, H', W'), with its channels last in memory or not.

    Args:
        density: logits, means, factors and noise.
        filters: with an even number of columns, where bfloat16 pixels come in pairs.
        offsets: biases; if there are none, any tensor, since a kernel wants a pointer.
    """
    launch, table, strides = plan.forward_channels_last if last else plan.forward
    out = torch.empty_strided(plan.shape, strides, dtype=plan.settings.dtype, device=plan.device)
    filters, offsets = dense(filters, offsets)
    units, balances = None, None
    if plan.halves is not None:
        filters, units, balances = plan.halves.launch(filters)
    seen = density[1] if observed is None else observed
    launch(*dense(*density, seen), filters, offsets, units, balances, table, out)
    return out


def squares(
    plan: Plan,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor,
) -> Tensor:
    """The sum of the expected squares of all responses of each channel, (O,), in float32."""
    launch, table, programs = plan.squares
    sums = torch.empty((programs, weight.shape[0]), dtype=torch.float32, device=plan.device)
    seen = means if observed is None else observed
    launch(*dense(logits, means, factors, noise, seen, _widened(weight, plan.paired), bias), table, sums)
    return sums.sum(0, dtype=torch.float64).float()


def backward(
    plan: Plan,
    needed: tuple[bool, ...],
    grad: Tensor,
    logits: Tensor,
    means: Tensor,
    factors: Tensor,
    noise: Tensor,
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor | None,
    *,
    response: Tensor | None = None,
) -> tuple[Tensor | None, ...]:
    """Gradients of logits, means, factors, noise, weight and bias, as far as they are needed.

    Args:
        response: what `forward` returned, where it is still known.
    """
    by_logits, by_means, by_factors, by_noise, by_weight, by_bias = needed
    mixed = by_logits and logits.shape[1] > 1
    work = plan.backward(
        grad.stride(),
        None if response is None else response.stride(),
        (by_weight, mixed, by_means, by_factors, by_noise),
    )
    layout = work.layout
    float32, device, columns = torch.float32, plan.device, weight.shape[3]
    weight = _widened(weight, plan.paired and not (by_means or by_factors or by_noise))
    taps = weight.shape[1] * weight.shape[2] * weight.shape[3]
    parameters = layout.new_rows(work.programs, device)
    sums, pixels = parameters, [parameters] * 3
    if mixed:
        sums = torch.zeros(logits.shape, dtype=torch.float64, device=device)
    if by_means or by_factors or by_noise:  # added to from many windows, in float32
        asked = ((means, by_means), (factors, by_factors), (noise, by_noise))
        pixels = [torch.zeros(t.shape, dtype=float32, device=device) if need else parameters for t, need in asked]
    seen, offset = means if observed is None else observed, weight if bias is None else bias
    images = dense(logits, means, factors, noise, seen, weight, offset)
    _launch_backward(work, images, grad, response, parameters, sums, *pixels)
    weights, biases = torch.split_with_sizes(parameters.sum(0), (layout.number, layout.out))
    if layout.turned:
        weights = weights.view(plan.settings.groups, layout.chunks, layout.places, -1)[:, :, : layout.chunk_taps]
        weights = weights.flatten(1, 2)[:, :taps].mT  # (G, O/G, T)
    weights = weights.reshape(weight.shape)
    if weight.shape[3] != columns:
        weights = weights[..., :columns]
    if weight.dtype != float32:
        weights = weights.to(weight.dtype)
    if offset.dtype != float32:
        biases = biases.to(offset.dtype)
    found: list[Tensor | None] = [None] * 4
    if any(needed[:4]):
        if mixed:  # the derivative of a softmax
            shares = logits.double().softmax(-1)
            sums = shares * (sums - (shares * sums).sum(-1, keepdim=True))
        elif by_logits:
            sums = torch.zeros_like(logits)
        found = [t.to(means.dtype) if need else None for t, need in zip((sums, *pixels), needed[:4], strict=True)]
    return (*found, weights if by_weight else None, biases if by_bias else None)


def backward_parameters(
    plan: Plan,
    grad: Tensor,
    density: Sequence[Tensor],
    observed: Tensor | None,
    weight: Tensor,
    bias: Tensor,
    response: Tensor | None,
) -> tuple[Tensor, int, Layout]:
    """Gradients of weight and bias alone, as the kernel writes them: rows that are to be added, and how many.

    Args:
        density: logits, means, factors and noise.
        weight: with an even number of columns, where pixels come in pairs.
    """
    strides = None if response is None else response.stride()
    work = plan.backward(grad.stride(), strides, (True, False, False, False, False))
    rows = work.layout.new_rows(work.programs, plan.device)
    seen = density[1] if observed is None else observed
    _launch_backward(work, [*dense(*density, seen), weight, bias], grad, response, *[rows] * 5)
    # Long rows are sooner added by a kernel that has nothing else to do.
    return (rows.sum(0), 1, work.layout) if work.layout.turned else (rows, work.programs, work.layout)


def _launch_backward(
    work: BackwardWork, images: Sequence[Tensor], grad: Tensor, response: Tensor | None, rows: Tensor, *others: Tensor
) -> None:
    """Write the gradients of parameters to rows, and those of logits and pixels to the others."""
    # What is not there is not read, but a kernel wants a pointer.
    known, order = grad if response is None else response, rows
    if work.order is not None:
        order = work.order.launch(images[4])
    work.launch(*images, work.table, grad, known, rows, *others, order)
    if work.complete is not None:
        work.complete.launch(images[1], order, grad, known, rows[work.programs - work.complete.programs :])


def is_channels_last(weight: Tensor) -> bool:
    """Whether weights, and with them what they make, have their channels last in memory, and only that."""
    return not weight.is_contiguous() and weight.is_contiguous(memory_format=torch.channels_last)


def _widened(weight: Tensor, paired: bool) -> Tensor:
    """Weights with an even number of columns, where pixels come in pairs; a zero weighs nothing."""
    return torch.nn.functional.pad(weight, (0, 1)) if paired and weight.shape[3] % 2 else weight
