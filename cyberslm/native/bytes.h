// Products of int8 matrices with rows whose numbers are rounded to int8 as well, each BLOCK columns by a scale:
//
//     y = s_row sum_blocks( s_block sum_columns( w q ) )      s_block = max|x| / 127      q = x / s_block
//
// The inner sums are whole numbers, where the processor adds up four products of bytes at once, and blocks are added in
// order: a row has the same numbers in any company, to the bit. What isn't finite spoils its block's scale, and so its
// row's results. Processors without such instructions widen weights and what the rounded numbers stand
// for (`round_rows_to_bytes`).

#pragma once

#include "matrix.h"

namespace {

constexpr int BLOCK = 64, WORDS = BLOCK / 4;
constexpr float SMALLEST = 0x1p-100f;  // blocks of smaller numbers are zeros

inline int64_t blocks_of(int64_t columns) { return (columns + BLOCK - 1) / BLOCK; }

template <class Numbers>
struct Rounding {
    Numbers scale, factor;
    explicit Rounding(Numbers most)  // of numbers whose largest is that, or not finite where one of them isn't
        : scale(most / 127.0f), factor(most > SMALLEST ? 127.0f / most : most * 0.0f) {}
};

// Of `count` numbers, or vectors of them, `step` apart.
template <class Numbers>
Rounding<Numbers> rounding(const float* x, int64_t count, int64_t step) {
    Numbers most{}, odd{};
    for (int64_t i = 0; i < count; ++i) {
        const Numbers value = load<Numbers>(x + i * step), size = value < 0.0f ? -value : value;
        odd += value * 0.0f;
        most = size > most ? size : most;
    }
    return Rounding<Numbers>(most + odd);
}

// To the nearest whole number, up to 2^22; a compiler may join it with a product before it.
template <class Numbers>
inline Numbers nearest(Numbers x) {
    return (x + 0x1.8p23f) - 0x1.8p23f;
}

// x as its rounded numbers in fp32, laid out like it.
inline void round_rows_to_bytes(const Rows& x, int64_t columns, int64_t count, float* to) {
    const auto each = [&](auto numbers, const float* from, int64_t step, float* at) {
        typedef decltype(numbers) Numbers;
        for (int64_t k = 0; k < columns; k += BLOCK) {
            const int64_t size = std::min<int64_t>(BLOCK, columns - k);
            const auto by = rounding<Numbers>(from + k * step, size, step);
            for (int64_t i = k; i < k + size; ++i) {
                const Numbers value = nearest(load<Numbers>(from + i * step) * by.factor) * by.scale;
                std::memcpy(at + i * step, &value, sizeof value);
            }
        }
    };
    if (x.step == 1)
        for (int64_t b = 0; b < count; ++b) {
            each(0.0f, x.at + b * x.stride, 1, to + b * x.stride);
            std::fill(to + b * x.stride + columns, to + b * x.stride + padded(columns), 0.0f);
        }
    else
        for (int64_t b = 0; b < x.step; b += 8) each(Wide<8>::Vector{}, x.at + b, x.step, to + b);
}

// Rounded rows. One behind the other: words (row, block, WORDS) and scales (row, block). Side by side: words (block, WORDS,
// row), scales and starts (block, row).
struct Bytes {
    uint32_t* words;
    float* scales;
    int32_t* starts;  // -128 sum q, what weights + 128 add too much
    int64_t step;
    Bytes(uint32_t* at, int64_t columns, int64_t rows, int64_t step) : words(at), step(step) {
        scales = reinterpret_cast<float*>(words + blocks_of(columns) * WORDS * rows);
        starts = reinterpret_cast<int32_t*>(scales + blocks_of(columns) * rows);
    }
};

// Words that `Bytes` of so many rows take, or their numbers in fp32.
inline int64_t room_for_bytes(int64_t columns, int64_t rows) {
    return std::max(blocks_of(columns) * (WORDS + 2), padded(columns)) * rows;
}

#ifdef __AVX512VNNI__
constexpr bool HAS_BYTES = true;

template <int W>
struct Whole {
    typedef int32_t Vector __attribute__((vector_size(W * 4)));
};
typedef Whole<16>::Vector Sums;

inline Whole<8>::Vector add_bytes(Whole<8>::Vector sums, Whole<8>::Vector weights, Whole<8>::Vector x) {
    return Whole<8>::Vector(_mm256_dpbusd_epi32(__m256i(sums), __m256i(weights), __m256i(x)));
}
inline Sums add_bytes(Sums sums, Sums weights, Sums x) {
    return Sums(_mm512_dpbusd_epi32(__m512i(sums), __m512i(weights), __m512i(x)));
}
// To the nearest whole numbers, ties to even.
inline Sums to_whole(Floats x) { return Sums(_mm512_cvtps_epi32(__m512(x))); }
inline Whole<8>::Vector to_whole(Wide<8>::Vector x) { return Whole<8>::Vector(_mm256_cvtps_epi32(__m256(x))); }

// Four weights for all lanes, + 128: they are multiplied without a sign.
constexpr int32_t FLIP = -0x7f7f7f80;  // 128 in each byte
template <class Wholes>
inline Wholes spread(uint32_t word) {
    if constexpr (sizeof(Wholes) == 64)
        return Wholes(_mm512_xor_si512(_mm512_set1_epi32(word), _mm512_set1_epi32(FLIP)));
    else
        return Wholes(_mm256_xor_si256(_mm256_set1_epi32(word), _mm256_set1_epi32(FLIP)));
}

// The largest |x| of each lane; what isn't finite, whose bits are larger than all numbers', comes through.
struct Most {
    __m512i bits = _mm512_setzero_si512();
    void add(Floats x) { bits = _mm512_max_epu32(bits, __m512i(_mm512_abs_ps(__m512(x)))); }
};

// A block of a row that has `left` numbers from there on, in fp32 or bf16, zeros behind.
template <class Cell>
inline Most take_block(const Cell* from, int64_t left, Floats (&x)[BLOCK / LANES]) {
    Most most;
    for (int64_t i = 0; i < BLOCK; i += LANES) {
        x[i / LANES] = i < left ? take(from + i, std::min<int64_t>(LANES, left - i)) : Floats{};
        most.add(x[i / LANES]);
    }
    return most;
}

inline void round_block(const Floats (&x)[BLOCK / LANES], float factor, uint32_t* to) {
    for (int i = 0; i < BLOCK / LANES; ++i) {
        const __m128i bytes = _mm512_cvtsepi32_epi8(__m512i(to_whole(x[i] * factor)));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to) + i, bytes);
    }
}

