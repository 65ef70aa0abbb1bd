// A matrix kept in few bits or many, the rows of a batch that it meets, and where results go.

#pragma once

#include <omp.h>

#include <type_traits>

#include "cells.h"

struct Matrix {  // (rows, columns), row after row; bias and scales may be null
    const void* weight;
    const float* scales;
    const float* bias;
    int64_t rows, columns, kind;  // kind: 0 fp32, 1 bf16, 2 int8, 3 int4
};

namespace {

constexpr int FEW = 4;       // rows up to which products are taken row by row ...
constexpr int TILE = 4;      // ... so many weight rows at once
constexpr int AHEAD = 8192;  // bytes that weights are asked for in advance then
#ifdef __AVX512F__
constexpr int TOTALS = 16;  // vectors of sums that fit the registers
#else
constexpr int TOTALS = 8;
#endif

enum Kind { FP32, BF16, INT8, INT4 };

inline int64_t padded(int64_t count, int64_t unit = LANES) { return (count + unit - 1) / unit * unit; }

// Features of a batch's rows: (feature, row) is at[feature * step + row * stride]. Few rows lie one behind the other,
// many side by side in lanes.
struct Rows {
    float* at;
    int64_t step, stride;
};

// Where the results of a product go: in place of what is there, or added to it.
struct Out {
    Rows rows;
    int64_t count;  // rows
    bool add;
    void put(int64_t feature, int64_t row, float value) const {
        float& cell = rows.at[feature * rows.step + row * rows.stride];
        cell = add ? cell + value : value;
    }
};

inline float scale_of(const Matrix& m, int64_t row) { return m.kind == INT8 ? m.scales[row] : 1.0f; }
inline float bias_of(const Matrix& m, int64_t row) { return m.bias ? m.bias[row] : 0.0f; }

template <int kind>
constexpr int BITS = kind == FP32 ? 32 : kind == BF16 ? 16 : kind == INT8 ? 8 : 4;

// Ask for `count` weights that come `ahead` bytes later, into the first or the second cache.
template <int kind, int ahead, int level>
inline void ask_for(const Matrix& m, int64_t row, int64_t i, int count) {
    const char* at = static_cast<const char*>(m.weight) + (row * m.columns + i) * BITS<kind> / 8 + ahead;
    for (int byte = 0; byte < count * BITS<kind> / 8; byte += 64) __builtin_prefetch(at + byte, 0, 4 - level);
}

template <int W>
struct Wide {
    typedef float Vector __attribute__((vector_size(W * 4)));
};

// a b + c, rounded once where the processor can: where a row is to have the same numbers by two loops, to the bit, which
// of them joins a product with a sum can't be left to the compiler.
inline float joined(float a, float b, float c) {
#if defined(__FMA__)
    return __builtin_fmaf(a, b, c);
#else
    return a * b + c;
#endif
}
template <class Numbers>
inline Numbers joined(Numbers a, Numbers b, Numbers c) {
#if defined(__FMA__)
    if constexpr (sizeof(Numbers) == 16) return Numbers(_mm_fmadd_ps(__m128(a), __m128(b), __m128(c)));
    if constexpr (sizeof(Numbers) == 32) return Numbers(_mm256_fmadd_ps(__m256(a), __m256(b), __m256(c)));
#if defined(__AVX512F__)
    if constexpr (sizeof(Numbers) == 64) return Numbers(_mm512_fmadd_ps(__m512(a), __m512(b), __m512(c)));
#endif
#endif
    return a * b + c;
}

// Results of W rows that lie side by side, from row b on.
template <int W>
inline void put_lanes(int64_t feature, int64_t b, typename Wide<W>::Vector results, const Out& out) {
    if (out.rows.stride == 1 && out.rows.step > 1) {  // side by side too, with room for whole vectors
        float* const cells = out.rows.at + feature * out.rows.step + b;
        if (out.add) results += load<typename Wide<W>::Vector>(cells);
        std::memcpy(cells, &results, sizeof results);
        return;
    }
    for (int lane = 0; lane < W && b + lane < out.count; ++lane) out.put(feature, b + lane, results[lane]);
}

template <int n>
using Number = std::integral_constant<int, n>;

// work(width, vectors, b) for all of `step` rows that lie side by side.
template <class Work>
inline void each_width(int64_t step, Work&& work) {
    int64_t b = 0;
    for (; b + 2 * LANES <= step; b += 2 * LANES) work(Number<LANES>{}, Number<2>{}, b);
    for (; b + LANES <= step; b += LANES) work(Number<LANES>{}, Number<1>{}, b);
    for (; b < step; b += 8) work(Number<8>{}, Number<1>{}, b);
}

// work(number, b) for all of `count` rows that lie one behind the other.
template <class Work>
inline void each_few(int64_t count, Work&& work) {
    for (int64_t b = 0; b < count; b += TILE) switch (count - b) {
            case 1: work(Number<1>{}, b); break;
            case 2: work(Number<2>{}, b); break;
            case 3: work(Number<3>{}, b); break;
            default: work(Number<TILE>{}, b);
        }
}

struct Share {  // the part of [0, count) that falls to this thread
    int64_t first, last;
    explicit Share(int64_t count) {
        const int64_t team = omp_get_num_threads(), me = omp_get_thread_num();
        first = count * me / team;
        last = count * (me + 1) / team;
    }
};

}  // namespace
