"""The gradients of the fused convolution as one Triton kernel, which computes the moments again.

Boxes and windows are those of `boxes`, moments those of `forward`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton.boxes import (
    box_of,
    count_missing,
    packed,
    product,
    read,
    read_factor,
    read_stack,
    repeat_stack,
    rounded,
    squares_of,
    starts_below,
    starts_of,
    turned_windows,
    weights_of,
    windows_of,
)
from misconv._triton.expectations import activation, expected, slopes
from misconv._triton.forward import mean_of, moments_of, share_of, stack_of

__all__ = ["backward_kernel"]


@triton.jit
def _by_weight(g, box, starts, table, block, TURNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):
    """gᵀX (channels, taps), or Xᵀg (taps, channels) if TURNED: a large g is better not turned for every block."""
    if TURNED:
        by_weight = product(turned_windows(box, starts, table, block, PRECISION, BLOCK_T), g, None, PRECISION)
    else:
        by_weight = product(tl.trans(g), windows_of(box, starts, table, block, PRECISION, BLOCK_T), None, PRECISION)
    return by_weight


@triton.jit
def _add_up(total, private, by_weight, chunk, block, channels, CHUNKS: tl.constexpr, CHUNK_TAPS: tl.constexpr,
            OUT: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Add a gradient to `total` (channels, taps) if one block holds all taps, else to the program's copy in memory.

    There it is (taps, channels), and added by atomic operations though nobody else is about: they need no answer. Each
    place belongs to one thread, so their order is fixed.
    """
    BLOCKS: tl.constexpr = (CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T
    if CHUNKS * BLOCKS == 1:
        total += by_weight
    else:
        t = (chunk * BLOCKS + block) * BLOCK_T + tl.arange(0, BLOCK_T)
        places = private + t[:, None] * OUT + channels[None, :]
        if OUT % BLOCK_O == 0:
            tl.atomic_add(places, by_weight, sem="relaxed")
        else:
            tl.atomic_add(places, by_weight, mask=(channels < OUT)[None, :], sem="relaxed")
    return total


@triton.jit
def _scatter(gradient, g, w, places, chunk, block, TAPS: tl.constexpr, CHUNK_TAPS: tl.constexpr,
             PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Add g wᵀ (windows, taps) to an image at these places, where they are not negative."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t < CHUNK_TAPS) & (chunk * CHUNK_TAPS + t < TAPS)
    by_image = product(g, tl.trans(w), None, PRECISION)
    tl.atomic_add(gradient + places, by_image, mask=(places >= 0) & exists[None, :], sem="relaxed")


@triton.jit
def _spread(total, private, means, by_means, noise, by_noise, factors, by_factors, observed, weight, table, by_m, by_v,
            r, starts, channels, top, left, height, width, size, TOUCHED: tl.constexpr, BY_WEIGHT: tl.constexpr,
            BY_MEANS: tl.constexpr, BY_NOISE: tl.constexpr, BY_FACTORS: tl.constexpr, L: tl.constexpr,
            CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BOX_Y: tl.constexpr,
            BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
            STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
            BLOCK_Q: tl.constexpr):  # fmt: skip
    """From the gradients of mean and variance (pixels, channels) to those of weights and images.

    A response Xw with the gradient g gives gᵀX to the weights and gwᵀ to the image, wherever the image was read. If
    TOUCHED, noise and, if factors come in stacks, the first one, with the responses r, take part.
    """
    TAPS: tl.constexpr = CHANNELS * WINDOW
    CHUNK_TAPS: tl.constexpr = CHUNK * WINDOW
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    TURNED: tl.constexpr = CHUNKS * ((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T) > 1
    FACTORS: tl.constexpr = TOUCHED and L > 0 and STACK > 1
    below = starts_below(starts, STACK, BLOCK_P, BLOCK_Q, PRECISION)
    g = r
    if FACTORS:
        g = rounded(2.0 * r * repeat_stack(by_v, STACK, BLOCK_P, BLOCK_O), PRECISION)
    by_m, by_v = rounded(by_m, PRECISION), rounded(by_v, PRECISION)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, missing = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                  HAS_OBSERVED and TOUCHED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        of_means = read(means + first, offsets, PRECISION)
        of_noise, of_factors, of_offsets = of_means, of_means, offsets
        if TOUCHED:
            of_noise = read(noise + first, missing, PRECISION)
        if FACTORS:
            of_factors, of_offsets = read_stack(factors + first, 0, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = weights_of(weight, chunk, block, channels, TAPS, CHUNK_TAPS, OUT, PRECISION, BLOCK_O, BLOCK_T)
            if BY_WEIGHT:
                by_weight = _by_weight(by_m, of_means, starts, table, block, TURNED, PRECISION, BLOCK_T)
                if TOUCHED:
                    doubled = 2.0 * (w if TURNED else tl.trans(w)).to(tl.float32)
                    by_weight += doubled * _by_weight(by_v, of_noise, starts, table, block, TURNED, PRECISION, BLOCK_T)
                if FACTORS:
                    by_weight += _by_weight(g, of_factors, below, table, block, TURNED, PRECISION, BLOCK_T)
                total = _add_up(total, private, by_weight, chunk, block, channels, CHUNKS, CHUNK_TAPS, OUT, BLOCK_O,
                                BLOCK_T)  # fmt: skip
            if BY_MEANS:
                places = windows_of(offsets, starts, table, block, PRECISION, BLOCK_T)
                _scatter(by_means + first, by_m, w, places, chunk, block, TAPS, CHUNK_TAPS, PRECISION, BLOCK_T)
            if BY_NOISE:
                places = windows_of(missing, starts, table, block, PRECISION, BLOCK_T)
                square = squares_of(w, PRECISION)
                _scatter(by_noise + first, by_v, square, places, chunk, block, TAPS, CHUNK_TAPS, PRECISION, BLOCK_T)
            if BY_FACTORS and FACTORS:
                places = windows_of(of_offsets, below, table, block, PRECISION, BLOCK_T)
                _scatter(by_factors + first, g, w, places, chunk, block, TAPS, CHUNK_TAPS, PRECISION, BLOCK_T)
    return total


@triton.jit
def _spread_stack(total, private, factors, by_factors, number, observed, weight, table, by_v, starts, channels, top,
                  left, height, width, size, BY_WEIGHT: tl.constexpr, BY_FACTORS: tl.constexpr, L: tl.constexpr,
                  CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
                  BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
                  PRECISION: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
                  BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """`_spread` for one more stack of factors, whose responses are computed again."""
    TAPS: tl.constexpr = CHANNELS * WINDOW
    CHUNK_TAPS: tl.constexpr = CHUNK * WINDOW
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    TURNED: tl.constexpr = CHUNKS * ((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T) > 1
    r = stack_of(factors, number, observed, weight, table, starts, channels, top, left, height, width, size, L,
                 CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P,
                 BLOCK_O, BLOCK_T, BLOCK_Q)  # fmt: skip
    g = rounded(2.0 * r * repeat_stack(by_v, STACK, BLOCK_P, BLOCK_O), PRECISION)
    below = starts_below(starts, STACK, BLOCK_P, BLOCK_Q, PRECISION)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        _, missing = box_of(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                            HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        box, offsets = read_stack(factors + first, number, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            if BY_WEIGHT:
                by_weight = _by_weight(g, box, below, table, block, TURNED, PRECISION, BLOCK_T)
                total = _add_up(total, private, by_weight, chunk, block, channels, CHUNKS, CHUNK_TAPS, OUT, BLOCK_O,
                                BLOCK_T)  # fmt: skip
            if BY_FACTORS:
                w = weights_of(weight, chunk, block, channels, TAPS, CHUNK_TAPS, OUT, PRECISION, BLOCK_O, BLOCK_T)
                places = windows_of(offsets, below, table, block, PRECISION, BLOCK_T)
                _scatter(by_factors + first, g, w, places, chunk, block, TAPS, CHUNK_TAPS, PRECISION, BLOCK_T)
    return total


@triton.jit
def _spread_factors(total, factors, by_factors, observed, weight, table, by_v, starts, channels, top, left, height,
                    width, size, BY_WEIGHT: tl.constexpr, BY_FACTORS: tl.constexpr, L: tl.constexpr,
                    CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, BOX_Y: tl.constexpr,
                    BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
                    PRECISION: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
                    BLOCK_Q: tl.constexpr):  # fmt: skip
    """`_spread` for all factors, one at a time, where one block holds all taps.

    Responses are computed again. Windows are spread once for all that is done with them, and the places of gradients
    once for all factors.
    """
    TAPS: tl.constexpr = CHANNELS * WINDOW
    _, missing = box_of(observed, 0, top, left, height, width, CHANNELS, CHANNELS, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                        PER_CHANNEL)  # fmt: skip
    w = weights_of(weight, 0, 0, channels, TAPS, TAPS, OUT, PRECISION, BLOCK_O, BLOCK_T)
    places = windows_of(missing, starts, table, 0, PRECISION, BLOCK_T)
    written = (places >= 0) & (tl.arange(0, BLOCK_T) < TAPS)[None, :]
    values = read_factor(factors, 0, missing, size, L)
    for number in range(L):
        box = packed(rounded(values, PRECISION), PRECISION)
        values = read_factor(factors, number + 1, missing, size, L)
        windows = windows_of(box, starts, table, 0, PRECISION, BLOCK_T)
        g = rounded(2.0 * product(windows, w, None, PRECISION) * by_v, PRECISION)
        if BY_WEIGHT:
            total = product(tl.trans(g), windows, total, PRECISION)
        if BY_FACTORS:
            by_image = product(g, tl.trans(w), None, PRECISION)
            tl.atomic_add(by_factors + number * size + places, by_image, mask=written, sem="relaxed")
    return total


@triton.jit
def _spread_complete(total, private, means, by_means, noise, by_noise, factors, by_factors, observed, weight, table, g,
                     response, inside, offset, starts, channels, image, top, left, height, width, size, low, high,
                     HAS_RESPONSE: tl.constexpr, BY_WEIGHT: tl.constexpr, BY_MEANS: tl.constexpr, L: tl.constexpr,
                     CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
                     BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
                     ACTIVATION: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
                     BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """`_spread` for a tile whose windows are complete, from the gradient g of its activations; and that of biases.

    All components hold the same pixels here; the first one answers for them, as in the plain formulas.
    """
    if HAS_RESPONSE:  # of a ReLU, which tells its slope
        by_m = tl.where(tl.load(response, mask=inside, other=0.0) > 0, g, 0.0)
    else:
        m = mean_of(means + image, observed, weight, table, starts, channels, top, left, height, width, CHANNELS, OUT,
                    WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_P, BLOCK_O, BLOCK_T,
                    BLOCK_Q)  # fmt: skip
        _, slope = activation(m + offset[None, :], ACTIVATION, low, high)
        by_m = g * slope
    total = _spread(total, private, means + image, by_means + image, noise, by_noise, factors, by_factors, observed,
                    weight, table, by_m, by_m, by_m, starts, channels, top, left, height, width, size, False, BY_WEIGHT,
                    BY_MEANS, False, False, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL,
                    PRECISION, 1, BLOCK_P, BLOCK_O, BLOCK_T, BLOCK_Q)  # fmt: skip
    return total, tl.sum(by_m, 0)


@triton.jit
def backward_kernel(
    logits, means, factors, noise, observed, weight, bias, table, grad, response,
    by_parameters, by_logits, by_means, by_factors, by_noise, order,
    batch, height, width, rows, columns, tiles_x, tiles, grad_b, grad_o, grad_y, grad_x, response_b, response_o,
    response_y, response_x, low, high,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr,
    WINDOW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, STACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BY_WEIGHT: tl.constexpr, BY_LOGITS: tl.constexpr, BY_MEANS: tl.constexpr,
    BY_FACTORS: tl.constexpr, BY_NOISE: tl.constexpr, HAS_RESPONSE: tl.constexpr,
    ORDERED: tl.constexpr, INCOMPLETE: tl.constexpr,
):  # fmt: skip
    """Gradients for the tiles of one program, which come round-robin, and for one component.

    `by_parameters` has a row for every program, weights first (turned, if taps come in blocks) and biases behind, to be
    added up afterwards; the other gradients are added in place. `by_logits` receives Σ g E_k for each component, over
    tiles that are not complete; the caller does the rest. If ORDERED, tiles come in the `order` of `order_kernel`; if
    INCOMPLETE, the gradients of parameters by complete ones are left to `complete_kernel`.
    """
    COMPLETE: tl.constexpr = BY_MEANS or not INCOMPLETE  # whether complete tiles give anything here
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    TAPS: tl.constexpr = CHANNELS * WINDOW
    part, k = tl.program_id(1), tl.program_id(2)
    group, first = part // ((OUT + BLOCK_O - 1) // BLOCK_O), part % ((OUT + BLOCK_O - 1) // BLOCK_O) * BLOCK_O
    plane = height * width
    size = GROUPS * CHANNELS * plane
    weight += group * OUT * TAPS
    channels = first + tl.arange(0, BLOCK_O)
    # The program's own copy of the gradients has a place for each tap, or for whole blocks of them.
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    BLOCKS: tl.constexpr = CHUNKS * ((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T)
    PLACES: tl.constexpr = TAPS if BLOCKS == 1 else BLOCKS * BLOCK_T
    own = by_parameters + (k * tl.num_programs(0) + tl.program_id(0)).to(tl.int64) * (GROUPS * OUT * (PLACES + 1))
    private = own + group * OUT * PLACES
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + group * OUT + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    total_bias = tl.zeros((BLOCK_O,), tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    starts = starts_of(TILE_X, SY, SX, BOX_X, BLOCK_P, PRECISION)

    number = batch * tiles  # of tiles
    end_touched = number
    if ORDERED:
        end_touched = tl.load(order + number)
        if not COMPLETE:
            number = end_touched
        elif K > 1:  # the first component answers for all where nothing is missing
            number = tl.where(k > 0, end_touched, number)
    # One stage: Triton 3.6 pipelines this loop wrongly. What does not change is computed anew rather than kept, since
    # registers are short.
    for place in tl.range(tl.program_id(0), number, tl.num_programs(0), num_stages=1, disable_licm=True):
        index = place
        if ORDERED:
            index = tl.load(order + place)
        b, tile = index // tiles, index % tiles
        image = b.to(tl.int64) * K * size + group * CHANNELS * plane
        loadings = b.to(tl.int64) * (K * L) * size + group * CHANNELS * plane
        seen = observed
        if HAS_OBSERVED:
            if PER_CHANNEL:
                seen = observed + b.to(tl.int64) * size + group * CHANNELS * plane
            else:
                seen = observed + b.to(tl.int64) * plane
        y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
        top, left = y * SY - PY, x * SX - PX
        if ORDERED:
            touched = place < end_touched
        else:
            touched = count_missing(seen, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                    HAS_OBSERVED, PER_CHANNEL) > 0  # fmt: skip
        y, x = y + pixel // TILE_X, x + pixel % TILE_X
        places = (y * grad_y + x * grad_x)[:, None] + (group * OUT + channels)[None, :] * grad_o
        end = rows
        if HAS_OBSERVED and K > 1 and not ORDERED:  # nothing is to be read for the others of a complete tile
            end = tl.where((k > 0) & (touched == 0), 0, rows)
        inside = ((y < end) & (x < columns))[:, None] & (channels < OUT)[None, :]
        g = tl.load(grad + b.to(tl.int64) * grad_b + places, mask=inside, other=0.0).to(tl.float32)

        if touched:
            at, column = image + k * size, loadings + k * L * size
            m, v, r = moments_of(means + at, factors + column, noise + at, seen, weight, table, starts, channels,
                                 top, left, height, width, size, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X,
                                 HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                 BLOCK_Q)  # fmt: skip
            m += offset[None, :]
            by_m, by_v = slopes(m, v, ACTIVATION, low, high)
            share = 1.0
            if K > 1:
                share = share_of(logits + b * K, k, K, BLOCK_K)
            if BY_LOGITS:
                e = expected(m, v, ACTIVATION, low, high)
                tl.atomic_add(by_logits + b * K + k, tl.sum(g.to(tl.float64) * e.to(tl.float64)))
            by_m, by_v = share * g * by_m, share * g * by_v
            total_bias += tl.sum(by_m, 0)
            total = _spread(total, private, means + at, by_means + at, noise + at, by_noise + at, factors + column,
                            by_factors + column, seen, weight, table, by_m, by_v, r, starts, channels, top,
                            left, height, width, size, True, BY_WEIGHT, BY_MEANS, BY_NOISE, BY_FACTORS, L,
                            CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION,
                            STACK, BLOCK_P, BLOCK_O, BLOCK_T, BLOCK_Q)  # fmt: skip
            # The response to a single factor is sooner computed again than kept.
            if BLOCKS == 1 and STACK == 1:
                total = _spread_factors(total, factors + column, by_factors + column, seen, weight, table, by_v, starts,
                                        channels, top, left, height, width, size, BY_WEIGHT, BY_FACTORS, L, CHANNELS,
                                        OUT, WINDOW, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_O,
                                        BLOCK_T, BLOCK_Q)  # fmt: skip
            else:
                for number in range(1 if STACK > 1 else 0, (L + STACK - 1) // STACK):
                    total = _spread_stack(total, private, factors + column, by_factors + column, number, seen, weight,
                                          table, by_v, starts, channels, top, left, height, width, size, BY_WEIGHT,
                                          BY_FACTORS, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED,
                                          PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                          BLOCK_Q)  # fmt: skip
        elif (k == 0) and COMPLETE:
            places = (y * response_y + x * response_x)[:, None] + (group * OUT + channels)[None, :] * response_o
            total, by_bias = _spread_complete(
                total, private, means, by_means, noise, by_noise, factors, by_factors, seen, weight, table, g,
                response + b.to(tl.int64) * response_b + places, inside, offset, starts, channels, image, top, left,
                height, width, size, low, high, HAS_RESPONSE, BY_WEIGHT and not INCOMPLETE, BY_MEANS, L, CHANNELS, OUT,
                WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, ACTIVATION, PRECISION, BLOCK_P, BLOCK_O,
                BLOCK_T, BLOCK_Q,
            )  # fmt: skip
            if not INCOMPLETE:
                total_bias += by_bias

    if BY_WEIGHT and BLOCKS == 1:
        places = private + channels[:, None] * PLACES + tl.arange(0, BLOCK_T)[None, :]
        tl.store(places, total, mask=(channels < OUT)[:, None] & (tl.arange(0, BLOCK_T) < TAPS)[None, :])
    biases = own + GROUPS * OUT * PLACES + group * OUT
    tl.store(biases + channels, total_bias, mask=channels < OUT)