// A row that lies one behind the others.
void round_row(const float* x, int64_t row, int64_t columns, const Bytes& to) {
    for (int64_t block = 0; block < blocks_of(columns); ++block) {
        const int64_t place = row * blocks_of(columns) + block;
        Floats numbers[BLOCK / LANES];
        const Most most = take_block(x + block * BLOCK, columns - block * BLOCK, numbers);
        const Rounding<float> by(bits<float>(_mm512_reduce_max_epu32(most.bits)));
        round_block(numbers, by.factor, to.words + place * WORDS);
        to.scales[place] = by.scale;
    }
}

// W rows side by side, from row b on.
template <int W>
void round_lanes(const Rows& x, int64_t columns, int64_t b, const Bytes& to) {
    typedef typename Wide<W>::Vector Numbers;
    typedef typename Whole<W>::Vector Wholes;
    for (int64_t k = 0; k < columns; k += BLOCK) {
        const int64_t count = std::min<int64_t>(BLOCK, columns - k), block = k / BLOCK;
        const float* const from = x.at + k * x.step + b;
        const auto by = rounding<Numbers>(from, count, x.step);
        Wholes start{};
        for (int64_t i = 0; i < BLOCK; i += 4) {
            Wholes word{};
            for (int64_t j = 0; j < 4 && i + j < count; ++j) {
                const Wholes q = to_whole(load<Numbers>(from + (i + j) * x.step) * by.factor);
                start -= q * 128;
                word |= (q & 255) << int(8 * j);
            }
            std::memcpy(to.words + (block * WORDS + i / 4) * to.step + b, &word, sizeof word);
        }
        std::memcpy(to.scales + block * to.step + b, &by.scale, sizeof by.scale);
        std::memcpy(to.starts + block * to.step + b, &start, sizeof start);
    }
}

