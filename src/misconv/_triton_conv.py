"""The expected activation of a convolution as two Triton kernels: one forward, one backward.

A program has a tile of output pixels and a block of output channels. It reads the *box* of the image that lies under
the windows of the tile, once and with every question answered there (inside the image? missing?), spreads it to the
matrix X of windows (pixels × taps) in shared memory, and multiplies by the weights (taps × channels). Where the box
holds no missing pixel the mean is all there is to compute; elsewhere noise and factors follow, read at missing pixels
only, since observed ones count as zero. Mean and variance stay in registers; the backward kernel computes them again.

Products take float32 operands, rounded to TF32 where the user allows it, and sums are float32. Everything here is made
of operations that Triton's interpreter knows, so that the kernels are tested without a GPU.
"""

from __future__ import annotations

import triton
import triton.language as tl

from misconv._triton_expectations import activation, expected, slopes

__all__ = ["backward_kernel", "forward_kernel"]

# Boxes and windows -----------------------------------------------------------------------------------------------


@triton.jit
def _box(observed, chunk, top, left, height, width, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
         BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_OBSERVED: tl.constexpr,
         PER_CHANNEL: tl.constexpr):  # fmt: skip
    """The box of CHUNK channels whose corner is (top, left).

    Returns:
        For each of its pixels the offset into the channels of the chunk, or −1 where it lies outside the image; and the
        same with −1 also where it was observed.
    """
    q = tl.arange(0, BLOCK_Q)
    channel, place = q // (BOX_Y * BOX_X), q % (BOX_Y * BOX_X)
    y, x = top + place // BOX_X, left + place % BOX_X
    inside = (channel < CHUNK) & (chunk * CHUNK + channel < CHANNELS)
    inside = inside & (y >= 0) & (y < height) & (x >= 0) & (x < width)
    flat = y * width + x
    offsets = tl.where(inside, channel * height * width + flat, -1)
    missing = offsets
    if HAS_OBSERVED:
        if PER_CHANNEL:
            seen = tl.load(observed + chunk * CHUNK * height * width + offsets, mask=inside, other=1)
        else:
            seen = tl.load(observed + flat, mask=inside, other=1)
        missing = tl.where(seen == 0, offsets, -1)
    return offsets, missing


