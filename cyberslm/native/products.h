// Products of a matrix, kept in few bits or many, with the rows of a batch.
//
// Few rows lie one behind the other and are taken row by row (`dots`): then reading the weights is what takes the time,
// so that they are asked for in advance. Many lie side by side in the lanes of a vector (`lanes`), and a weight that
// was widened serves all of them. Sums are fp32. Processors that multiply pairs of bf16 do so with many rows and bf16
// weights; on those, what meets such weights is rounded to bf16 first (`round_rows`), with few rows too, so that a row has
// the same numbers alone as in company, but for the order of sums. What meets int8 weights is rounded to int8 (bytes.h).

#pragma once

#include "bytes.h"

namespace {

constexpr int GROUP = 32;   // numbers of an int4 row that share a scale
constexpr int CHUNK = 256;  // columns that are widened at once for many rows
constexpr int FAR = TOTALS * CHUNK / 2;  // bytes asked for in advance for many rows, times the bits of a weight

// LANES weights of one row from column i on, without the scale of an int8 row.
template <int kind>
inline Floats weights(const Matrix& m, int64_t row, int64_t i) {
    const int64_t at = row * m.columns + i;
    if constexpr (kind == FP32) {
        return load<Floats>(static_cast<const float*>(m.weight) + at);
    } else if constexpr (kind == BF16) {
        return bits<Floats>(whole(static_cast<const uint16_t*>(m.weight) + at) << 16);
    } else if constexpr (kind == INT8) {
        return __builtin_convertvector(whole(static_cast<const int8_t*>(m.weight) + at), Floats);
    } else {  // the first half of a group is in low nibbles, the second in high ones
        const int64_t group = at / GROUP, within = at % GROUP;
        const Ints both = whole(static_cast<const int8_t*>(m.weight) + group * (GROUP / 2) + within % (GROUP / 2));
        const Ints nibble = (within < GROUP / 2 ? both : both >> 4) & 15;
        return __builtin_convertvector(nibble - 8, Floats) * m.scales[group];
    }
}

// The last columns of a row, zeros behind. int4 rows have none: their columns are whole groups.
template <int kind>
inline Floats last_weights(const Matrix& m, int64_t row, int64_t i) {
    Floats tail{};
    for (int64_t j = i; j < m.columns; ++j) {
        const int64_t at = row * m.columns + j;
        if constexpr (kind == FP32) tail[j - i] = static_cast<const float*>(m.weight)[at];
        if constexpr (kind == BF16) tail[j - i] = widen(static_cast<const uint16_t*>(m.weight)[at]);
        if constexpr (kind == INT8) tail[j - i] = static_cast<const int8_t*>(m.weight)[at];
    }
    return tail;
}

#ifdef __AVX512BF16__
constexpr bool HAS_PAIRS = true;

// Many rows of bf16 weights: two neighbours at once, with the row's numbers rounded to bf16 too.
inline Floats add_pairs(Floats total, uint32_t weights, const uint32_t* x) {
    return Floats(_mm512_dpbf16_ps(__m512(total), __m512bh(_mm512_set1_epi32(weights)), load<__m512bh>(x)));
}
inline Wide<8>::Vector add_pairs(Wide<8>::Vector total, uint32_t weights, const uint32_t* x) {
    return Wide<8>::Vector(_mm256_dpbf16_ps(__m256(total), __m256bh(_mm256_set1_epi32(weights)), load<__m256bh>(x)));
}
inline void store_pairs(uint32_t* to, Floats first, Floats second) {
    const __m512bh both = _mm512_cvtne2ps_pbh(__m512(second), __m512(first));
    std::memcpy(to, &both, sizeof both);
}
inline void store_pairs(uint32_t* to, const float* first, const float* second) {  // sixteen from each, interleaved
    const __m512bh both = _mm512_cvtne2ps_pbh(_mm512_loadu_ps(second), _mm512_loadu_ps(first));
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6,
                                           21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    _mm512_storeu_si512(to, _mm512_permutexvar_epi16(order, __m512i(both)));
}
// 2 LANES bf16 weights times as many numbers of one row.
inline __m512bh two(const float* x) { return _mm512_cvtne2ps_pbh(_mm512_loadu_ps(x + LANES), _mm512_loadu_ps(x)); }
inline Floats add_products(Floats total, const uint16_t* weights, __m512bh x) {
    return Floats(_mm512_dpbf16_ps(__m512(total), load<__m512bh>(weights), x));
}
#else
constexpr bool HAS_PAIRS = false;
inline float two(const float* x) { return *x; }
inline Floats add_products(Floats total, const uint16_t*, float) { return total; }
inline Floats add_pairs(Floats total, uint32_t, const uint32_t*) { return total; }
inline void store_pairs(uint32_t*, Floats, Floats) {}
inline void store_pairs(uint32_t*, const float*, const float*) {}
#endif

// Weight rows [row, row + R) times C rows of x, from its row b on.
template <int kind, int R, int C>
void dots(const Matrix& m, int64_t row, const Rows& x, int64_t b, const Out& out) {
    Floats totals[R][C] = {};
    const float* from = x.at + b * x.stride;
    int64_t i = 0;
    if constexpr (HAS_PAIRS && kind == BF16)
        for (; i + 2 * LANES <= m.columns; i += 2 * LANES) {
            ask_for<kind, AHEAD, 1>(m, row + R, i * R, R * 2 * LANES);
            const uint16_t* w = static_cast<const uint16_t*>(m.weight) + row * m.columns + i;
            for (int c = 0; c < C; ++c) {
                const auto pairs = two(from + c * x.stride + i);
                for (int r = 0; r < R; ++r) totals[r][c] = add_products(totals[r][c], w + r * m.columns, pairs);
            }
        }
    for (; i + LANES <= m.columns; i += LANES) {
        Floats w[R];
        for (int r = 0; r < R; ++r) w[r] = weights<kind>(m, row + r, i);
        ask_for<kind, AHEAD, 1>(m, row + R, i * R, R * LANES);
        for (int c = 0; c < C; ++c) {
            const Floats value = load<Floats>(from + c * x.stride + i);
            for (int r = 0; r < R; ++r) totals[r][c] += w[r] * value;
        }
    }
    if (i < m.columns) {
        for (int r = 0; r < R; ++r) {
            const Floats w = last_weights<kind>(m, row + r, i);
            for (int c = 0; c < C; ++c) totals[r][c] += w * load<Floats>(from + c * x.stride + i);
        }
    }
    for (int r = 0; r < R; ++r)
        for (int c = 0; c < C; ++c)
            out.put(row + r, b + c, sum(totals[r][c]) * scale_of(m, row + r) + bias_of(m, row + r));
}

template <int kind, int C>
void all_dots(const Matrix& m, int64_t first, int64_t last, const Rows& x, int64_t b, const Out& out) {
    int64_t row = first;
    for (; row + TILE <= last; row += TILE) dots<kind, TILE, C>(m, row, x, b, out);
    for (; row < last; ++row) dots<kind, 1, C>(m, row, x, b, out);
}

// Weights of one row from column i on, `count` of them with zeros behind up to a whole vector.
template <int kind>
inline void unpack(const Matrix& m, int64_t row, int64_t i, int64_t count, float* to) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        ask_for<kind, FAR * BITS<kind>, 2>(m, row, i + j, LANES);
        store(to + j, weights<kind>(m, row, i + j));
    }
    if (j < count) store(to + j, last_weights<kind>(m, row, i + j));
}

