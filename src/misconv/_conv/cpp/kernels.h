// What the rows of a response are made of: a problem, numbers, vectors.

#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int RUN = 64;    // windows of a row at a time
constexpr int STEP = 16;   // of these, whose expectations are computed at once
constexpr int AT_ONCE = 5; // sources at a time: their sums of two vectors each stay in registers
constexpr int BAND = 16;   // rows of the response that a thread computes at a time

using i64 = std::int64_t;

// As in compiled.py, field by field. Tensors are contiguous but for the response and its like, which have `strides`.
template <class T> struct Problem {
    i64 batch, channels, height, width, filters, groups, components, rank;
    i64 kernel[2], size[2], stride[2], dilation[2]; // size: of the response
    i64 before[2], padded[2];                       // pixels above and left of the image; height and width with all
    i64 strides[4];                                 // image, filter, row, column
    i64 planes;                                     // of `observed`: 1 or C
    i64 all;                                        // whether pixels that miss nothing are in the table, too
    i64 threads;
    const std::uint8_t *observed, *missing; // (B, planes, H, W); (B, H, W), whether any channel is
    const T *factors, *noise, *apart;       // (B, K, L, C, H, W), (B, K, C, H, W), (B, K - 1, C, H, W)
    const T *weight, *shares;               // (O, C/groups, kh, kw), (B, K)
    T *table;                               // (1 + pixels, C, S), the first row unused
    std::int32_t *number;                   // (B, *padded), the row of the table for a pixel, 0 where it has none
    std::uint8_t *touching;                 // (B, *padded), `missing` with a margin
    const T *response;                      // (B, O, H', W')
    T *result;
    const T *gradient;                      // of the result; what follows are those of what they are named after
    T *grad_response, *grad_weight, *grad_shares, *grad_table, *grad_factors, *grad_noise, *grad_apart;

    i64 sources() const { return components * (rank + 2) - 1; }
    i64 per_group() const { return filters / groups; }
    i64 inputs() const { return channels / groups; }
    i64 taps() const { return kernel[0] * kernel[1]; }
    i64 seen(int axis) const { // rows or columns of the image that lie under windows
        return std::max<i64>(0, std::min(axis ? width : height, padded[axis] - before[axis]));
    }
    i64 bands() const { return (size[0] + BAND - 1) / BAND; }
};

// Numbers ---------------------------------------------------------------------------------------------------------

template <class T> T relu(T m) { return m < 0 ? T(0) : m; } // NaN stays

// Of rising powers; without a loop, so that the loops around it become vectors.
inline float polynomial(float, float last) { return last; }
template <class... C> float polynomial(float x, float first, C... more) { return first + x * polynomial(x, more...); }

// e^(-a²/2): a power of two whose fraction is a polynomial, within 2e-9.
inline float half_square_exp(float a) {
    float t = a * a * -0.72134752f;
    t = t > -126 ? t : -126.0f;
    const std::int32_t whole = std::int32_t(t - 0.5f), bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return power * polynomial(t - float(whole), 1.0f, 0.693147206f, 0.240226469f, 0.0555032878f, 0.00961848896f,
                              0.00133999312f, 0.000153458118f);
}

// E[ReLU(N(m, v))], and ReLU(m) where v = 0; the fit of misconv._math.relu.
inline float expected(float m, float v) {
    const float root = 1 / std::sqrt(v > 1.17549435e-38f ? v : 1.17549435e-38f);
    const float a = std::fabs(m) * root;
    const float tail = polynomial(a, 2.506628015076795f, 3.1416153960695685f, 1.4304810068819938f, 0.22371180389596965f,
                                  -0.02139637851225861f, -0.0015998731981576374f, 0.00048653473976861464f);
    return relu(m) + v * root * half_square_exp(a) / tail;
}

inline double expected(double m, double v) {
    if (!(v > 0)) return relu(m);
    const double s = std::sqrt(v), z = m / s;
    return 0.5 * m * std::erfc(-z * M_SQRT1_2) + s * std::exp(-0.5 * z * z) * (0.5 * M_SQRT1_2 * M_2_SQRTPI);
}

