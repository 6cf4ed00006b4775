// E[ReLU] in the windows that touch a missing pixel, and its gradients; ReLU in all others. See compiled.py.
//
// One row of the response at a time: its touched windows are found, and their sources go through the filters with a
// lane of a vector for every filter. What is known has no sources and is skipped. The sources of a pixel and channel
// stand side by side in a table: for every component its noise and its factors, then the differences of the means of
// components 1, 2, ... from the first. Nothing but the response is written that would not stay in a cache; the
// backward pass computes the moments again.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <omp.h>
#include <vector>

namespace {

#if defined(__AVX512F__)
constexpr int BYTES = 64;
#elif defined(__AVX__)
constexpr int BYTES = 32;
#else
constexpr int BYTES = 16;
#endif
constexpr int RUN = 32;    // windows of a row at a time
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
    i64 bands() const { return (size[0] + BAND - 1) / BAND; }
};

// Numbers ---------------------------------------------------------------------------------------------------------

template <class T> T relu(T m) { return m < 0 ? T(0) : m; } // NaN stays

template <int N> float polynomial(const float (&c)[N], float x) {
    float sum = c[N - 1];
    for (int i = N - 2; i >= 0; i--) sum = sum * x + c[i];
    return sum;
}

// e^(-a²/2): a power of two whose fraction is a polynomial, within 2e-9.
float half_square_exp(float a) {
    float t = a * a * -0.72134752f;
    t = t > -126 ? t : -126.0f;
    const int whole = int(t - 0.5f);
    constexpr float c[] = {1.0f, 0.693147206f, 0.240226469f, 0.0555032878f, 0.00961848896f, 0.00133999312f, 0.000153458118f};
    const float fraction = polynomial(c, t - float(whole));
    const std::int32_t bits = (whole + 127) << 23;
    float power;
    std::memcpy(&power, &bits, sizeof power);
    return fraction * power;
}

// E[ReLU(N(m, v))], and ReLU(m) where v = 0; the fit of misconv._math.relu.
float expected(float m, float v) {
    const float root = 1 / std::sqrt(v > 1.17549435e-38f ? v : 1.17549435e-38f);
    const float a = std::fabs(m) * root;
    constexpr float c[] = {2.506628015076795f,    3.1416153960695685f,     1.4304810068819938f,   0.22371180389596965f,
                           -0.02139637851225861f, -0.0015998731981576374f, 0.00048653473976861464f};
    return relu(m) + v * root * half_square_exp(a) / polynomial(c, a);
}

double expected(double m, double v) {
    if (!(v > 0)) return relu(m);
    const double s = std::sqrt(v), z = m / s;
    return 0.5 * m * std::erfc(-z * M_SQRT1_2) + s * std::exp(-0.5 * z * z) * (0.5 * M_SQRT1_2 * M_2_SQRTPI);
}

// Its slopes: Φ(m/s) in the mean, and φ(m/s)/2s in the variance.
void slopes(float m, float v, float &in_mean, float &in_variance) {
    const float root = 1 / std::sqrt(v > 1.17549435e-38f ? v : 1.17549435e-38f);
    const float a = std::fabs(m) * root;
    const float density = half_square_exp(a);
    // Φ(-a) = e^(-a²/2) / q(a): a minimax fit within 4e-8.
    constexpr float q[] = {2.000000131f,     1.59575921f,    0.273353309f,     -0.04841039764f,
                           0.0003924211731f, 0.002413619038f, -0.0006146047901f, 5.428601316e-05f};
    const bool certain = !(v > 0) || a >= 13;
    const float below = certain ? 0 : density / polynomial(q, a);
    in_mean = m > 0 ? 1 - below : below;
    in_variance = certain ? 0 : density * root * 0.19947114f;
}