// bf16 weights of one row from column i on, as words of two, an odd last one with zeros.
inline void unpack_pairs(const Matrix& m, int64_t row, int64_t i, int64_t count, uint32_t* to) {
    for (int64_t j = 0; j < count; j += 2 * LANES) ask_for<BF16, FAR * BITS<BF16>, 2>(m, row, i + j, 2 * LANES);
    to[(count - 1) / 2] = 0;
    std::memcpy(to, static_cast<const uint16_t*>(m.weight) + row * m.columns + i, 2 * count);
}

// x (features, step) as pairs of neighbouring features, (features / 2, step), an odd last one with zeros.
void pair_up(const Rows& x, int64_t features, uint32_t* to) {
    const float zeros[16] = {};
    for (int64_t i = 0; i < features; i += 2)
        for (int64_t b = 0; b < x.step; b += 16) {
            const float* first = x.at + i * x.step + b;
            store_pairs(to + i / 2 * x.step + b, first, i + 1 < features ? first + x.step : zeros);
        }
}

// `lanes` with x from `pair_up`.
template <int W, int V, int R>
void pair_lanes(const Matrix& m, int64_t row, const uint32_t* x, int64_t step, int64_t b, const Out& out) {
    typedef typename Wide<W>::Vector Vector;
    Vector totals[R][V] = {};
    const auto add = [&](const uint32_t* from, int64_t pairs, auto&& word) {
        for (int64_t j = 0; j < pairs; ++j, from += step)
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) totals[r][v] = add_pairs(totals[r][v], word(r, j), from + v * W);
    };
    const bool as_they_are = W == LANES && m.columns % 2 == 0;
    alignas(64) uint32_t w[R][CHUNK / 2 + LANES];
    for (int64_t i = 0; i < m.columns; i += CHUNK) {
        const int64_t count = m.columns - i < CHUNK ? m.columns - i : CHUNK;
        const uint32_t* from = x + i / 2 * step + b;
        if (as_they_are) {
            const uint16_t* const first = static_cast<const uint16_t*>(m.weight) + row * m.columns + i;
            for (int r = 0; r < R; ++r) ask_for<BF16, FAR * BITS<BF16>, 2>(m, row + r, i, int(count));
            add(from, count / 2, [&](int r, int64_t j) { return load<uint32_t>(first + r * m.columns + 2 * j); });
        } else {
            for (int r = 0; r < R; ++r) unpack_pairs(m, row + r, i, count, w[r]);
            add(from, (count + 1) / 2, [&](int r, int64_t j) { return w[r][j]; });
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            put_lanes<W>(row + r, b + v * W, totals[r][v] * scale_of(m, row + r) + bias_of(m, row + r), out);
}

template <int W, int V>
void all_pair_lanes(const Matrix& m, int64_t first, int64_t last, const uint32_t* x, int64_t step, int64_t b,
                    const Out& out) {
    int64_t row = first;
    for (; row + TOTALS / V <= last; row += TOTALS / V) pair_lanes<W, V, TOTALS / V>(m, row, x, step, b, out);
    for (; row < last; ++row) pair_lanes<W, V, 1>(m, row, x, step, b, out);
}

// Weight rows [row, row + R) times V vectors of W rows of x that lie side by side, from its row b on.
template <int kind, int W, int V, int R>
void lanes(const Matrix& m, int64_t row, const Rows& x, int64_t b, const Out& out) {
    typedef typename Wide<W>::Vector Vector;
    alignas(64) float w[R][CHUNK + LANES];  // not a power of two apart: they would evict each other
    Vector totals[R][V] = {};
    for (int64_t i = 0; i < m.columns; i += CHUNK) {
        const int64_t count = m.columns - i < CHUNK ? m.columns - i : CHUNK;
        for (int r = 0; r < R; ++r) unpack<kind>(m, row + r, i, count, w[r]);
        const float* from = x.at + i * x.step + b;
        for (int64_t j = 0; j < count; ++j, from += x.step) {
            Vector value[V];
            for (int v = 0; v < V; ++v) value[v] = load<Vector>(from + v * W);
            for (int r = 0; r < R; ++r)
                for (int v = 0; v < V; ++v) totals[r][v] += w[r][j] * value[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v)
            put_lanes<W>(row + r, b + v * W, totals[r][v] * scale_of(m, row + r) + bias_of(m, row + r), out);
}

template <int kind, int W, int V>
void all_lanes(const Matrix& m, int64_t first, int64_t last, const Rows& x, int64_t b, const Out& out) {
    int64_t row = first;
    for (; row + TOTALS / V <= last; row += TOTALS / V) lanes<kind, W, V, TOTALS / V>(m, row, x, b, out);
    for (; row < last; ++row) lanes<kind, W, V, 1>(m, row, x, b, out);
}

template <int kind>
void products(const Matrix& m, int64_t first, int64_t last, const Rows& x, const Out& out, uint32_t* room) {
    if (x.step == 1)
        return each_few(out.count, [&](auto count, int64_t b) { all_dots<kind, count>(m, first, last, x, b, out); });
    constexpr bool by_pairs = HAS_PAIRS && kind == BF16;
    if (by_pairs) pair_up(x, m.columns, room);
    each_width(x.step, [&](auto width, auto vectors, int64_t b) {
        if constexpr (by_pairs)
            all_pair_lanes<width, vectors>(m, first, last, room, x.step, b, out);
        else
            all_lanes<kind, width, vectors>(m, first, last, x, b, out);
    });
}

template <>
void products<INT8>(const Matrix& m, int64_t first, int64_t last, const Rows& x, const Out& out, uint32_t* room) {
    if (HAS_BYTES) return byte_products(m, first, last, x, out, room);
    const Rows rounded{reinterpret_cast<float*>(room), x.step, x.stride};
    round_rows_to_bytes(x, m.columns, out.count, rounded.at);
    if (x.step == 1)
        return each_few(out.count, [&](auto count, int64_t b) { all_dots<INT8, count>(m, first, last, rounded, b, out); });
    each_width(x.step, [&](auto width, auto vectors, int64_t b) {
        all_lanes<INT8, width, vectors>(m, first, last, rounded, b, out);
    });
}

inline bool takes_halves(const Matrix& m) { return HAS_PAIRS && m.kind == BF16; }

// `count` numbers to bf16, if m takes them so.
inline void round_rows(const Matrix& m, float* x, int64_t count) {
    if (!takes_halves(m)) return;
    for (int64_t i = 0; i < count; ++i) x[i] = widen(narrow(x[i]));
}

// Words that `multiply` needs for what it makes of `rows` rows, of which `side` lie side by side.
inline int64_t room_for_products(int64_t columns, int64_t rows, int64_t side) {
    return std::max(room_for_bytes(columns, side == 1 ? rows : side), (columns + 1) / 2 * side + 16);
}

// This thread's share of the weight rows of m times x.
inline void multiply(const Matrix& m, const Rows& x, const Out& out, uint32_t* room) {
    const Share share(m.rows);
    switch (m.kind) {
        case FP32: return products<FP32>(m, share.first, share.last, x, out, room);
        case BF16: return products<BF16>(m, share.first, share.last, x, out, room);
        case INT8: return products<INT8>(m, share.first, share.last, x, out, room);
        default: return products<INT4>(m, share.first, share.last, x, out, room);
    }
}

}  // namespace
