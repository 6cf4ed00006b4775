// E[ReLU] in the windows that touch a missing pixel, and its gradients; ReLU in all others. See compiled.py.
//
// One row of the response at a time: its touched windows are found, and their sources go through the filters with a
// lane of a vector for every filter. What is known has no sources and is skipped. The sources of a pixel and channel
// stand side by side in a table: for every component its noise and its factors, then the differences of the means of
// components 1, 2, ... from the first. Nothing but the response is written that would not stay in a cache; the
// backward pass computes the moments again.

#include <omp.h>

#include "rows.h"

namespace {

// All rows, by all threads ----------------------------------------------------------------------------------------

template <class T, int W> void forward(const Problem<T> &p) {
    auto bank = blocks<T, W>(p, false), squares = squared(bank);
#pragma omp parallel num_threads(int(p.threads))
    {
        Rows<T, W> rows(p, bank, squares);
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

bool in_range(float size) { return size == 0 || (size >= 0x1p-45f && size <= 0x1p30f); }
bool in_range(double) { return true; }

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