// The sums of the lanes of each.
inline __m128i folded(const Sums (&x)[TILE]) {
    const auto pair = [](__m512i a, __m512i b) {
        return _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
    };
    const __m512i first = pair(__m512i(x[0]), __m512i(x[1])), second = pair(__m512i(x[2]), __m512i(x[3]));
    const __m512i all = _mm512_add_epi32(_mm512_unpacklo_epi64(first, second), _mm512_unpackhi_epi64(first, second));
    const __m256i half = _mm256_add_epi32(_mm512_castsi512_si256(all), _mm512_extracti64x4_epi64(all, 1));
    return _mm_add_epi32(_mm256_castsi256_si128(half), _mm256_extracti128_si256(half, 1));
}

// Weight rows [row, row + TILE), or `rows` of them, times C rounded rows that lie one behind the other, from row b on.
template <int C>
void byte_dots(const Matrix& m, int64_t row, int64_t rows, const Bytes& x, int64_t b, const Out& out) {
    typedef Wide<TILE>::Vector Results;
    const int64_t blocks = blocks_of(m.columns);
    const int8_t* weights[TILE];
    for (int r = 0; r < TILE; ++r) weights[r] = static_cast<const int8_t*>(m.weight) + (row + std::min<int64_t>(r, rows - 1)) * m.columns;
    Results totals[C] = {};
    const auto add = [&](int64_t block, __mmask64 there) {
        Sums w[TILE];
        for (int r = 0; r < TILE; ++r) w[r] = Sums(_mm512_maskz_loadu_epi8(there, weights[r] + block * BLOCK)) ^ FLIP;
        for (int c = 0; c < C; ++c) {
            const int64_t place = (b + c) * blocks + block;
            const Sums numbers = load<Sums>(x.words + place * WORDS), start = -add_bytes(Sums{}, Sums{} + FLIP, numbers);
            Sums sums[TILE];
            for (int r = 0; r < TILE; ++r) sums[r] = add_bytes(start, w[r], numbers);
            totals[c] = joined(Results(_mm_cvtepi32_ps(folded(sums))), Results{} + x.scales[place], totals[c]);
        }
    };
    const int64_t whole = m.columns / BLOCK;
    for (int64_t block = 0; block < whole; ++block) {
        ask_for<INT8, AHEAD, 1>(m, row + TILE, block * BLOCK * TILE, TILE * BLOCK);
        add(block, ~__mmask64(0));
    }
    if (whole < blocks) add(whole, (__mmask64(1) << m.columns % BLOCK) - 1);
    for (int c = 0; c < C; ++c)
        for (int r = 0; r < rows; ++r) out.put(row + r, b + c, joined(totals[c][r], m.scales[row + r], bias_of(m, row + r)));
}

