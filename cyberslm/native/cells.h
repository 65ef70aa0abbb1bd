// Numbers as they lie in memory, in fp32 or bf16, to fp32 in registers and back, one by one or a vector at once.

#pragma once

#include <algorithm>

#include "vectors.h"

namespace {

inline float widen(uint16_t half) { return bits<float>(uint32_t(half) << 16); }

inline uint16_t narrow(float x) {  // round to nearest, ties to even; NaN stays NaN
    const uint32_t word = bits<uint32_t>(x), rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16;
    return uint16_t(x != x ? word >> 16 | 0x40 : rounded);
}

inline float number(float x) { return x; }
inline float number(uint16_t x) { return widen(x); }
inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = narrow(x); }

inline Floats take(const float* from) { return load<Floats>(from); }
inline Floats take(const uint16_t* from) { return bits<Floats>(whole(from) << 16); }

inline void give(float* to, Floats x) { store(to, x); }
inline void give(uint16_t* to, Floats x) {  // as `narrow`
#ifdef __AVX512BF16__
    const __m256bh halves = _mm512_cvtneps_pbh(__m512(x));
    std::memcpy(to, &halves, sizeof halves);
#else
    typedef uint32_t Bits __attribute__((vector_size(LANES * 4)));
    typedef uint16_t Halves __attribute__((vector_size(LANES * 2)));
    const Bits word = bits<Bits>(x), nan = bits<Bits>(x != x);
    const Bits rounded = (word + 0x7fff + (word >> 16 & 1)) >> 16, quiet = word >> 16 | 0x40;
    const Halves halves = __builtin_convertvector((quiet & nan) | (rounded & ~nan), Halves);
    std::memcpy(to, &halves, sizeof halves);
#endif
}

// The first `count` lanes alone; the others come as zeros.
template <class Cell>
inline Floats take(const Cell* from, int64_t count) {
    if (count == LANES) return take(from);
    Cell some[LANES] = {};
    std::copy(from, from + count, some);
    return take(some);
}

template <class Cell>
inline void give(Cell* to, Floats x, int64_t count) {
    if (count == LANES) return give(to, x);
    Cell some[LANES];
    give(some, x);
    std::copy(some, some + count, to);
}

}  // namespace
