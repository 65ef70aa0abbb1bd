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

// A square of LANES by LANES words, turned: word (i, j) comes to (j, i).
inline void turn(const uint32_t* from, int64_t from_step, uint32_t* to, int64_t to_step) {
#ifdef __AVX512F__
    __m512i x[16], y[16];
    for (int i = 0; i < 16; ++i) x[i] = _mm512_loadu_si512(from + i * from_step);
    for (int i = 0; i < 16; i += 2) {
        y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
        y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; ++j) {
            x[i + 2 * j] = _mm512_unpacklo_epi64(y[i + j], y[i + j + 2]);
            x[i + 2 * j + 1] = _mm512_unpackhi_epi64(y[i + j], y[i + j + 2]);
        }
    for (int i = 0; i < 16; i += 8)
        for (int j = 0; j < 4; ++j) {
            y[i + j] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0x88);
            y[i + j + 4] = _mm512_shuffle_i32x4(x[i + j], x[i + j + 4], 0xdd);
        }
    for (int j = 0; j < 8; ++j) {
        _mm512_storeu_si512(to + j * to_step, _mm512_shuffle_i32x4(y[j], y[j + 8], 0x88));
        _mm512_storeu_si512(to + (j + 8) * to_step, _mm512_shuffle_i32x4(y[j], y[j + 8], 0xdd));
    }
#else
    for (int i = 0; i < LANES; ++i)
        for (int j = 0; j < LANES; ++j) to[j * to_step + i] = from[i * from_step + j];
#endif
}

// exp by 2^n p(r) with x = n ln 2 + r; relative error under 2e-7, 0 far below and inf above what fp32 holds.
inline Floats exp(Floats x) {
#ifdef __AVX512F__
    // the second operand comes out of a comparison with NaN
    const Floats kept = Floats(_mm512_min_ps(_mm512_set1_ps(128), _mm512_max_ps(_mm512_set1_ps(-128), __m512(x))));
    const Floats n = Floats(_mm512_roundscale_ps(__m512(kept * 1.44269504f), 0));
#else
    const Floats high = splat(88.7f), low = splat(-87.3f);
    const Floats kept = x < low ? low : (x > high ? high : x);
    const Ints nearest = __builtin_convertvector(kept * 1.44269504f + (kept < 0 ? splat(-0.5f) : splat(0.5f)), Ints);
    const Floats n = __builtin_convertvector(nearest, Floats);
#endif
    const Floats r = (kept - n * 0.693145752f) - n * 1.42860677e-6f;
    Floats p = splat(1.98756915e-4f);
    for (float c : {1.39819995e-3f, 8.33345191e-3f, 4.16657960e-2f, 1.66666655e-1f, 5.00000012e-1f}) p = p * r + c;
    p = p * r * r + r + 1.0f;
#ifdef __AVX512F__
    return Floats(_mm512_scalef_ps(__m512(p), __m512(n)));
#else
    const Floats result = p * bits<Floats>((nearest + 127) << 23);
    return x != x ? x : (x < low ? splat(0.0f) : (x > high ? splat(INFINITY) : result));
#endif
}

}  // namespace
