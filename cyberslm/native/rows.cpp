// What is done number by number between the products of a block, forward and backward, each in one pass over its rows:
//
//     norm     s = x + added    y = s r gain    r = 1 / sqrt(mean(s^2) + eps)
//     gated    y = act(gate) up                 act = SiLU, GELU
//     turned   y_i = x_i cos_i + x_p sin_i      p the partner of channel i (rotary positions)
//
// Numbers come in fp32 or bf16, are worked on in fp32 and rounded once. Rows are shared out to threads, and what is summed
// over rows, the gradient of a gain, is summed in blocks of a fixed size and these in order: the number of threads changes
// nothing.

#include <vector>

#include "matrix.h"

extern "C" {

struct Norm {  // rows one behind the other; null: there is none
    const void *x, *added, *grad, *grad_total;
    const float* gain;
    void *total, *y, *dx, *d_added;
    float *inverse, *d_gain;
    int64_t rows, width, kind, y_kind, threads;  // y_kind: also of added, grad and d_added
    double eps;
};

struct Gated {
    const void *gate, *up, *grad;
    void *y, *d_gate, *d_up;
    int64_t count, act, kind, threads;  // act: 0 SiLU, 1 GELU; without grad, y is made
};

struct Turned {  // (B, T, H, width); distances in numbers, a vector's own lie together, as do all of y
    const void* x;
    void* y;
    const float *cos, *sin;  // (T, width) each, (B, T, width) where table_row isn't 0
    int64_t batch, tokens, heads, width, row, token, head, table_row, interleaved, back, kind, threads;
};
}

namespace {

constexpr int64_t BLOCK = 128;        // rows whose part of a gain's gradient is summed first
constexpr int64_t PIECE = 4096;       // numbers that a thread takes at once
constexpr int64_t WORTH = 4 * PIECE;  // numbers from which several threads are worth it

enum Act { SILU, GELU };

// work(i, count) for whole vectors of numbers, then for the rest.
template <class Work>
inline void each_vector(int64_t width, Work&& work) {
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) work(i, int64_t(LANES));
    if (i < width) work(i, width - i);
}

template <class Cell>
inline const Cell* cells(const void* at, int64_t first) {
    return at ? static_cast<const Cell*>(at) + first : nullptr;
}
template <class Cell>
inline Cell* cells(void* at, int64_t first) {
    return at ? static_cast<Cell*>(at) + first : nullptr;
}

template <class Cell, class Half>
void norm_row(const Norm& n, int64_t row) {
    const int64_t first = row * n.width;
    const Cell* x = cells<Cell>(n.x, first);
    Floats squares{};
    if (n.added) {
        const Half* const added = cells<Half>(n.added, first);
        Cell* const total = cells<Cell>(n.total, first);
        each_vector(n.width, [&](int64_t i, int64_t count) { give(total + i, take(x + i, count) + take(added + i, count), count); });
        x = total;
    }
    each_vector(n.width, [&](int64_t i, int64_t count) {
        const Floats v = take(x + i, count);
        squares += v * v;
    });
    const float inverse = 1.0f / std::sqrt(sum(squares) / float(n.width) + float(n.eps));
    n.inverse[row] = inverse;
    Half* const y = cells<Half>(n.y, first);
    each_vector(n.width, [&](int64_t i, int64_t count) {
        give(y + i, take(x + i, count) * inverse * take(n.gain + i, count), count);
    });
}

// With h = x r: dx = r (gain g - h mean(gain g h)), and a gain's gradient is the sum of g h.
template <class Cell, class Half>
void norm_row_back(const Norm& n, int64_t row, float* d_gain) {
    const int64_t first = row * n.width;
    const Cell* const x = cells<Cell>(n.x, first);
    const Half* const grad = cells<Half>(n.grad, first);
    const Cell* const grad_total = cells<Cell>(n.grad_total, first);
    Cell* const dx = cells<Cell>(n.dx, first);
    Half* const d_added = cells<Half>(n.d_added, first);
    const float inverse = n.inverse[row];
    Floats along{};
    each_vector(n.width, [&](int64_t i, int64_t count) {
        const Floats part = take(x + i, count) * inverse * take(grad + i, count);
        along += part * take(n.gain + i, count);
        store(d_gain + i, load<Floats>(d_gain + i) + part);
    });
    const float mean = sum(along) / float(n.width);
    each_vector(n.width, [&](int64_t i, int64_t count) {
        const Floats h = take(x + i, count) * inverse;
        Floats d = (take(n.gain + i, count) * take(grad + i, count) - h * mean) * inverse;
        if (grad_total) d += take(grad_total + i, count);
        give(dx + i, d, count);
        if (d_added) give(d_added + i, d, count);
    });
}

template <class Cell, class Half>
void norm_all(const Norm& n) {
#pragma omp parallel for num_threads(n.threads) schedule(static) if (n.rows * n.width > WORTH)
    for (int64_t row = 0; row < n.rows; ++row) norm_row<Cell, Half>(n, row);
}