// Its slopes: Φ(m/s) in the mean, and φ(m/s)/2s in the variance.
inline void slopes(float m, float v, float &in_mean, float &in_variance) {
    const float root = 1 / std::sqrt(v > 1.17549435e-38f ? v : 1.17549435e-38f);
    const float a = std::fabs(m) * root;
    const float density = half_square_exp(a);
    // Φ(-a) = e^(-a²/2) / q(a): a minimax fit within 4e-8.
    const float q = polynomial(a, 2.000000131f, 1.59575921f, 0.273353309f, -0.04841039764f, 0.0003924211731f,
                               0.002413619038f, -0.0006146047901f, 5.428601316e-05f);
    // Factors of 0 or 1 and no branches, for the sake of vectors.
    const float random = float((v > 0) & (a < 13)), open = float(m > 0);
    in_mean = open + (1 - 2 * open) * random * density / q;
    in_variance = random * density * root * 0.19947114f;
}

inline void slopes(double m, double v, double &in_mean, double &in_variance) {
    const double s = std::sqrt(v), z = m / s;
    const bool certain = !(v > 0) || std::fabs(z) >= 37;
    in_mean = certain ? double(m > 0) : 0.5 * std::erfc(-z * M_SQRT1_2);
    in_variance = certain ? 0 : std::exp(-0.5 * z * z) * (0.25 * M_SQRT1_2 * M_2_SQRTPI) / s;
}

// Of `count` numbers, and of some that follow: STEP at a time. Functions of their own, which compilers turn into
// vectors more readily than inlined ones.
template <class T>
[[gnu::noinline]] void expected(const T *__restrict m, const T *__restrict v, i64 count, T *__restrict result) {
    for (i64 from = 0; from < count; from += STEP)
        for (i64 i = from; i < from + STEP; i++) result[i] = expected(m[i], v[i]);
}
template <class T>
[[gnu::noinline]] void slopes(const T *__restrict m, const T *__restrict v, i64 count, T *__restrict in_mean,
                              T *__restrict in_variance) {
    for (i64 from = 0; from < count; from += STEP)
        for (i64 i = from; i < from + STEP; i++) slopes(m[i], v[i], in_mean[i], in_variance[i]);
}

// Vectors ---------------------------------------------------------------------------------------------------------

template <class T> struct Vector {
    typedef T type __attribute__((vector_size(BYTES)));
    static constexpr int lanes = BYTES / sizeof(T);
    static type load(const T *from) {
        type v;
        std::memcpy(&v, from, sizeof v);
        return v;
    }
    static void store(T *to, type v) { std::memcpy(to, &v, sizeof v); }
    static void copy(const T *from, i64 count, T *to) { // of a few numbers, sooner than a call would begin
        i64 i = 0;
        for (; i + lanes <= count; i += lanes) store(to + i, load(from + i));
        for (; i < count; i++) to[i] = from[i];
    }
};

// A matrix with its columns in blocks of W vectors: (blocks, rows, width), zeros at the end.
template <class T, int W> struct Blocks {
    static constexpr int width = W * Vector<T>::lanes;
    i64 rows, count;
    std::vector<T> values;
    Blocks(i64 rows, i64 columns) : rows(rows), count((columns + width - 1) / width), values(rows * count * width) {}
    i64 index(i64 row, i64 column) const { return (column / width * rows + row) * width + column % width; }
    T &at(i64 row, i64 column) { return values[index(row, column)]; }
    T *block(i64 i) { return values.data() + i * rows * width; }
};

struct Tap { // a pixel with sources under a window, or several that follow each other in the table
    std::int32_t number, place, inputs; // in the table; in the kernel; channels of all these pixels
};