@triton.jit
def _count_missing(observed, top, left, height, width, CHANNELS: tl.constexpr, CHUNK: tl.constexpr,
                   BOX_Y: tl.constexpr, BOX_X: tl.constexpr, BLOCK_Q: tl.constexpr, HAS_OBSERVED: tl.constexpr,
                   PER_CHANNEL: tl.constexpr):  # fmt: skip
    """How many pixels of a box are missing; a few channels speak for all where `observed` is shared."""
    count = 1
    if HAS_OBSERVED:
        count = 0
        for chunk in range((CHANNELS + CHUNK - 1) // CHUNK if PER_CHANNEL else 1):
            _, missing = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                              HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
            count += tl.sum(tl.where(missing >= 0, 1, 0))
    return count


@triton.jit
def _rounded(values, PRECISION: tl.constexpr):
    """To the nearest TF32 number, if that is the precision of products: the hardware would cut off what is too much."""
    if PRECISION == "tf32":
        values = ((values.to(tl.int32, bitcast=True) + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return values


@triton.jit
def _read(image, offsets, PRECISION: tl.constexpr):
    """What an image holds at these offsets, and 0 where they are negative."""
    return _rounded(tl.load(image + offsets, mask=offsets >= 0, other=0.0).to(tl.float32), PRECISION)


@triton.jit
def _stacked(values, STACK: tl.constexpr):
    """A vector repeated for each factor of a stack, (n,) → (STACK · n,)."""
    if STACK == 1:
        return values
    return tl.reshape(tl.broadcast_to(values[None, :], (STACK, values.shape[0])), (STACK * values.shape[0],))


@triton.jit
def _below(starts, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_Q: tl.constexpr):
    """Where windows begin in the boxes of a stack, (STACK · pixels,)."""
    return _stacked(starts, STACK) + tl.arange(0, STACK * BLOCK_P) // BLOCK_P * BLOCK_Q


@triton.jit
def _read_stack(factors, number, missing, size, L: tl.constexpr, STACK: tl.constexpr, PRECISION: tl.constexpr,
                BLOCK_Q: tl.constexpr):  # fmt: skip
    """The boxes of factors number · STACK, … one behind the other, (STACK · BLOCK_Q,), and their offsets."""
    factor = number * STACK + tl.arange(0, STACK * BLOCK_Q) // BLOCK_Q
    offsets = _stacked(missing, STACK)
    offsets = tl.where((offsets >= 0) & (factor < L), offsets + factor * size, -1)
    return _read(factors, offsets, PRECISION), offsets


@triton.jit
def _windows(box, starts, table, block, BLOCK_T: tl.constexpr):
    """A block of taps of the windows that begin at `starts` in a box, (windows, taps)."""
    taps = tl.load(table + block * BLOCK_T + tl.arange(0, BLOCK_T))
    index = tl.reshape(starts[:, None] + taps[None, :], (starts.shape[0] * BLOCK_T,))
    return tl.reshape(tl.gather(box, index, 0), (starts.shape[0], BLOCK_T))


@triton.jit
def _turned_windows(box, starts, table, block, BLOCK_T: tl.constexpr):
    """The same, (taps, windows)."""
    taps = tl.load(table + block * BLOCK_T + tl.arange(0, BLOCK_T))
    index = tl.reshape(taps[:, None] + starts[None, :], (BLOCK_T * starts.shape[0],))
    return tl.reshape(tl.gather(box, index, 0), (BLOCK_T, starts.shape[0]))


@triton.jit
def _weights(weight, chunk, block, channels, TAPS: tl.constexpr, CHUNK_TAPS: tl.constexpr, OUT: tl.constexpr,
             PRECISION: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """The weights of a block of taps of a chunk, (taps, channels), out of a matrix (OUT, TAPS)."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t < CHUNK_TAPS) & (chunk * CHUNK_TAPS + t < TAPS)
    inside = exists[:, None]
    if OUT % BLOCK_O != 0:
        inside = inside & (channels < OUT)[None, :]
    places = channels[None, :] * TAPS + (chunk * CHUNK_TAPS + t)[:, None]
    return _rounded(tl.load(weight + places, mask=inside, other=0.0).to(tl.float32), PRECISION)


@triton.jit
def _sum_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(STACK · pixels, channels) → (pixels, channels)."""
    if STACK == 1:
        return values
    return tl.sum(tl.reshape(values, (STACK, BLOCK_P, BLOCK_O)), 0)


@triton.jit
def _repeat_stack(values, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr):
    """(pixels, channels) → (STACK · pixels, channels)."""
    if STACK == 1:
        return values
    return tl.reshape(tl.broadcast_to(values[None, :, :], (STACK, BLOCK_P, BLOCK_O)), (STACK * BLOCK_P, BLOCK_O))


# Moments ---------------------------------------------------------------------------------------------------------


@triton.jit
def _mean(means, observed, weight, table, starts, channels, top, left, height, width, CHANNELS: tl.constexpr,
          OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
          HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr, BLOCK_P: tl.constexpr,
          BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """The response (pixels, channels) to the mean of one component. WINDOW is the number of taps in one channel."""
    m = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, _ = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, False,
                          False)  # fmt: skip
        box = _read(means + chunk * CHUNK * height * width, offsets, PRECISION)
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = _weights(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                         BLOCK_T)  # fmt: skip
            m = tl.dot(_windows(box, starts, table, block, BLOCK_T), w, m, input_precision=PRECISION)
    return m


@triton.jit
def _stack(factors, number, observed, weight, table, starts, channels, top, left, height, width, size,
           L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
           BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
           PRECISION: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
           BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """The responses (STACK · pixels, channels) to one stack of the factors of a component."""
    r = tl.zeros((STACK * BLOCK_P, BLOCK_O), tl.float32)
    below = _below(starts, STACK, BLOCK_P, BLOCK_Q)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        _, missing = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                          HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        box, _ = _read_stack(factors + first, number, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = _weights(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                         BLOCK_T)  # fmt: skip
            r = tl.dot(_windows(box, below, table, block, BLOCK_T), w, r, input_precision=PRECISION)
    return r


@triton.jit
def _moments(means, factors, noise, observed, weight, table, starts, channels, top, left, height, width, size,
             L: tl.constexpr, CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr,
             BOX_Y: tl.constexpr, BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr,
             PRECISION: tl.constexpr, STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr,
             BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr):  # fmt: skip
    """Mean and variance (pixels, channels) under one component, and the responses to the first stack of factors."""
    m = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    v = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    r = tl.zeros((STACK * BLOCK_P, BLOCK_O), tl.float32)
    below = _below(starts, STACK, BLOCK_P, BLOCK_Q)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, missing = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        of_means, of_noise = _read(means + first, offsets, PRECISION), _read(noise + first, missing, PRECISION)
        of_factors = of_noise
        if L > 0:
            of_factors, _ = _read_stack(factors + first, 0, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = _weights(weight, chunk, block, channels, CHANNELS * WINDOW, CHUNK * WINDOW, OUT, PRECISION, BLOCK_O,
                         BLOCK_T)  # fmt: skip
            m = tl.dot(_windows(of_means, starts, table, block, BLOCK_T), w, m, input_precision=PRECISION)
            square = _rounded(w * w, PRECISION)
            v = tl.dot(_windows(of_noise, starts, table, block, BLOCK_T), square, v, input_precision=PRECISION)
            if L > 0:
                r = tl.dot(_windows(of_factors, below, table, block, BLOCK_T), w, r, input_precision=PRECISION)
    v += _sum_stack(r * r, STACK, BLOCK_P, BLOCK_O)
    for number in range(1, (L + STACK - 1) // STACK):
        r2 = _stack(factors, number, observed, weight, table, starts, channels, top, left, height, width, size, L,
                    CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P,
                    BLOCK_O, BLOCK_T, BLOCK_Q)  # fmt: skip
        v += _sum_stack(r2 * r2, STACK, BLOCK_P, BLOCK_O)
    return m, v, r


@triton.jit
def _share(logits, k, K: tl.constexpr, BLOCK_K: tl.constexpr):
    """The probability of component k."""
    index = tl.arange(0, BLOCK_K)
    values = tl.load(logits + index, mask=index < K, other=float("-inf")).to(tl.float32)
    exponents = tl.exp(values - tl.max(values))
    return tl.sum(tl.where(index == k, exponents, 0.0)) / tl.sum(exponents)


@triton.jit
def forward_kernel(
    logits, means, factors, noise, observed, weight, bias, table, out,
    height, width, rows, columns, tiles_x, tiles, out_b, out_o, out_y, out_x, low, high,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr,
    WINDOW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, STACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Σ_k π_k E[f(N(m_k, v_k))] for one tile of one image and one block of channels of one group.

    CHANNELS and OUT are those of a group, CHUNK of them are read at a time.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    b, tile, part = tl.program_id(0) // tiles, tl.program_id(0) % tiles, tl.program_id(1)
    group, first = part // ((OUT + BLOCK_O - 1) // BLOCK_O), part % ((OUT + BLOCK_O - 1) // BLOCK_O) * BLOCK_O
    plane = height * width
    size = GROUPS * CHANNELS * plane
    means += b.to(tl.int64) * K * size + group * CHANNELS * plane
    noise += b.to(tl.int64) * K * size + group * CHANNELS * plane
    factors += b.to(tl.int64) * (K * L) * size + group * CHANNELS * plane
    if HAS_OBSERVED:
        if PER_CHANNEL:
            observed += b.to(tl.int64) * size + group * CHANNELS * plane
        else:
            observed += b.to(tl.int64) * plane
    weight += group * OUT * CHANNELS * WINDOW
    channels = first + tl.arange(0, BLOCK_O)
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + group * OUT + channels, mask=channels < OUT, other=0.0).to(tl.float32)

    y, x = tile // tiles_x * TILE_Y, tile % tiles_x * TILE_X
    top, left = y * SY - PY, x * SX - PX
    pixel = tl.arange(0, BLOCK_P)
    starts = pixel // TILE_X * (SY * BOX_X) + pixel % TILE_X * SX
    touched = _count_missing(observed, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                             PER_CHANNEL)  # fmt: skip
    result = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
    if touched > 0:
        for k in range(K):
            m, v, _ = _moments(means + k * size, factors + k * L * size, noise + k * size, observed, weight, table,
                               starts, channels, top, left, height, width, size, L, CHANNELS, OUT, WINDOW, CHUNK,
                               BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                               BLOCK_Q)  # fmt: skip
            e = expected(m + offset[None, :], v, ACTIVATION, low, high)
            if K > 1:
                e = e * _share(logits + b * K, k, K, BLOCK_K)
            result += e
    else:
        m = _mean(means, observed, weight, table, starts, channels, top, left, height, width, CHANNELS, OUT, WINDOW,
                  CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_P, BLOCK_O, BLOCK_T,
                  BLOCK_Q)  # fmt: skip
        result, _ = activation(m + offset[None, :], ACTIVATION, low, high)
    y, x = y + pixel // TILE_X, x + pixel % TILE_X
    places = (y * out_y + x * out_x)[:, None] + (group * OUT + channels)[None, :] * out_o
    inside = ((y < rows) & (x < columns))[:, None] & (channels < OUT)[None, :]
    tl.store(out + b.to(tl.int64) * out_b + places, result.to(out.dtype.element_ty), mask=inside)


# Backward --------------------------------------------------------------------------------------------------------


@triton.jit
def _by_weight(g, box, starts, table, block, TURNED: tl.constexpr, PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):
    """gᵀX (channels, taps), or Xᵀg (taps, channels) if TURNED: a large g is better not turned for every block."""
    if TURNED:
        product = tl.dot(_turned_windows(box, starts, table, block, BLOCK_T), g, input_precision=PRECISION)
    else:
        product = tl.dot(tl.trans(g), _windows(box, starts, table, block, BLOCK_T), input_precision=PRECISION)
    return product


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
def _scatter(gradient, g, w, box, scale, starts, table, chunk, block, TAPS: tl.constexpr, CHUNK_TAPS: tl.constexpr,
             PRECISION: tl.constexpr, BLOCK_T: tl.constexpr):  # fmt: skip
    """Add g wᵀ (windows, taps) to an image at the offsets that `box` holds, where they are not negative."""
    t = block * BLOCK_T + tl.arange(0, BLOCK_T)
    exists = (t < CHUNK_TAPS) & (chunk * CHUNK_TAPS + t < TAPS)
    offsets = _windows(box, starts, table, block, BLOCK_T)
    by_image = tl.dot(g, tl.trans(w), input_precision=PRECISION) * scale
    tl.atomic_add(gradient + offsets, by_image, mask=(offsets >= 0) & exists[None, :], sem="relaxed")


@triton.jit
def _spread(total, private, means, by_means, noise, by_noise, factors, by_factors, observed, weight, table, by_m, by_v,
            r, scale, starts, channels, top, left, height, width, size, TOUCHED: tl.constexpr, BY_WEIGHT: tl.constexpr,
            BY_MEANS: tl.constexpr, BY_NOISE: tl.constexpr, BY_FACTORS: tl.constexpr, L: tl.constexpr,
            CHANNELS: tl.constexpr, OUT: tl.constexpr, WINDOW: tl.constexpr, CHUNK: tl.constexpr, BOX_Y: tl.constexpr,
            BOX_X: tl.constexpr, HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, PRECISION: tl.constexpr,
            STACK: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr,
            BLOCK_Q: tl.constexpr):  # fmt: skip
    """From the gradients of mean and variance (pixels, channels) to those of weights and images.

    A response Xw with the gradient g gives gᵀX to the weights and gwᵀ to the image, wherever the image was read. If
    TOUCHED, noise and the first stack of factors, with the responses r, take part.
    """
    TAPS: tl.constexpr = CHANNELS * WINDOW
    CHUNK_TAPS: tl.constexpr = CHUNK * WINDOW
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    TURNED: tl.constexpr = CHUNKS * ((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T) > 1
    FACTORS: tl.constexpr = TOUCHED and L > 0
    below = _below(starts, STACK, BLOCK_P, BLOCK_Q)
    g = r
    if FACTORS:
        g = _rounded(2.0 * r * _repeat_stack(by_v, STACK, BLOCK_P, BLOCK_O), PRECISION)
    by_m, by_v = _rounded(by_m, PRECISION), _rounded(by_v, PRECISION)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        offsets, missing = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                                HAS_OBSERVED and TOUCHED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        of_means = _read(means + first, offsets, PRECISION)
        of_noise, of_factors, of_offsets = of_means, of_means, offsets
        if TOUCHED:
            of_noise = _read(noise + first, missing, PRECISION)
        if FACTORS:
            of_factors, of_offsets = _read_stack(factors + first, 0, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            w = _weights(weight, chunk, block, channels, TAPS, CHUNK_TAPS, OUT, PRECISION, BLOCK_O, BLOCK_T)
            if BY_WEIGHT:
                by_weight = _by_weight(by_m, of_means, starts, table, block, TURNED, PRECISION, BLOCK_T)
                if TOUCHED:
                    doubled = 2.0 * w if TURNED else 2.0 * tl.trans(w)
                    by_weight += doubled * _by_weight(by_v, of_noise, starts, table, block, TURNED, PRECISION, BLOCK_T)
                if FACTORS:
                    by_weight += _by_weight(g, of_factors, below, table, block, TURNED, PRECISION, BLOCK_T)
                total = _add_up(total, private, by_weight, chunk, block, channels, CHUNKS, CHUNK_TAPS, OUT, BLOCK_O,
                                BLOCK_T)  # fmt: skip
            if BY_MEANS:
                _scatter(by_means + first, by_m, w, offsets, scale, starts, table, chunk, block, TAPS, CHUNK_TAPS,
                         PRECISION, BLOCK_T)  # fmt: skip
            if BY_NOISE:
                square = _rounded(w * w, PRECISION)
                _scatter(by_noise + first, by_v, square, missing, 1.0, starts, table, chunk, block, TAPS, CHUNK_TAPS,
                         PRECISION, BLOCK_T)  # fmt: skip
            if BY_FACTORS and FACTORS:
                _scatter(by_factors + first, g, w, of_offsets, 1.0, below, table, chunk, block, TAPS, CHUNK_TAPS,
                         PRECISION, BLOCK_T)  # fmt: skip
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
    r = _stack(factors, number, observed, weight, table, starts, channels, top, left, height, width, size, L, CHANNELS,
               OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O,
               BLOCK_T, BLOCK_Q)  # fmt: skip
    g = _rounded(2.0 * r * _repeat_stack(by_v, STACK, BLOCK_P, BLOCK_O), PRECISION)
    below = _below(starts, STACK, BLOCK_P, BLOCK_Q)
    for chunk in range((CHANNELS + CHUNK - 1) // CHUNK):
        _, missing = _box(observed, chunk, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q,
                          HAS_OBSERVED, PER_CHANNEL)  # fmt: skip
        first = chunk * CHUNK * height * width
        box, offsets = _read_stack(factors + first, number, missing, size, L, STACK, PRECISION, BLOCK_Q)
        for block in tl.range((CHUNK_TAPS + BLOCK_T - 1) // BLOCK_T, disable_licm=True):
            if BY_WEIGHT:
                by_weight = _by_weight(g, box, below, table, block, TURNED, PRECISION, BLOCK_T)
                total = _add_up(total, private, by_weight, chunk, block, channels, CHUNKS, CHUNK_TAPS, OUT, BLOCK_O,
                                BLOCK_T)  # fmt: skip
            if BY_FACTORS:
                w = _weights(weight, chunk, block, channels, TAPS, CHUNK_TAPS, OUT, PRECISION, BLOCK_O, BLOCK_T)
                _scatter(by_factors + first, g, w, offsets, 1.0, below, table, chunk, block, TAPS, CHUNK_TAPS,
                         PRECISION, BLOCK_T)  # fmt: skip
    return total


@triton.jit
def backward_kernel(
    logits, means, factors, noise, observed, weight, bias, table, grad,
    by_parameters, by_logits, by_means, by_factors, by_noise,
    batch, height, width, rows, columns, tiles_x, tiles, grad_b, grad_o, grad_y, grad_x, low, high,
    K: tl.constexpr, L: tl.constexpr, CHANNELS: tl.constexpr, GROUPS: tl.constexpr, OUT: tl.constexpr,
    WINDOW: tl.constexpr, SY: tl.constexpr, SX: tl.constexpr, PY: tl.constexpr, PX: tl.constexpr,
    HAS_OBSERVED: tl.constexpr, PER_CHANNEL: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    PRECISION: tl.constexpr, TILE_Y: tl.constexpr, TILE_X: tl.constexpr, BOX_Y: tl.constexpr, BOX_X: tl.constexpr,
    CHUNK: tl.constexpr, STACK: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, BY_WEIGHT: tl.constexpr, BY_LOGITS: tl.constexpr, BY_MEANS: tl.constexpr,
    BY_FACTORS: tl.constexpr, BY_NOISE: tl.constexpr,
):  # fmt: skip
    """Gradients for the tiles of one program, which come round-robin.

    `by_parameters` has a row for every program, weights first (turned, if taps come in blocks) and biases behind, to be
    added up afterwards; the other
    gradients are added in place. `by_logits` receives Σ g (E_k − E_0) for each component; the caller does the rest.
    """
    BLOCK_P: tl.constexpr = TILE_Y * TILE_X
    TAPS: tl.constexpr = CHANNELS * WINDOW
    part = tl.program_id(1)
    group, first = part // ((OUT + BLOCK_O - 1) // BLOCK_O), part % ((OUT + BLOCK_O - 1) // BLOCK_O) * BLOCK_O
    plane = height * width
    size = GROUPS * CHANNELS * plane
    weight += group * OUT * TAPS
    channels = first + tl.arange(0, BLOCK_O)
    # The program's own copy of the gradients has a place for each tap, or for whole blocks of them.
    CHUNKS: tl.constexpr = (CHANNELS + CHUNK - 1) // CHUNK
    BLOCKS: tl.constexpr = CHUNKS * ((CHUNK * WINDOW + BLOCK_T - 1) // BLOCK_T)
    PLACES: tl.constexpr = TAPS if BLOCKS == 1 else BLOCKS * BLOCK_T
    own = by_parameters + tl.program_id(0).to(tl.int64) * (GROUPS * OUT * (PLACES + 1))
    private = own + group * OUT * PLACES
    offset = tl.zeros((BLOCK_O,), tl.float32)
    if HAS_BIAS:
        offset = tl.load(bias + group * OUT + channels, mask=channels < OUT, other=0.0).to(tl.float32)
    total = tl.zeros((BLOCK_O, BLOCK_T), tl.float32)
    total_bias = tl.zeros((BLOCK_O,), tl.float32)
    pixel = tl.arange(0, BLOCK_P)
    starts = pixel // TILE_X * (SY * BOX_X) + pixel % TILE_X * SX

    # One stage: Triton 3.6 pipelines this loop wrongly. What does not change is computed anew rather than kept, since
    # registers are short.
    for index in tl.range(tl.program_id(0), batch * tiles, tl.num_programs(0), num_stages=1, disable_licm=True):
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
        touched = _count_missing(seen, top, left, height, width, CHANNELS, CHUNK, BOX_Y, BOX_X, BLOCK_Q, HAS_OBSERVED,
                                 PER_CHANNEL)  # fmt: skip
        y, x = y + pixel // TILE_X, x + pixel % TILE_X
        places = (y * grad_y + x * grad_x)[:, None] + (group * OUT + channels)[None, :] * grad_o
        inside = ((y < rows) & (x < columns))[:, None] & (channels < OUT)[None, :]
        g = tl.load(grad + b.to(tl.int64) * grad_b + places, mask=inside, other=0.0).to(tl.float32)

        if touched > 0:
            base = tl.zeros((BLOCK_P, BLOCK_O), tl.float32)
            for k in range(K):
                at, column = image + k * size, loadings + k * L * size
                m, v, r = _moments(means + at, factors + column, noise + at, seen, weight, table, starts, channels,
                                   top, left, height, width, size, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X,
                                   HAS_OBSERVED, PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                   BLOCK_Q)  # fmt: skip
                m += offset[None, :]
                by_m, by_v = slopes(m, v, ACTIVATION, low, high)
                share = 1.0
                if K > 1:
                    share = _share(logits + b * K, k, K, BLOCK_K)
                if BY_LOGITS:
                    e = expected(m, v, ACTIVATION, low, high)
                    base = tl.where(k == 0, e, base)
                    tl.atomic_add(by_logits + b * K + k, tl.sum(g * (e - base)))
                by_m, by_v = share * g * by_m, share * g * by_v
                total_bias += tl.sum(by_m, 0)
                total = _spread(total, private, means + at, by_means + at, noise + at, by_noise + at, factors + column,
                                by_factors + column, seen, weight, table, by_m, by_v, r, 1.0, starts, channels, top,
                                left, height, width, size, True, BY_WEIGHT, BY_MEANS, BY_NOISE, BY_FACTORS, L,
                                CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION,
                                STACK, BLOCK_P, BLOCK_O, BLOCK_T, BLOCK_Q)  # fmt: skip
                for number in range(1, (L + STACK - 1) // STACK):
                    total = _spread_stack(total, private, factors + column, by_factors + column, number, seen, weight,
                                          table, by_v, starts, channels, top, left, height, width, size, BY_WEIGHT,
                                          BY_FACTORS, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED,
                                          PER_CHANNEL, PRECISION, STACK, BLOCK_P, BLOCK_O, BLOCK_T,
                                          BLOCK_Q)  # fmt: skip
        else:
            m = _mean(means + image, seen, weight, table, starts, channels, top, left, height, width, CHANNELS, OUT,
                      WINDOW, CHUNK, BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, BLOCK_P, BLOCK_O, BLOCK_T,
                      BLOCK_Q)  # fmt: skip
            _, slope = activation(m + offset[None, :], ACTIVATION, low, high)
            by_m = g * slope
            total_bias += tl.sum(by_m, 0)
            if BY_WEIGHT:
                total = _spread(total, private, means + image, by_means, noise, by_noise, factors, by_factors, seen,
                                weight, table, by_m, by_m, by_m, 1.0, starts, channels, top, left, height, width, size,
                                False, True, False, False, False, L, CHANNELS, OUT, WINDOW, CHUNK, BOX_Y, BOX_X,
                                HAS_OBSERVED, PER_CHANNEL, PRECISION, 1, BLOCK_P, BLOCK_O, BLOCK_T,
                                BLOCK_Q)  # fmt: skip
            if BY_MEANS:  # all components hold the same pixels here, and each has its share in what they do
                for k in range(K):
                    share = 1.0
                    if K > 1:
                        share = _share(logits + b * K, k, K, BLOCK_K)
                    at = image + k * size
                    total = _spread(total, private, means + at, by_means + at, noise, by_noise, factors, by_factors,
                                    seen, weight, table, by_m, by_m, by_m, share, starts, channels, top, left, height,
                                    width, size, False, False, True, False, False, L, CHANNELS, OUT, WINDOW, CHUNK,
                                    BOX_Y, BOX_X, HAS_OBSERVED, PER_CHANNEL, PRECISION, 1, BLOCK_P, BLOCK_O, BLOCK_T,
                                    BLOCK_Q)  # fmt: skip

    if BY_WEIGHT and BLOCKS == 1:
        places = private + channels[:, None] * PLACES + tl.arange(0, BLOCK_T)[None, :]
        tl.store(places, total, mask=(channels < OUT)[:, None] & (tl.arange(0, BLOCK_T) < TAPS)[None, :])
    biases = own + GROUPS * OUT * PLACES + group * OUT
    tl.store(biases + channels, total_bias, mask=channels < OUT)