// Weight rows [row, row + R) times V vectors of W rounded rows that lie side by side, from row b on: put(r, v, numbers).
template <int W, int V, int R, class Put>
inline void byte_lanes(const Matrix& m, int64_t row, const Bytes& x, int64_t b, Put&& put) {
    typedef typename Wide<W>::Vector Numbers;
    typedef typename Whole<W>::Vector Wholes;
    const int8_t* weights = static_cast<const int8_t*>(m.weight) + row * m.columns;
    int64_t apart = m.columns;
    int8_t last[R][BLOCK];  // columns of a part of a block
    Numbers totals[R][V] = {};
    const uint32_t* from = x.words + b;
    for (int64_t block = 0; block < blocks_of(m.columns); ++block, weights += BLOCK) {
        if (const int64_t left = m.columns - block * BLOCK; left < BLOCK) {
            for (int r = 0; r < R; ++r) std::memcpy(last[r], weights + r * m.columns, left);
            weights = last[0], apart = BLOCK;
        }
        Wholes sums[R][V];
        for (int v = 0; v < V; ++v) {
            const Wholes start = load<Wholes>(x.starts + block * x.step + b + v * W);
            for (int r = 0; r < R; ++r) sums[r][v] = start;
        }
#pragma GCC unroll 4
        for (int j = 0; j < WORDS; ++j, from += x.step) {
            Wholes numbers[V];
            for (int v = 0; v < V; ++v) numbers[v] = load<Wholes>(from + v * W);
            for (int r = 0; r < R; ++r) {
                const Wholes four = spread<Wholes>(load<uint32_t>(weights + r * apart + 4 * j));
                for (int v = 0; v < V; ++v) sums[r][v] = add_bytes(sums[r][v], four, numbers[v]);
            }
        }
        for (int v = 0; v < V; ++v) {
            const Numbers scale = load<Numbers>(x.scales + block * x.step + b + v * W);
            for (int r = 0; r < R; ++r) totals[r][v] = joined(__builtin_convertvector(sums[r][v], Numbers), scale, totals[r][v]);
        }
    }
    for (int r = 0; r < R; ++r) {
        const Numbers scale = Numbers{} + m.scales[row + r], bias = Numbers{} + bias_of(m, row + r);
        for (int v = 0; v < V; ++v) put(r, v, joined(totals[r][v], scale, bias));
    }
}

template <int C>
void all_byte_dots(const Matrix& m, int64_t first, int64_t last, const Bytes& x, int64_t b, const Out& out) {
    for (int64_t row = first; row < last; row += TILE) byte_dots<C>(m, row, std::min<int64_t>(TILE, last - row), x, b, out);
}

constexpr int AT_ONCE = 12;  // vectors of sums, and as many of totals, that fit the registers

template <int W, int V>
void all_byte_lanes(const Matrix& m, int64_t first, int64_t last, const Bytes& x, int64_t b, const Out& out) {
    const auto some = [&](auto rows, int64_t row) {
        ask_for<INT8, 0, 2>(m, row + rows, 0, int(rows * m.columns));
        byte_lanes<W, V, rows>(m, row, x, b, [&](int r, int v, auto numbers) { put_lanes<W>(row + r, b + v * W, numbers, out); });
    };
    int64_t row = first;
    for (; row + AT_ONCE / V <= last; row += AT_ONCE / V) some(Number<AT_ONCE / V>{}, row);
    for (; row < last; ++row) some(Number<1>{}, row);
}

// Weight rows [first, last) times x, rounded to `room`.
inline void byte_products(const Matrix& m, int64_t first, int64_t last, const Rows& x, const Out& out, uint32_t* room) {
    const Bytes bytes(room, m.columns, x.step == 1 ? out.count : x.step, x.step);
    if (x.step > 1) {
        each_width(x.step, [&](auto width, auto vectors, int64_t b) {
            for (int v = 0; v < vectors; ++v) round_lanes<width>(x, m.columns, b + v * width, bytes);
            all_byte_lanes<width, vectors>(m, first, last, bytes, b, out);
        });
        return;
    }
    for (int64_t b = 0; b < out.count; ++b) round_row(x.at + b * x.stride, b, m.columns, bytes);
    each_few(out.count, [&](auto count, int64_t b) { all_byte_dots<count>(m, first, last, bytes, b, out); });
}
#else
constexpr bool HAS_BYTES = false;
inline void byte_products(const Matrix&, int64_t, int64_t, const Rows&, const Out&, uint32_t*) {}
#endif

}  // namespace