void slopes(double m, double v, double &in_mean, double &in_variance) {
    const double s = std::sqrt(v), z = m / s;
    const bool certain = !(v > 0) || std::fabs(z) >= 37;
    in_mean = certain ? double(m > 0) : 0.5 * std::erfc(-z * M_SQRT1_2);
    in_variance = certain ? 0 : std::exp(-0.5 * z * z) * (0.25 * M_SQRT1_2 * M_2_SQRTPI) / s;
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

struct Tap { // a pixel with sources under a window
    i64 pixel, place; // in the table; in the kernel
};

// sums[i] += Σ x_i w over the taps of a window and the channels of its group; the first with squared weights.
template <class T, int W, int N, bool SQUARED>
void respond(const Tap *taps, i64 count, const T *table, const T *filters, i64 inputs, i64 step, T *sums, i64 apart) {
    using V = Vector<T>;
    typename V::type sum[N][W] = {};
    for (i64 t = 0; t < count; t++) {
        const T *x = table + taps[t].pixel, *f = filters + taps[t].place * inputs * W * V::lanes;
        for (i64 c = 0; c < inputs; c++, x += step, f += W * V::lanes)
            for (int j = 0; j < W; j++) {
                const typename V::type w = V::load(f + j * V::lanes);
                sum[0][j] += x[0] * (SQUARED ? w * w : w);
                for (int i = 1; i < N; i++) sum[i][j] += x[i] * w;
            }
    }
    for (int i = 0; i < N; i++)
        for (int j = 0; j < W; j++) V::store(sums + i * apart + j * V::lanes, sum[i][j]);
}

// The other way: linear += Σ x_i g_i, and for the first squared += x_0 g_0, of the filters under a window.
template <class T, int W, int N, bool SQUARED>
void gather(const Tap *taps, i64 count, const T *table, const T *given, i64 apart, i64 inputs, i64 step, T *linear,
            T *squared) {
    using V = Vector<T>;
    typename V::type g[N][W];
    for (int i = 0; i < N; i++)
        for (int j = 0; j < W; j++) g[i][j] = V::load(given + i * apart + j * V::lanes);
    for (i64 t = 0; t < count; t++) {
        const T *x = table + taps[t].pixel;
        i64 at = taps[t].place * inputs * W * V::lanes;
        for (i64 c = 0; c < inputs; c++, x += step)
            for (int j = 0; j < W; j++, at += V::lanes) {
                typename V::type sum = V::load(linear + at);
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
        for (int j = 0; j < W; j++) {
            const typename V::type w = V::load(filters + (o * W + j) * V::lanes);
            sum[0][j] += given[o] * (SQUARED ? w * w : w);
            for (int i = 1; i < N; i++) sum[i][j] += given[i * apart + o] * w;
        }
    for (int i = 0; i < N; i++)
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

// Rows of the response --------------------------------------------------------------------------------------------

// The filters of every group: (taps·C/groups, O/groups), or the other way round.
template <class T, int W> std::vector<Blocks<T, W>> blocks(const Problem<T> &p, bool turned) {
    const i64 rows = p.taps() * p.inputs(), columns = p.per_group();
    std::vector<Blocks<T, W>> all(p.groups, turned ? Blocks<T, W>(columns, rows) : Blocks<T, W>(rows, columns));
    const T *w = p.weight;
    for (i64 o = 0; o < p.filters; o++)
        for (i64 c = 0; c < p.inputs(); c++)
            for (i64 t = 0; t < p.taps(); t++, w++) {
                const i64 row = t * p.inputs() + c, column = o % columns;
                (turned ? all[o / columns].at(column, row) : all[o / columns].at(row, column)) = *w;
            }
    return all;
}

template <class T, int W> struct Rows {
    using Bank = std::vector<Blocks<T, W>>;
    const Problem<T> &p;
    Bank &bank;
    const i64 K = p.components, S = p.sources(), group = bank[0].count * bank[0].width, O = p.groups * group;
    std::vector<std::uint8_t> any = std::vector<std::uint8_t>(p.padded[1]);
    std::vector<i64> columns;                                      // the touched windows of the row
    std::vector<Tap> taps = std::vector<Tap>(RUN * p.taps());      // of some of these windows
    i64 counts[RUN];
    std::vector<T> sums = std::vector<T>(RUN * S * O);             // of the sources; then their gradients
    std::vector<T> variance = std::vector<T>(RUN * K * O);

    Rows(const Problem<T> &p, Bank &bank) : p(p), bank(bank) {}

    i64 lane(i64 filter) const { return filter / p.per_group() * group + filter % p.per_group(); }
    i64 place(i64 image, i64 row) const { return image * p.strides[0] + row * p.strides[2]; }

    void find(i64 image, i64 row) {
        std::fill(any.begin(), any.end(), 0);
        for (i64 k = 0; k < p.kernel[0]; k++) {
            const auto *line = p.touching + (image * p.padded[0] + row * p.stride[0] + k * p.dilation[0]) * p.padded[1];
            for (i64 x = 0; x < p.padded[1]; x++) any[x] |= line[x];
        }
        columns.clear();
        for (i64 x = 0; x < p.size[1]; x++)
            for (i64 k = 0; k < p.kernel[1]; k++)
                if (any[x * p.stride[1] + k * p.dilation[1]]) {
                    columns.push_back(x);
                    break;
                }
    }

    void find_taps(i64 image, i64 row, i64 first, i64 count) {
        for (i64 i = 0; i < count; i++) {
            Tap *tap = &taps[i * p.taps()];
            for (i64 place = 0; place < p.taps(); place++) {
                const i64 y = row * p.stride[0] + place / p.kernel[1] * p.dilation[0];
                const i64 x = columns[first + i] * p.stride[1] + place % p.kernel[1] * p.dilation[1];
                const i64 number = p.number[(image * p.padded[0] + y) * p.padded[1] + x];
                if (number > 0) *tap++ = {number * p.channels * S, place};
            }
            counts[i] = tap - &taps[i * p.taps()];
        }
    }

    // What comes out of the sources, and the variance of each component.
    void find_moments(i64 count) {
        for (i64 i = 0; i < count; i++) {
            for (i64 g = 0; g < p.groups; g++)
                for (i64 j = 0; j < bank[g].count; j++)
                    each_chunk(p, [&](i64 s, i64 some, bool noise) {
                        T *to = &sums[(i * S + s) * O + g * group + j * bank[g].width];
                        with_constants(some, noise, [&](auto n, auto squared) {
                            respond<T, W, n.value, squared.value>(&taps[i * p.taps()], counts[i], p.table + g * p.inputs() * S + s,
                                                                  bank[g].block(j), p.inputs(), S, to, O);
                        });
                    });
            for (i64 k = 0; k < K; k++) {
                const T *from = &sums[(i * S + k * (p.rank + 1)) * O];
                T *v = &variance[(i * K + k) * O];
                std::copy(from, from + O, v);
                for (i64 l = 1; l <= p.rank; l++)
                    for (i64 o = 0; o < O; o++) v[o] += from[l * O + o] * from[l * O + o];
            }
        }
    }

    bool together(i64 first, i64 count) const {
        return p.strides[3] == 1 && columns[first + count - 1] - columns[first] == count - 1;
    }
    void take(const T *from, i64 first, i64 count, T *to) const {
        if (together(first, count)) std::copy_n(from + columns[first], count, to);
        else for (i64 i = 0; i < count; i++) to[i] = from[columns[first + i] * p.strides[3]];
    }
    void put(const T *from, i64 first, i64 count, T *to) const {
        if (together(first, count)) std::copy_n(from, count, to + columns[first]);
        else for (i64 i = 0; i < count; i++) to[columns[first + i] * p.strides[3]] = from[i];
    }

    // f(place of a number, how many follow it) over all of a row, in the order of memory.
    template <class F> void each_line(i64 image, i64 row, F f) const {
        const bool last = p.strides[1] == 1;
        for (i64 i = 0; i < (last ? p.size[1] : p.filters); i++)
            f(place(image, row) + i * p.strides[last ? 3 : 1], last ? p.filters : p.size[1], p.strides[last ? 1 : 3]);
    }

    void rectify(i64 image, i64 row) const {
        each_line(image, row, [&](i64 at, i64 count, i64 step) {
            const T *from = p.response + at;
            T *to = p.result + at;
            if (step == 1) for (i64 i = 0; i < count; i++) to[i] = relu(from[i]);
            else for (i64 i = 0; i < count; i++) to[i * step] = relu(from[i * step]);
        });
    }

    void forward(i64 image, i64 row) {
        const bool in_place = p.result == p.response;
        if (!in_place) rectify(image, row);
        find(image, row);
        for (i64 first = 0; first < i64(columns.size()); first += RUN) {
            const i64 count = std::min<i64>(RUN, columns.size() - first);
            find_taps(image, row, first, count);
            find_moments(count);
            for (i64 o = 0; o < p.filters; o++) expect(image, row, o, first, count);
        }
        if (in_place) rectify(image, row); // what is expected is not negative, and stays
    }

    void expect(i64 image, i64 row, i64 filter, i64 first, i64 count) const {
        T mean[RUN] = {}, v[RUN] = {}, result[RUN], base[RUN], total[RUN];
        bool differ[RUN] = {};
        const i64 at = place(image, row) + filter * p.strides[1], q = lane(filter);
        take(p.response + at, first, count, mean);
        for (i64 i = 0; i < count; i++) v[i] = variance[i * K * O + q];
        for (i64 i = 0; i < RUN; i++) result[i] = expected(mean[i], v[i]);
        if (K > 1) {
            for (i64 i = 0; i < count; i++) {
                // As differences from the first: where all agree the shares must not even round.
                base[i] = std::isfinite(result[i]) ? result[i] : T(0);
                total[i] = base[i] + p.shares[image * K] * (result[i] - base[i]);
                differ[i] = v[i] > 0;
            }
            for (i64 k = 1; k < K; k++)
                for (i64 i = 0; i < count; i++) {
                    const T m = mean[i] + sums[(i * S + K * (p.rank + 1) + k - 1) * O + q], u = variance[(i * K + k) * O + q];
                    total[i] += p.shares[image * K + k] * (expected(m, u) - base[i]);
                    differ[i] |= u > 0 || m != mean[i];
                }
            for (i64 i = 0; i < count; i++) result[i] = differ[i] ? total[i] : relu(mean[i]);
        }
        put(result, first, count, p.result + at);
    }

    void rectify_gradient(i64 image, i64 row) const {
        each_line(image, row, [&](i64 at, i64 count, i64 step) {
            const T *from = p.response + at, *given = p.gradient + at;
            T *to = p.grad_response + at;
            if (step == 1) for (i64 i = 0; i < count; i++) to[i] = from[i] <= 0 ? T(0) : given[i];
            else for (i64 i = 0; i < count; i++) to[i * step] = from[i * step] <= 0 ? T(0) : given[i * step];
        });
    }

    // The gradients of the response, and of what comes out of the sources, which takes the place of `sums`.
    void differentiate(i64 image, i64 row, i64 filter, i64 first, i64 count, double *grad_shares) {
        T mean[RUN] = {}, v[RUN] = {}, given[RUN] = {}, in_mean[RUN], in_variance[RUN], total[RUN] = {}, base[RUN];
        const i64 at = place(image, row) + filter * p.strides[1], q = lane(filter), apart = K * (p.rank + 1) - 1;
        take(p.response + at, first, count, mean);
        take(p.gradient + at, first, count, given);
        for (i64 k = 0; k < K; k++) {
            T m[RUN] = {};
            const T share = K > 1 ? p.shares[image * K + k] : T(1);
            for (i64 i = 0; i < count; i++) {
                v[i] = variance[(i * K + k) * O + q];
                m[i] = mean[i] + (k > 0 ? sums[(i * S + apart + k) * O + q] : T(0));
            }
            for (i64 i = 0; i < RUN; i++) slopes(m[i], v[i], in_mean[i], in_variance[i]);
            for (i64 i = 0; i < RUN; i++) {
                in_mean[i] *= share * given[i];
                in_variance[i] *= share * given[i];
                total[i] += in_mean[i];
            }
            for (i64 i = 0; i < count; i++) {
                sums[(i * S + k * (p.rank + 1)) * O + q] = in_variance[i];
                if (k > 0) sums[(i * S + apart + k) * O + q] = in_mean[i];
            }
            for (i64 i = 0; K > 1 && i < count; i++) {
                const T e = expected(m[i], v[i]);
                if (k == 0) base[i] = std::isfinite(e) ? e : T(0);
                grad_shares[k] += double(given[i]) * (e - base[i]);
            }
        }
        put(total, first, count, p.grad_response + at);
    }

    void differentiate_factors(i64 count) {
        for (i64 i = 0; i < count; i++)
            for (i64 k = 0; k < K; k++) {
                T *to = &sums[(i * S + k * (p.rank + 1)) * O];
                for (i64 l = 1; l <= p.rank; l++)
                    for (i64 o = 0; o < O; o++) to[l * O + o] *= 2 * to[o];
            }
    }

    void gather_weights(i64 count, Bank &linear, Bank &squared) const {
        for (i64 i = 0; i < count; i++)
            for (i64 g = 0; g < p.groups; g++)
                for (i64 j = 0; j < bank[g].count; j++)
                    each_chunk(p, [&](i64 s, i64 some, bool noise) {
                        const T *given = &sums[(i * S + s) * O + g * group + j * bank[g].width];
                        with_constants(some, noise, [&](auto n, auto square) {
                            gather<T, W, n.value, square.value>(&taps[i * p.taps()], counts[i], p.table + g * p.inputs() * S + s,
                                                                given, O, p.inputs(), S, linear[g].block(j), squared[g].block(j));
                        });
                    });
    }

    // The windows of an image overlap: one thread at a time.
    void scatter_sources(i64 count, std::vector<Blocks<T, 2>> &turned, std::vector<T> &across) const {
        const i64 width = turned[0].count * turned[0].width;
        across.resize(AT_ONCE * width);
        for (i64 i = 0; i < count; i++)
            for (i64 g = 0; g < p.groups; g++)
                each_chunk(p, [&](i64 s, i64 some, bool noise) {
                    for (i64 j = 0; j < turned[g].count; j++)
                        with_constants(some, noise, [&](auto n, auto squared) {
                            scatter<T, 2, n.value, squared.value>(&sums[(i * S + s) * O + g * group], O, turned[g].block(j),
                                                                  p.per_group(), &across[j * turned[g].width], width);
                        });
                    for (const Tap *tap = &taps[i * p.taps()], *end = tap + counts[i]; tap < end; tap++)
                        for (i64 c = 0; c < p.inputs(); c++) {
                            T *to = p.grad_table + tap->pixel + (g * p.inputs() + c) * S + s;
                            for (i64 n = 0; n < some; n++) to[n] += across[n * width + tap->place * p.inputs() + c];
                        }
                });
    }
};

// All rows, by all threads ----------------------------------------------------------------------------------------

template <class T, int W> void forward(const Problem<T> &p) {
    auto bank = blocks<T, W>(p, false);
#pragma omp parallel num_threads(int(p.threads))
    {
        Rows<T, W> rows(p, bank);
#pragma omp for schedule(static, 1)
        for (i64 item = 0; item < p.batch * p.bands(); item++) {
            const i64 row = item % p.bands() * BAND;
            for (i64 y = row; y < std::min(row + BAND, p.size[0]); y++) rows.forward(item / p.bands(), y);
        }
    }
}

template <class T, int W> struct Sums { // of the gradients of weights and their squares, in double at last
    std::vector<Blocks<T, W>> linear, squared;
    std::vector<double> total[2];

    Sums(const std::vector<Blocks<T, W>> &like) : linear(like), squared(like) {
        for (auto *sums : {&linear, &squared})
            for (auto &b : *sums) std::fill(b.values.begin(), b.values.end(), T(0));
        for (auto &t : total) t.resize(like.size() * like[0].values.size());
    }
    // Long sums in single precision lose digits, so they are short.
    void add_up() {
        for (int i = 0; i < 2; i++) {
            double *to = total[i].data();
            for (auto &b : i == 0 ? linear : squared)
                for (T &value : b.values) *to++ += value, value = 0;
        }
    }
};

template <class T, int W> void backward(const Problem<T> &p) {
    auto bank = blocks<T, W>(p, false);
    auto turned = blocks<T, 2>(p, true);
    std::vector<Sums<T, W>> all(p.threads, bank);
    std::vector<double> shares(p.batch * p.bands() * p.components);
    const i64 chunk = p.grad_table ? p.bands() : 1; // windows of an image share pixels, so one thread has all of them
#pragma omp parallel num_threads(int(p.threads))
    {
        Rows<T, W> rows(p, bank);
        Sums<T, W> &sums = all[omp_get_thread_num()];
        std::vector<T> across;
#pragma omp for schedule(static, chunk)
        for (i64 item = 0; item < p.batch * p.bands(); item++) {
            const i64 image = item / p.bands(), row = item % p.bands() * BAND;
            for (i64 y = row; y < std::min(row + BAND, p.size[0]); y++) {
                rows.rectify_gradient(image, y);
                rows.find(image, y);
                for (i64 first = 0; first < i64(rows.columns.size()); first += RUN) {
                    const i64 count = std::min<i64>(RUN, rows.columns.size() - first);
                    rows.find_taps(image, y, first, count);
                    rows.find_moments(count);
                    for (i64 o = 0; o < p.filters; o++)
                        rows.differentiate(image, y, o, first, count, &shares[item * p.components]);
                    rows.differentiate_factors(count);
                    if (p.grad_weight) rows.gather_weights(count, sums.linear, sums.squared);
                    if (p.grad_table) rows.scatter_sources(count, turned, across);
                }
            }
            sums.add_up();
        }
    }
    for (i64 item = 0; item < p.batch * p.bands(); item++)
        for (i64 k = 0; k < p.components; k++)
            p.grad_shares[item / p.bands() * p.components + k] += T(shares[item * p.components + k]);
    if (!p.grad_weight) return;
    const i64 columns = p.per_group();
    for (i64 o = 0, at = 0; o < p.filters; o++)
        for (i64 c = 0; c < p.inputs(); c++)
            for (i64 t = 0; t < p.taps(); t++, at++) {
                const auto &b = bank[o / columns];
                const i64 i = o / columns * i64(b.values.size()) + b.index(t * p.inputs() + c, o % columns);
                double linear = 0, squared = 0;
                for (auto &sums : all) linear += sums.total[0][i], squared += sums.total[1][i];
                p.grad_weight[at] = T(linear + 2 * double(p.weight[at]) * squared);
            }
}

// Pixels ----------------------------------------------------------------------------------------------------------

// f(number in the table, image, place in its planes) for every pixel that has one, images side by side.
template <class T, class F> void each_pixel(const Problem<T> &p, F f) {
#pragma omp parallel for num_threads(int(p.threads)) schedule(static)
    for (i64 item = 0; item < p.batch * p.height; item++) {
        const i64 image = item / p.height, row = item % p.height;
        const auto *line = p.number + (image * p.padded[0] + row + p.before[0]) * p.padded[1] + p.before[1];
        for (i64 x = 0; x < std::min(p.width, p.padded[1] - p.before[1]); x++)
            if (row + p.before[0] < p.padded[0] && line[x] > 0) f(line[x], image, row * p.width + x);
    }
}

template <class T> bool in_range(T size) { return sizeof(T) > 4 || size == 0 || (size >= T(0x1p-45) && size <= T(0x1p30)); }

// Fill `number`, `touching` (both are zeros) and `table`; whether no square of the sources leaves the range of float.
template <class T> bool pack(const Problem<T> &p) {
    std::int32_t last = 0;
    for (i64 image = 0; image < p.batch; image++)
        for (i64 y = 0; y < std::min(p.height, p.padded[0] - p.before[0]); y++) {
            const i64 from = (image * p.height + y) * p.width;
            const i64 to = (image * p.padded[0] + y + p.before[0]) * p.padded[1] + p.before[1];
            for (i64 x = 0; x < std::min(p.width, p.padded[1] - p.before[1]); x++) {
                p.touching[to + x] = p.missing[from + x];
                if (p.missing[from + x] || p.all) p.number[to + x] = ++last;
            }
        }
    const i64 plane = p.height * p.width;
    bool good = true;
    each_pixel(p, [&](i64 number, i64 image, i64 at) {
        T *to = p.table + number * p.channels * p.sources();
        bool fits = true;
        for (i64 c = 0; c < p.channels; c++) {
            const bool known = p.observed[(image * p.planes + (p.planes > 1 ? c : 0)) * plane + at];
            T largest = 0;
            for (i64 k = 0; k < p.components; k++) {
                const i64 of = image * p.components + k;
                const T d = known ? T(0) : p.noise[(of * p.channels + c) * plane + at];
                fits &= d >= 0;
                largest = std::max(largest, std::sqrt(d));
                *to++ = d;
                for (i64 l = 0; l < p.rank; l++) {
                    const T a = known ? T(0) : p.factors[((of * p.rank + l) * p.channels + c) * plane + at];
                    fits &= a == a;
                    largest = std::max(largest, std::fabs(a));
                    *to++ = a;
                }
            }
            fits &= in_range(largest);
            for (i64 k = 0; k < p.components - 1; k++)
                *to++ = p.apart[((image * (p.components - 1) + k) * p.channels + c) * plane + at];
        }
        if (!fits) {
#pragma omp atomic write
            good = false;
        }
    });
    return good;
}

// The gradients of what `pack` has read, from those of the table; zeros are there already.
template <class T> void unpack(const Problem<T> &p) {
    const i64 plane = p.height * p.width;
    each_pixel(p, [&](i64 number, i64 image, i64 at) {
        const T *from = p.grad_table + number * p.channels * p.sources();
        for (i64 c = 0; c < p.channels; c++) {
            const bool known = p.observed[(image * p.planes + (p.planes > 1 ? c : 0)) * plane + at];
            for (i64 k = 0; k < p.components; k++) {
                const i64 of = image * p.components + k;
                for (i64 l = -1; l < p.rank; l++, from++) {
                    if (known) continue;
                    if (l < 0) p.grad_noise[(of * p.channels + c) * plane + at] = *from;
                    else p.grad_factors[((of * p.rank + l) * p.channels + c) * plane + at] = *from;
                }
            }
            for (i64 k = 0; k < p.components - 1; k++)
                p.grad_apart[((image * (p.components - 1) + k) * p.channels + c) * plane + at] = *from++;
        }
    });
}

template <class T> bool is_narrow(const Problem<T> &p) { return p.per_group() <= Vector<T>::lanes; }

} // namespace

#define ENTRY(T, NAME)                                                                                                \
    extern "C" int pack_##NAME(const Problem<T> *p) { return pack(*p); }                                              \
    extern "C" void unpack_##NAME(const Problem<T> *p) { unpack(*p); }                                                \
    extern "C" void forward_##NAME(const Problem<T> *p) { is_narrow(*p) ? forward<T, 1>(*p) : forward<T, 2>(*p); }    \
    extern "C" void backward_##NAME(const Problem<T> *p) { is_narrow(*p) ? backward<T, 1>(*p) : backward<T, 2>(*p); }
ENTRY(float, float)
ENTRY(double, double)
