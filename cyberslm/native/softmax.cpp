// Softmax cross-entropy of rows of logits, whose gradient comes in their place.
//
//     z = c tanh(x / c) or x    s = log(sum exp z)    loss = s - z_y    penalty = w s^2
//     d(loss + penalty)/dx = ((1 + 2 w s) softmax(z) - onehot(y)) (1 - (z / c)^2)
//
// A row is read from memory once and written once. In between it lies in fp32, first its z and then their exponentials,
// in a line that stays in the second cache. Each row is made by one thread, and losses are summed row after row, so that
// nothing depends on how many threads there are.

#include <vector>

#include "matrix.h"

extern "C" {

struct Logits {
    void* at;                // (rows, vocabulary) of `kind`
    const int64_t* targets;  // (rows), each below `vocabulary`
    double loss, penalty;    // results: sums over the rows
    double softcap, z_loss;  // softcap 0: none
    int64_t rows, vocabulary, kind, learns, threads;  // learns: gradients are wanted
};
}

namespace {

inline Floats larger(Floats x, Floats y) { return x > y ? x : y; }

inline float largest(Floats x) {
    float top = x[0];
    for (int lane = 1; lane < LANES; ++lane) top = x[lane] > top ? x[lane] : top;
    return top;
}

inline Floats tanh(Floats x) {
    const Floats e = exp(x * 2.0f);
    return x > 20.0f ? splat(1.0f) : (e - 1.0f) / (e + 1.0f);
}

// f(first, cells) for the vectors of a row; the last is filled up with -inf.
template <class Cell, class F>
inline void each_vector(Cell* row, int64_t size, F f) {
    int64_t i = 0;
    for (; i + LANES <= size; i += LANES) f(i, row + i);
    if (i == size) return;
    Cell last[LANES];
    give(last, splat(-INFINITY));
    std::memcpy(last, row + i, (size - i) * sizeof(Cell));
    f(i, last);
    std::memcpy(row + i, last, (size - i) * sizeof(Cell));
}

// `z` is the line, `out` gets loss and penalty.
template <bool capped, class Cell>
inline void one_row(const Logits& a, Cell* row, int64_t target, float* z, float* out) {
    const float cap = float(a.softcap), weight = float(a.z_loss);
    Floats tops = splat(-INFINITY);
    each_vector(row, a.vocabulary, [&](int64_t i, const Cell* cells) {
        __builtin_prefetch(reinterpret_cast<const char*>(cells) + AHEAD, 0, 2);
        Floats x = take(cells);
        if constexpr (capped) x = cap * tanh(x / cap);
        store(z + i, x);
        tops = larger(x, tops);
    });
    const int64_t room = padded(a.vocabulary);
    std::fill(z + a.vocabulary, z + room, -INFINITY);
    const float own = z[target], top = largest(tops);
    Floats totals{};
    for (int64_t i = 0; i < room; i += LANES) {
        const Floats e = exp(load<Floats>(z + i) - top);
        if (a.learns) store(z + i, e);
        totals += e;
    }
    const float total = sum(totals), normaliser = top + std::log(total);
    out[0] = normaliser - own, out[1] = weight * normaliser * normaliser;
    if (!a.learns) return;
    const float factor = (1 + 2 * weight * normaliser) / total;
    each_vector(row, a.vocabulary, [&](int64_t i, Cell* cells) {
        Floats slope = load<Floats>(z + i) * factor;
        if constexpr (capped) {
            const Floats bent = tanh(take(cells) / cap);
            slope *= 1.0f - bent * bent;
        }
        give(cells, slope);
    });
    const float bent = capped ? own / cap : 0.0f;
    put(row + target, (z[target] * factor - 1) * (1 - bent * bent));
}

template <class Cell>
void all_rows(Logits& a) {
    std::vector<float> found(2 * a.rows);
#pragma omp parallel num_threads(a.threads)
    {
        std::vector<float> line(padded(a.vocabulary));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < a.rows; ++row) {
            Cell* const at = static_cast<Cell*>(a.at) + row * a.vocabulary;
            const auto judge = a.softcap ? one_row<true, Cell> : one_row<false, Cell>;
            judge(a, at, a.targets[row], line.data(), &found[2 * row]);
        }
    }
    a.loss = a.penalty = 0;
    for (int64_t row = 0; row < a.rows; ++row) a.loss += found[2 * row], a.penalty += found[2 * row + 1];
}

}  // namespace

extern "C" void softmax_loss(Logits* a) { a->kind == BF16 ? all_rows<uint16_t>(*a) : all_rows<float>(*a); }