// sums[i] = Σ x_i w over the taps of a window and the channels of its group; the first with squared weights. Their
// squares are added to the variance, which begins with the first; either may be left out.
template <class T, int W, int N, bool SQUARED>
void respond(const Tap *taps, i64 count, const T *table, i64 row, const T *filters, const T *squares, i64 inputs,
             i64 step, T *sums, i64 apart, T *variance) {
    using V = Vector<T>;
    typename V::type sum[N][W] = {};
    for (i64 t = 0; t < count; t++) {
        const T *x = table + taps[t].number * row;
        i64 at = taps[t].place * inputs * W * V::lanes;
        for (i64 c = 0; c < taps[t].inputs; c++, x += step)
#pragma GCC unroll 8
            for (int j = 0; j < W; j++, at += V::lanes) {
                const typename V::type w = V::load(filters + at);
                sum[0][j] += x[0] * (SQUARED ? V::load(squares + at) : w);
#pragma GCC unroll 8
                for (int i = 1; i < N; i++) sum[i][j] += x[i] * w;
            }
    }
    if (variance)
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) {
            T *to = variance + j * V::lanes;
            typename V::type v = SQUARED ? sum[0][j] : V::load(to) + sum[0][j] * sum[0][j];
#pragma GCC unroll 8
            for (int i = 1; i < N; i++) v += sum[i][j] * sum[i][j];
            V::store(to, v);
        }
    if (sums)
#pragma GCC unroll 8
        for (int i = 0; i < N; i++)
#pragma GCC unroll 8
            for (int j = 0; j < W; j++) V::store(sums + i * apart + j * V::lanes, sum[i][j]);
}

// The other way: linear += Σ x_i g_i, and for the first squared += x_0 g_0, of the filters under a window.
template <class T, int W, int N, bool SQUARED>
void gather(const Tap *taps, i64 count, const T *table, i64 row, const T *given, i64 apart, i64 inputs, i64 step,
            T *linear, T *squared) {
    using V = Vector<T>;
    typename V::type g[N][W];
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) g[i][j] = V::load(given + i * apart + j * V::lanes);
    for (i64 t = 0; t < count; t++) {
        const T *x = table + taps[t].number * row;
        i64 at = taps[t].place * inputs * W * V::lanes;
        for (i64 c = 0; c < taps[t].inputs; c++, x += step)
#pragma GCC unroll 8
            for (int j = 0; j < W; j++, at += V::lanes) {
                typename V::type sum = V::load(linear + at);
#pragma GCC unroll 8
                for (int i = SQUARED; i < N; i++) sum += x[i] * g[i][j];
                V::store(linear + at, sum);
                if (SQUARED) V::store(squared + at, V::load(squared + at) + x[0] * g[0][j]);
            }
    }
}

// sums[i] = Σ_o g_i w over the filters of a group, with a lane for every place and channel; the first with squares.
template <class T, int W, int N, bool SQUARED>
void scatter(const T *given, i64 apart, const T *filters, i64 count, T *sums, i64 across) {
    using V = Vector<T>;
    typename V::type sum[N][W] = {};
    for (i64 o = 0; o < count; o++)
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) {
            const typename V::type w = V::load(filters + (o * W + j) * V::lanes);
            sum[0][j] += given[o] * (SQUARED ? w * w : w);
#pragma GCC unroll 8
            for (int i = 1; i < N; i++) sum[i][j] += given[i * apart + o] * w;
        }
#pragma GCC unroll 8
    for (int i = 0; i < N; i++)
#pragma GCC unroll 8
        for (int j = 0; j < W; j++) V::store(sums + i * across + j * V::lanes, sum[i][j]);
}

// Call f with the number of sources, 1 to AT_ONCE, and whether the first is a noise, as constants.
template <int N> struct Constant { static constexpr int value = N; };
template <class F> void with_constants(i64 count, bool squared, F f) {
    const auto with = [&](auto n) { squared ? f(n, Constant<1>()) : f(n, Constant<0>()); };
    switch (count) {
    case 1: return with(Constant<1>());
    case 2: return with(Constant<2>());
    case 3: return with(Constant<3>());
    case 4: return with(Constant<4>());
    default: return with(Constant<5>());
    }
}

// For all sources: the first of some that are computed at once, how many, and whether the first of them is a noise.
template <class T, class F> void each_chunk(const Problem<T> &p, F f) {
    for (i64 k = 0; k < p.components; k++)
        for (i64 s = 0; s <= p.rank; s += AT_ONCE)
            f(k * (p.rank + 1) + s, std::min<i64>(AT_ONCE, p.rank + 1 - s), s == 0);
    const i64 before = p.components * (p.rank + 1);
    for (i64 s = before; s < p.sources(); s += AT_ONCE) f(s, std::min<i64>(AT_ONCE, p.sources() - s), false);
}

} // namespace
