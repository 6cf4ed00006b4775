// A row of the response: its touched windows, their moments and expectations, and the gradients of these.

#pragma once

#include "kernels.h"

namespace {

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

template <class T, int W> std::vector<Blocks<T, W>> squared(std::vector<Blocks<T, W>> all) {
    for (auto &blocks : all)
        for (T &w : blocks.values) w *= w;
    return all;
}

template <class T, int W> struct Rows {
    using Bank = std::vector<Blocks<T, W>>;
    const Problem<T> &p;
    Bank &bank, &squares;
    const i64 K = p.components, S = p.sources(), group = bank[0].count * bank[0].width, O = p.groups * group;
    std::vector<std::uint8_t> any = std::vector<std::uint8_t>(p.padded[1]);
    std::vector<i64> columns;                                      // the touched windows of the row
    std::vector<Tap> taps = std::vector<Tap>(RUN * p.taps() + 1);  // of some of these windows, and one to spare
    i64 counts[RUN];
    std::vector<T> sums = std::vector<T>(RUN * S * O);             // of the sources; then their gradients
    std::vector<T> variance = std::vector<T>(RUN * K * O);

    Rows(const Problem<T> &p, Bank &bank, Bank &squares) : p(p), bank(bank), squares(squares) {}

    i64 lane(i64 filter) const { return filter / p.per_group() * group + filter % p.per_group(); }
    i64 place(i64 image, i64 row) const { return image * p.strides[0] + row * p.strides[2]; }

    void find(i64 image, i64 row) {
        const i64 width = p.padded[1];
        std::fill(any.begin(), any.end(), 0);
        for (i64 k = 0; k < p.kernel[0]; k++) {
            const auto *line = p.touching + (image * p.padded[0] + row * p.stride[0] + k * p.dilation[0]) * width;
            std::uint8_t *__restrict to = any.data(); // else bytes might be anything, and compilers see no vectors
            for (i64 x = 0; x < width; x++) to[x] |= line[x];
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
        const std::int32_t width = p.kernel[1], inputs = p.inputs();
        const i64 step = p.dilation[1];
        const bool join = step == 1 && p.groups == 1; // else neighbours are not side by side in the table
        for (i64 i = 0; i < count; i++) {
            Tap *const begin = &taps[i * p.taps()], *tap = begin;
            const std::int32_t *line = p.number + (image * p.padded[0] + row * p.stride[0]) * p.padded[1];
            line += columns[first + i] * p.stride[1];
            for (std::int32_t y = 0; y < p.kernel[0]; y++, line += p.dilation[0] * p.padded[1]) {
                if (join && line[0] && line[width - 1] - line[0] == width - 1) { // all of the row, as in most windows
                    *tap++ = {line[0], y * width, width * inputs};
                    continue;
                }
                for (std::int32_t x = 0; x < width; x++) {
                    const std::int32_t number = line[x * step];
                    *tap = {number, y * width + x, inputs};
                    tap += number != 0; // sooner than a branch that is hard to foresee
                }
            }
            counts[i] = tap - begin;
        }
    }

    // The variance of each component and what comes out of the sources, of which the forward pass needs the means
    // alone. The filters of a block stay in the cache.
    void find_moments(i64 count, bool keep) {
        each_block([&](i64 g, i64 j, i64 s, i64 some, bool noise) {
            const i64 lane = g * group + j * bank[g].width, row = p.channels * S;
            const bool varies = s < K * (p.rank + 1);
            const T *table = p.table + g * p.inputs() * S + s;
            T *to = keep || !varies ? &sums[s * O + lane] : nullptr;
            T *v = varies ? &variance[s / (p.rank + 1) * O + lane] : nullptr;
            with_constants(some, noise, [&](auto n, auto squared) {
                for (i64 i = 0; i < count; i++)
                    respond<T, W, n.value, squared.value>(&taps[i * p.taps()], counts[i], table, row, bank[g].block(j),
                                                          squares[g].block(j), p.inputs(), S, to ? to + i * S * O : to,
                                                          O, v ? v + i * K * O : v);
            });
        });
    }

    template <class F> void each_block(F f) const {
        for (i64 g = 0; g < p.groups; g++)
            for (i64 j = 0; j < bank[g].count; j++)
                each_chunk(p, [&](i64 s, i64 some, bool noise) { f(g, j, s, some, noise); });
    }

    bool together(i64 first, i64 count) const {
        return p.strides[3] == 1 && columns[first + count - 1] - columns[first] == count - 1;
    }
    void take(const T *from, i64 first, i64 count, T *to) const {
        if (together(first, count)) Vector<T>::copy(from + columns[first], count, to);
        else for (i64 i = 0; i < count; i++) to[i] = from[columns[first + i] * p.strides[3]];
    }
    void put(const T *from, i64 first, i64 count, T *to) const {
        if (together(first, count)) Vector<T>::copy(from, count, to + columns[first]);
        else for (i64 i = 0; i < count; i++) to[columns[first + i] * p.strides[3]] = from[i];
    }

    // f(place of a number, how many follow it, how far apart) over all of some rows, in the order of memory.
    template <class F> void each_line(i64 image, i64 row, i64 rows, F f) const {
        const bool last = p.strides[1] == 1;
        const i64 whole = place(image, row), lines = last ? p.size[1] : p.filters, count = last ? p.filters : p.size[1];
        const i64 apart = p.strides[last ? 3 : 1], step = p.strides[last ? 1 : 3];
        for (i64 i = 0; i < rows * lines; i++) {
            const i64 y = last ? i / lines : i % rows, line = last ? i % lines : i / rows;
            f(whole + y * p.strides[2] + line * apart, count, step);
        }
    }

    void rectify(i64 image, i64 row, i64 rows) const {
        each_line(image, row, rows, [&](i64 at, i64 count, i64 step) {
            const T *from = p.response + at;
            T *to = p.result + at;
            if (step == 1) for (i64 i = 0; i < count; i++) to[i] = relu(from[i]);
            else for (i64 i = 0; i < count; i++) to[i * step] = relu(from[i * step]);
        });
    }

    void forward(i64 image, i64 first_row, i64 rows) {
        const bool in_place = p.result == p.response;
        if (!in_place) rectify(image, first_row, rows);
        for (i64 row = first_row; row < first_row + rows; row++) {
            find(image, row);
            for (i64 first = 0; first < i64(columns.size()); first += RUN) {
                const i64 count = std::min<i64>(RUN, columns.size() - first);
                fetch(image, row, first, count);
                find_taps(image, row, first, count);
                find_moments(count, false);
                for (i64 o = 0; o < p.filters; o++) expect(image, row, o, first, count);
            }
        }
        if (in_place) rectify(image, first_row, rows); // what is expected is not negative, and stays
    }

    // The means, planes apart, come into the cache while the variances are computed. Inline, as a function that does
    // nothing else has no effect in the eyes of a compiler.
    [[gnu::always_inline]] void fetch(i64 image, i64 row, i64 first, i64 count) const {
        constexpr i64 line = 64 / sizeof(T);
        for (i64 o = 0; o < p.filters; o++)
            for (i64 i = 0; i < count + line - 1; i += line)
                __builtin_prefetch(p.response + place(image, row) + o * p.strides[1] +
                                   columns[first + std::min(i, count - 1)] * p.strides[3]);
    }

    void expect(i64 image, i64 row, i64 filter, i64 first, i64 count) const {
        T mean[RUN] = {}, v[RUN] = {}, result[RUN], base[RUN], total[RUN];
        bool differ[RUN] = {};
        const i64 at = place(image, row) + filter * p.strides[1], q = lane(filter), apart = K * (p.rank + 1) - 1;
        take(p.response + at, first, count, mean);
        for (i64 i = 0; i < count; i++) v[i] = variance[i * K * O + q];
        expected(mean, v, count, result);
        if (K > 1) {
            for (i64 i = 0; i < count; i++) {
                // As differences from the first: where all agree the shares must not even round.
                base[i] = std::isfinite(result[i]) ? result[i] : T(0);
                total[i] = base[i] + p.shares[image * K] * (result[i] - base[i]);
                differ[i] = v[i] > 0;
            }
            for (i64 k = 1; k < K; k++)
                for (i64 i = 0; i < count; i++) {
                    const T m = mean[i] + sums[(i * S + apart + k) * O + q], u = variance[(i * K + k) * O + q];
                    total[i] += p.shares[image * K + k] * (expected(m, u) - base[i]);
                    differ[i] |= u > 0 || m != mean[i];
                }
            for (i64 i = 0; i < count; i++) result[i] = differ[i] ? total[i] : relu(mean[i]);
        }
        put(result, first, count, p.result + at);
    }

    void rectify_gradient(i64 image, i64 row, i64 rows) const {
        each_line(image, row, rows, [&](i64 at, i64 count, i64 step) {
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
            slopes(m, v, count, in_mean, in_variance);
            for (i64 i = 0; i < count; i++) {
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
        each_block([&](i64 g, i64 j, i64 s, i64 some, bool noise) {
            const T *table = p.table + g * p.inputs() * S + s, *given = &sums[s * O + g * group + j * bank[g].width];
            with_constants(some, noise, [&](auto n, auto square) {
                for (i64 i = 0; i < count; i++)
                    gather<T, W, n.value, square.value>(&taps[i * p.taps()], counts[i], table, p.channels * S,
                                                        given + i * S * O, O, p.inputs(), S, linear[g].block(j),
                                                        squared[g].block(j));
            });
        });
    }

    // The windows of an image overlap: one thread at a time.
    void scatter_sources(i64 count, Bank &turned, std::vector<T> &across) const {
        const i64 width = turned[0].count * turned[0].width;
        across.resize(RUN * AT_ONCE * width);
        for (i64 g = 0; g < p.groups; g++)
            each_chunk(p, [&](i64 s, i64 some, bool noise) {
                for (i64 j = 0; j < turned[g].count; j++)
                    with_constants(some, noise, [&](auto n, auto squared) {
                        for (i64 i = 0; i < count; i++) {
                            T *to = &across[i * AT_ONCE * width + j * turned[g].width];
                            scatter<T, W, n.value, squared.value>(&sums[(i * S + s) * O + g * group], O,
                                                                  turned[g].block(j), p.per_group(), to, width);
                        }
                    });
                for (i64 i = 0; i < count; i++)
                    for (const Tap *tap = &taps[i * p.taps()], *end = tap + counts[i]; tap < end; tap++)
                        for (i64 c = 0; c < tap->inputs; c++) {
                            T *to = p.grad_table + (tap->number * p.channels + g * p.inputs() + c) * S + s;
                            const T *from = &across[i * AT_ONCE * width + tap->place * p.inputs() + c];
                            for (i64 n = 0; n < some; n++) to[n] += from[n * width];
                        }
            });
    }
};

} // namespace