template <class Cell, class Half>
void norm_all_back(const Norm& n) {
    const int64_t blocks = (n.rows + BLOCK - 1) / BLOCK, wide = padded(n.width);
    std::vector<float> parts(blocks * wide);
#pragma omp parallel for num_threads(n.threads) schedule(static) if (n.rows * n.width > WORTH)
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t row = block * BLOCK; row < std::min(n.rows, (block + 1) * BLOCK); ++row)
            norm_row_back<Cell, Half>(n, row, &parts[block * wide]);
    std::fill(n.d_gain, n.d_gain + n.width, 0.0f);
    for (int64_t block = 0; block < blocks; ++block)
        for (int64_t i = 0; i < n.width; ++i) n.d_gain[i] += parts[block * wide + i];
}

struct Silu {  // x s, s = 1 / (1 + exp(-x)); its slope is s (1 + x (1 - s))
    Floats value, slope;
    explicit Silu(Floats x) {
        const Floats s = 1.0f / (1.0f + exp(-x));
        value = x * s;
        slope = s * (1.0f + x * (1.0f - s));
    }
};

struct Gelu {  // x P(x), P the normal distribution, by its tail: P(-a) = exp(-a^2 / 2) q(1 / (1 + 0.305 a)), to 1e-7 of it
    Floats value, slope;
    explicit Gelu(Floats x) {
        const Floats down = exp(x * x * -0.5f), t = 1.0f / (1.0f + 0.305f * (x < 0 ? -x : x));
        Floats q = splat(0.0367506933f);
        for (float c : {-0.153211019f, 0.18611581f, -0.0383589311f, 0.121232126f, 0.103354533f, 0.122477846f, 0.121638989f})
            q = q * t + c;
        const Floats tail = down * q * t, below = x < 0 ? tail : 1.0f - tail;
        value = x * below;
        slope = below + x * down * 0.398942280f;
    }
};

template <class Act, class Cell>
void gated_all(const Gated& g) {
    const Cell *const gate = cells<Cell>(g.gate, 0), *const up = cells<Cell>(g.up, 0), *const grad = cells<Cell>(g.grad, 0);
    Cell *const y = cells<Cell>(g.y, 0), *const d_gate = cells<Cell>(g.d_gate, 0), *const d_up = cells<Cell>(g.d_up, 0);
#pragma omp parallel for num_threads(g.threads) schedule(static) if (g.count > WORTH)
    for (int64_t first = 0; first < g.count; first += PIECE)
        each_vector(std::min(PIECE, g.count - first), [&](int64_t offset, int64_t count) {
            const int64_t i = first + offset;
            const Act act(take(gate + i, count));
            const Floats u = take(up + i, count);
            if (!grad) return give(y + i, act.value * u, count);
            const Floats d = take(grad + i, count);
            give(d_gate + i, d * u * act.slope, count);
            give(d_up + i, d * act.value, count);
        });
}

inline Floats swapped(Floats x) {  // neighbours in each other's place
    typedef uint64_t Pairs __attribute__((vector_size(LANES * 4)));
    const Pairs both = bits<Pairs>(x);
    return bits<Floats>(both << 32 | both >> 32);
}

template <class Cell>
void turn_vector(const Turned& t, const Cell* x, Cell* y, const float* cos, const float* sin) {
    const float sign = t.back ? -1.0f : 1.0f;
    if (t.interleaved)
        return each_vector(t.width, [&](int64_t i, int64_t count) {
            const Floats v = take(x + i, count);
            give(y + i, v * take(cos + i, count) + swapped(v) * (take(sin + i, count) * sign), count);
        });
    const int64_t half = t.width / 2;
    each_vector(half, [&](int64_t i, int64_t count) {
        const Floats a = take(x + i, count), b = take(x + half + i, count);
        const Floats low = take(sin + i, count) * sign, high = take(sin + half + i, count) * sign;
        give(y + i, a * take(cos + i, count) + b * low, count);
        give(y + half + i, b * take(cos + half + i, count) + a * high, count);
    });
}

template <class Cell>
void turn_all_heads(const Turned& t) {
#pragma omp parallel for num_threads(t.threads) schedule(static) if (t.batch * t.tokens * t.heads * t.width > WORTH)
    for (int64_t item = 0; item < t.batch * t.tokens; ++item) {
        const int64_t row = item / t.tokens, token = item % t.tokens, table = row * t.table_row + token * t.width;
        for (int64_t head = 0; head < t.heads; ++head)
            turn_vector(t, cells<Cell>(t.x, row * t.row + token * t.token + head * t.head),
                        cells<Cell>(t.y, (item * t.heads + head) * t.width), t.cos + table, t.sin + table);
    }
}

}  // namespace

extern "C" {

void norm_forward(const Norm* n) {
    n->kind == BF16 ? norm_all<uint16_t, uint16_t>(*n) : n->y_kind == BF16 ? norm_all<float, uint16_t>(*n) : norm_all<float, float>(*n);
}

void norm_backward(const Norm* n) {
    n->kind == BF16     ? norm_all_back<uint16_t, uint16_t>(*n)
    : n->y_kind == BF16 ? norm_all_back<float, uint16_t>(*n)
                        : norm_all_back<float, float>(*n);
}

void gated(const Gated* g) {
    if (g->kind == BF16)
        g->act == SILU ? gated_all<Silu, uint16_t>(*g) : gated_all<Gelu, uint16_t>(*g);
    else
        g->act == SILU ? gated_all<Silu, float>(*g) : gated_all<Gelu, float>(*g);
}

void turned(const Turned* t) { t->kind == BF16 ? turn_all_heads<uint16_t>(*t) : turn_all_heads<float>(*t); }
}
