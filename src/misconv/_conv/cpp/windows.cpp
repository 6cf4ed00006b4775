// E[ReLU] in the windows that touch a missing pixel, and its gradients; ReLU in all others. See compiled.py.
//
// One row of the response at a time: its touched windows are found, and their sources go through the filters with a
// lane of a vector for every filter. What is known has no sources and is skipped. The sources of a pixel and channel
// stand side by side in a table: for every component its noise and its factors, then the differences of the means of
// components 1, 2, ... from the first. Nothing but the response is written that would not stay in a cache; the
// backward pass computes the moments again.

#include <limits>

#include <omp.h>

#include "rows.h"

namespace {

// All rows, by all threads ----------------------------------------------------------------------------------------

template <class T, int W> void forward(const Problem<T> &p) {
    auto bank = blocks<T, W>(p, false), squares = squared(bank);
#pragma omp parallel num_threads(int(p.threads))
    {
        Rows<T, W> rows(p, bank, squares);
#pragma omp for schedule(dynamic, 1) // a band takes as long as it has touched windows
        for (i64 item = 0; item < p.batch * p.bands(); item++) {
            const i64 row = item % p.bands() * BAND;
            rows.forward(item / p.bands(), row, std::min<i64>(BAND, p.size[0] - row));
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
    auto bank = blocks<T, W>(p, false), squares = squared(bank);
    auto turned = blocks<T, W>(p, true);
    std::vector<Sums<T, W>> all(p.threads, bank);
    std::vector<double> shares(p.batch * p.bands() * p.components);
    const i64 chunk = p.grad_table ? p.bands() : 1; // windows of an image share pixels, so one thread has all of them
#pragma omp parallel num_threads(int(p.threads))
    {
        Rows<T, W> rows(p, bank, squares);
        Sums<T, W> &sums = all[omp_get_thread_num()];
        std::vector<T> across;
#pragma omp for schedule(static, chunk)
        for (i64 item = 0; item < p.batch * p.bands(); item++) {
            const i64 image = item / p.bands(), row = item % p.bands() * BAND;
            const i64 end = std::min(row + BAND, p.size[0]);
            rows.rectify_gradient(image, row, end - row);
            for (i64 y = row; y < end; y++) {
                rows.find(image, y);
                for (i64 first = 0; first < i64(rows.columns.size()); first += RUN) {
                    const i64 count = std::min<i64>(RUN, rows.columns.size() - first);
                    rows.find_taps(image, y, first, count);
                    rows.find_moments(count, true);
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

// Up to RUN pixels of a row that are in the table, one after the other.
struct Run {
    i64 number, image, count; // that of the first
    const i64 *places;        // in the planes of the image
    i64 below;                // how far it is to the next row
    template <class T> void take(const T *plane, T *to) const {
        // Holes go on below: what is taken next comes from far apart, and would be waited for.
        for (i64 i = 0; i < count; i += 64 / sizeof(T)) __builtin_prefetch(plane + places[i] + below);
        __builtin_prefetch(plane + places[count - 1] + below);
        if (places[count - 1] - places[0] == count - 1) Vector<T>::copy(plane + places[0], count, to);
        else for (i64 i = 0; i < count; i++) to[i] = plane[places[i]];
    }
};

// f(run) for all pixels in the table.
template <class T, class F> void each_run(const Problem<T> &p, F f) {
    const i64 height = p.seen(0), width = p.seen(1);
#pragma omp parallel num_threads(int(p.threads))
    {
        std::vector<i64> places(p.width + 1);
#pragma omp for schedule(static)
        for (i64 item = 0; item < p.batch * height; item++) {
            const i64 image = item / height, y = item % height;
            const auto *line = p.number + (image * p.padded[0] + y + p.before[0]) * p.padded[1] + p.before[1];
            i64 count = 0;
            for (i64 x = 0; x < width; x++) places[count] = y * p.width + x, count += line[x] > 0;
            for (i64 i = 0; i < count; i += RUN)
                f(Run{line[places[i] - y * p.width], image, std::min<i64>(RUN, count - i), &places[i], p.width});
        }
    }
}

// Fill `number` and `touching`, which are zeros.
template <class T> void number_pixels(const Problem<T> &p) {
    std::int32_t last = 0;
    const i64 width = p.seen(1);
    for (i64 image = 0; image < p.batch; image++)
        for (i64 y = 0; y < p.seen(0); y++) {
            const auto *missing = p.missing + (image * p.height + y) * p.width;
            const i64 to = (image * p.padded[0] + y + p.before[0]) * p.padded[1] + p.before[1];
            std::copy(missing, missing + width, p.touching + to);
            std::int32_t *__restrict number = p.number + to;
            for (i64 x = 0; x < width; x++) {
                const bool listed = missing[x] | p.all;
                last += listed;
                number[x] = listed ? last : 0;
            }
        }
}

// largest = max(largest, the deviation) of RUN numbers; infinity where that is no number.
template <bool SQUARED, class T> [[gnu::noinline]] void compare(const T *__restrict values, T *__restrict largest) {
    for (int i = 0; i < RUN; i++) {
        T size = SQUARED ? std::sqrt(values[i]) : std::fabs(values[i]);
        size = size >= 0 ? size : std::numeric_limits<T>::infinity();
        largest[i] = largest[i] < size ? size : largest[i];
    }
}

template <class T> [[gnu::noinline]] bool in_range(const T *sizes) { // of RUN
    const bool single = sizeof(T) == sizeof(float);
    const T least = single ? 0x1p-45 : 0, most = single ? 0x1p30 : std::numeric_limits<T>::max();
    int outside = 0;
    for (int i = 0; i < RUN; i++) outside |= (sizes[i] != 0) & ((sizes[i] < least) | (sizes[i] > most));
    return !outside;
}

// Fill `number`, `touching` (both are zeros) and `table`; whether no square of the sources leaves the range of float.
template <class T> bool pack(const Problem<T> &p) {
    number_pixels(p);
    const i64 plane = p.height * p.width, row = p.channels * p.sources();
    const bool partly = p.planes > 1 || p.all; // whether pixels in the table may be known
    bool good = true;
    each_run(p, [&](const Run &run) {
        bool fits = true;
        T *to = p.table + run.number * row, values[RUN] = {};
        const auto put = [&] { // the sources of a pixel stand side by side
            for (i64 i = 0; i < run.count; i++) to[i * row] = values[i];
            to++;
        };
        for (i64 c = 0; c < p.channels; c++) {
            T largest[RUN] = {};
            const auto *known = p.observed + (run.image * p.planes + (p.planes > 1 ? c : 0)) * plane;
            for (i64 k = 0; k < p.components; k++)
                for (i64 l = -1; l < p.rank; l++) {
                    const i64 of = run.image * p.components + k;
                    run.take(l < 0 ? p.noise + (of * p.channels + c) * plane
                                   : p.factors + ((of * p.rank + l) * p.channels + c) * plane, values);
                    for (i64 i = 0; partly && i < run.count; i++)
                        if (known[run.places[i]]) values[i] = 0;
                    l < 0 ? compare<true>(values, largest) : compare<false>(values, largest);
                    put();
                }
            fits &= in_range(largest);
            for (i64 k = 0; k < p.components - 1; k++) {
                run.take(p.apart + ((run.image * (p.components - 1) + k) * p.channels + c) * plane, values);
                put();
            }
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
    const i64 plane = p.height * p.width, row = p.channels * p.sources();
    each_run(p, [&](const Run &run) {
        const T *from = p.grad_table + run.number * row;
        const auto put = [&](T *to, const std::uint8_t *known) {
            for (i64 i = 0; i < run.count; i++)
                if (!known || !known[run.places[i]]) to[run.places[i]] = from[i * row];
            from++;
        };
        for (i64 c = 0; c < p.channels; c++) {
            const auto *known = p.observed + (run.image * p.planes + (p.planes > 1 ? c : 0)) * plane;
            for (i64 k = 0; k < p.components; k++)
                for (i64 l = -1; l < p.rank; l++) {
                    const i64 of = run.image * p.components + k;
                    put(l < 0 ? p.grad_noise + (of * p.channels + c) * plane
                              : p.grad_factors + ((of * p.rank + l) * p.channels + c) * plane, known);
                }
            for (i64 k = 0; k < p.components - 1; k++)
                put(p.grad_apart + ((run.image * (p.components - 1) + k) * p.channels + c) * plane, nullptr);
        }
    });
}

bool is_narrow(const Problem<float> &p) { return p.per_group() <= Vector<float>::lanes; }

} // namespace

extern "C" {
int pack_float(const Problem<float> *p) { return pack(*p); }
int pack_double(const Problem<double> *p) { return pack(*p); }
void unpack_float(const Problem<float> *p) { unpack(*p); }
void unpack_double(const Problem<double> *p) { unpack(*p); }
// Double precision is for comparing: it does with one kind of kernel, which is compiled sooner than two.
void forward_float(const Problem<float> *p) { is_narrow(*p) ? forward<float, 1>(*p) : forward<float, 2>(*p); }
void forward_double(const Problem<double> *p) { forward<double, 1>(*p); }
void backward_float(const Problem<float> *p) { is_narrow(*p) ? backward<float, 1>(*p) : backward<float, 2>(*p); }
void backward_double(const Problem<double> *p) { backward<double, 1>(*p); }
}
