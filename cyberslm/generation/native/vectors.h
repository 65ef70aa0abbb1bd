// Vectors of fp32 in registers, by the vector extensions of GCC and Clang: what any processor has, in its own width.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif

typedef float Floats __attribute__((vector_size(LANES * 4)));
typedef int32_t Ints __attribute__((vector_size(LANES * 4)));

template <class To>
inline To load(const void* from) {
    To value;
    std::memcpy(&value, from, sizeof value);
    return value;
}

inline void store(float* to, Floats value) { std::memcpy(to, &value, sizeof value); }

template <class To, class From>
inline To bits(From from) {
    static_assert(sizeof(To) == sizeof(From));
    To to;
    std::memcpy(&to, &from, sizeof to);
    return to;
}

inline Floats splat(float x) { return x - Floats{}; }

template <int count>
struct Folded {
    typedef float Part __attribute__((vector_size(count * 4)));
    static float sum(Part v) {
        typename Folded<count / 2>::Part ends[2];
        std::memcpy(ends, &v, sizeof v);
        return Folded<count / 2>::sum(ends[0] + ends[1]);
    }
};
template <>
struct Folded<2> {
    typedef float Part __attribute__((vector_size(8)));
    static float sum(Part v) { return v[0] + v[1]; }
};

inline float sum(Floats v) { return Folded<LANES>::sum(v); }

// Compilers turn the plain loops into element-wise moves, hence the instructions by name.
inline Ints whole(const int8_t* from) {
#if defined(__AVX512F__)
    return Ints(_mm512_cvtepi8_epi32(load<__m128i>(from)));
#elif defined(__AVX2__)
    return Ints(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from))));
#else
    Ints wide;
    for (int lane = 0; lane < LANES; ++lane) wide[lane] = from[lane];
    return wide;
#endif
}

inline Ints whole(const uint16_t* from) {
#if defined(__AVX512F__)
    return Ints(_mm512_cvtepu16_epi32(load<__m256i>(from)));
#elif defined(__AVX2__)
    return Ints(_mm256_cvtepu16_epi32(load<__m128i>(from)));
#else
    Ints wide;
    for (int lane = 0; lane < LANES; ++lane) wide[lane] = from[lane];
    return wide;
#endif
}

// exp by 2^n p(r) with x = n ln 2 + r; relative error under 2e-7, 0 far below and inf above what fp32 holds.
inline Floats exp(Floats x) {
    const Floats high = splat(88.7f), low = splat(-87.3f);
    const Floats kept = x < low ? low : (x > high ? high : x);
    const Ints n = __builtin_convertvector(kept * 1.44269504f + (kept < 0 ? splat(-0.5f) : splat(0.5f)), Ints);
    const Floats whole = __builtin_convertvector(n, Floats);
    const Floats r = (kept - whole * 0.693145752f) - whole * 1.42860677e-6f;
    Floats p = splat(1.98756915e-4f);
    for (float c : {1.39819995e-3f, 8.33345191e-3f, 4.16657960e-2f, 1.66666655e-1f, 5.00000012e-1f}) p = p * r + c;
    const Floats result = (p * r * r + r + 1.0f) * bits<Floats>((n + 127) << 23);
    return x != x ? x : (x < low ? splat(0.0f) : (x > high ? splat(INFINITY) : result));
}

}  // namespace
