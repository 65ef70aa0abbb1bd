// One decoding step of a whole network: a token of each row in, logits out.
//
// A team of threads runs through all layers inside one parallel region and meets at a barrier where a result is shared,
// four times a layer: waking threads for each product costs more than the product itself. Weights stay where they are,
// as fp32, bf16, int8 (a scale a row) or int4 (a scale for 32 numbers), and are widened in registers; every sum is
// fp32. Few rows take products row by row (`dots`); many lie side by side in the lanes of a vector (`lanes`), so that a
// weight is widened once for all of them. Attention reads only the slots that a row holds.
//
// Plain C++17 with the vector extensions of GCC and Clang, for any processor; `mirror.py` describes the structures.

#include <cmath>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <omp.h>
#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

namespace {

#ifdef __AVX512F__
constexpr int LANES = 16;
#else
constexpr int LANES = 8;
#endif
constexpr int GROUP = 32;  // numbers of an int4 row that share a scale
constexpr int FEW = 8;         // rows up to which products are taken row by row ...
constexpr int TILE = 4;        // ... so many weight rows and rows at once
constexpr int CHUNK = 256;     // columns widened at once for many rows
constexpr int AHEAD = 8192;    // bytes that weights are asked for in advance
#ifdef __AVX512F__
constexpr int TOTALS = 16;     // vectors of sums that fit the registers
#else
constexpr int TOTALS = 8;
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

extern "C" {

struct Matrix {  // (rows, columns), row after row; bias and scales may be null
    const void* weight;
    const float* scales;
    const float* bias;
    int64_t rows, columns, kind;  // kind: 0 fp32, 1 bf16, 2 int8, 3 int4
};

struct Norm {  // a null weight: no norm; layer: subtract the mean
    const float* weight;
    const float* bias;
    double eps;
    int64_t layer;
};

struct Layer {
    Norm before_attention, before_mlp, q_norm, k_norm;
    Matrix q, k, v, o, gate, up, down;  // gate without rows: none
    int64_t window;                     // 0: none
};

struct Network {
    const Layer* layers;
    Matrix embedding, head;
    Norm norm;
    int64_t num_layers, hidden, heads, kv_heads, key_size, head_size, inner, activation, interleaved, threads;
    double scale, softcap;  // softcap 0: none
};

struct Held {  // keys (B, K, room, key_size) and values (B, K, room, head_size) of one layer
    void* keys;
    void* values;
};

struct Step {
    const int64_t* tokens;   // (B)
    const int64_t* lengths;  // (B) tokens held before this one, whose position that is
    const int64_t* angles;   // (B) the row of the tables
    const float* cos;        // (.., key_size / 2)
    const float* sin;
    const Held* caches;
    float* logits;    // (B, V)
    float* scratch;   // `scratch_floats` of them
    int64_t rows, room, cache_kind;
};
}

namespace {

enum Kind { FP32, BF16, INT8, INT4 };

inline float widen(uint16_t half) { return bits<float>(uint32_t(half) << 16); }

inline uint16_t narrow(float x) {  // round to nearest, ties to even; NaN stays NaN
    const uint32_t word = bits<uint32_t>(x);
    if (x != x) return uint16_t(word >> 16 | 0x40);
    return uint16_t((word + 0x7fff + (word >> 16 & 1)) >> 16);
}

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
inline void ask_for(const Matrix& m, int64_t row, int64_t i, int count) {
    constexpr int bits = kind == FP32 ? 32 : kind == BF16 ? 16 : kind == INT8 ? 8 : 4;
    const char* at = static_cast<const char*>(m.weight) + (row * m.columns + i) * bits / 8 + AHEAD;
    for (int byte = 0; byte < count * bits / 8; byte += 64) __builtin_prefetch(at + byte);
}

// Weight rows [row, row + R) times C rows of x, from its row b on.
template <int kind, int R, int C>
void dots(const Matrix& m, int64_t row, const Rows& x, int64_t b, const Out& out) {
    Floats totals[R][C] = {};
    const float* from = x.at + b * x.stride;
    int64_t i = 0;
    for (; i + LANES <= m.columns; i += LANES) {
        Floats w[R];
        for (int r = 0; r < R; ++r) w[r] = weights<kind>(m, row + r, i);
        ask_for<kind>(m, row + R, i * R, R * LANES);
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

template <int W>
struct Wide {
    typedef float Vector __attribute__((vector_size(W * 4)));
};

// Weights of one row from column i on, `count` of them with zeros behind up to a whole vector.
template <int kind>
inline void unpack(const Matrix& m, int64_t row, int64_t i, int64_t count, float* to) {
    int64_t j = 0;
    for (; j + LANES <= count; j += LANES) {
        ask_for<kind>(m, row, i + j, LANES);
        store(to + j, weights<kind>(m, row, i + j));
    }
    if (j < count) store(to + j, last_weights<kind>(m, row, i + j));
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
        for (int v = 0; v < V; ++v) {
            const Vector value = totals[r][v] * scale_of(m, row + r) + bias_of(m, row + r);
            for (int lane = 0; lane < W && b + v * W + lane < out.count; ++lane)
                out.put(row + r, b + v * W + lane, value[lane]);
        }
}

template <int kind, int W, int V>
void all_lanes(const Matrix& m, int64_t first, int64_t last, const Rows& x, int64_t b, const Out& out) {
    int64_t row = first;
    for (; row + TOTALS / V <= last; row += TOTALS / V) lanes<kind, W, V, TOTALS / V>(m, row, x, b, out);
    for (; row < last; ++row) lanes<kind, W, V, 1>(m, row, x, b, out);
}

template <int kind>
void products(const Matrix& m, int64_t first, int64_t last, const Rows& x, const Out& out) {
    if (x.step == 1) {
        for (int64_t b = 0; b < out.count; b += TILE) switch (out.count - b) {
                case 1: all_dots<kind, 1>(m, first, last, x, b, out); break;
                case 2: all_dots<kind, 2>(m, first, last, x, b, out); break;
                case 3: all_dots<kind, 3>(m, first, last, x, b, out); break;
                default: all_dots<kind, TILE>(m, first, last, x, b, out);
            }
        return;
    }
    for (int64_t b = 0; b < x.step;) {
        const int64_t left = x.step - b;
        if (left >= 2 * LANES) {
            all_lanes<kind, LANES, 2>(m, first, last, x, b, out);
            b += 2 * LANES;
        } else if (left >= LANES) {
            all_lanes<kind, LANES, 1>(m, first, last, x, b, out);
            b += LANES;
        } else {
            all_lanes<kind, 8, 1>(m, first, last, x, b, out);
            b += 8;
        }
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

// This thread's share of the weight rows of m times x.
void multiply(const Matrix& m, const Rows& x, const Out& out) {
    const Share share(m.rows);
    switch (m.kind) {
        case FP32: return products<FP32>(m, share.first, share.last, x, out);
        case BF16: return products<BF16>(m, share.first, share.last, x, out);
        case INT8: return products<INT8>(m, share.first, share.last, x, out);
        default: return products<INT4>(m, share.first, share.last, x, out);
    }
}

void normalise(const Norm& norm, const float* x, int64_t width, float* out) {
    float mean = 0, square = 0;
    if (norm.layer) {
#pragma omp simd reduction(+ : mean)
        for (int64_t i = 0; i < width; ++i) mean += x[i];
        mean /= width;
    }
#pragma omp simd reduction(+ : square)
    for (int64_t i = 0; i < width; ++i) square += (x[i] - mean) * (x[i] - mean);
    const float factor = 1.0f / std::sqrt(square / width + float(norm.eps));
#pragma omp simd
    for (int64_t i = 0; i < width; ++i) out[i] = (x[i] - mean) * factor * norm.weight[i];
    if (norm.bias)
        for (int64_t i = 0; i < width; ++i) out[i] += norm.bias[i];
}

// The same for eight rows that lie side by side.
void normalise_lanes(const Norm& norm, const float* x, int64_t width, int64_t step, float* out) {
    typedef Wide<8>::Vector Vector;
    Vector mean{}, square{}, factor;
    if (norm.layer) {
        for (int64_t i = 0; i < width; ++i) mean += load<Vector>(x + i * step);
        mean /= float(width);
    }
    for (int64_t i = 0; i < width; ++i) {
        const Vector off = load<Vector>(x + i * step) - mean;
        square += off * off;
    }
    for (int lane = 0; lane < 8; ++lane) factor[lane] = 1.0f / std::sqrt(square[lane] / width + float(norm.eps));
    for (int64_t i = 0; i < width; ++i) {
        const Vector value = (load<Vector>(x + i * step) - mean) * factor * norm.weight[i] + (norm.bias ? norm.bias[i] : 0);
        std::memcpy(out + i * step, &value, sizeof value);
    }
}

void normalise(const Norm& norm, const Rows& x, int64_t count, int64_t width, const Rows& out) {
    if (x.step == 1)
        for (int64_t b = 0; b < count; ++b) normalise(norm, x.at + b * x.stride, width, out.at + b * out.stride);
    else
        for (int64_t b = 0; b < x.step; b += 8) normalise_lanes(norm, x.at + b, width, x.step, out.at + b);
}

void rotate(float* x, const float* cos, const float* sin, int64_t width, bool interleaved) {
    const int64_t half = width / 2, near = interleaved ? 2 : 1, far = interleaved ? 1 : half;
    for (int64_t i = 0; i < half; ++i) {
        const float a = x[i * near], b = x[i * near + far];
        x[i * near] = a * cos[i] - b * sin[i];
        x[i * near + far] = b * cos[i] + a * sin[i];
    }
}

enum Activation { SWIGLU, GEGLU, GELU, RELU2 };

// x = act(gate) x, or act(x) without a gate, for whole vectors.
void activate(float* x, const float* gate, int64_t count, int64_t kind) {
    for (int64_t i = 0; i < count; i += LANES) {
        Floats a = load<Floats>((gate ? gate : x) + i);
        if (kind == SWIGLU)
            a = a / (1.0f + exp(-a));
        else if (kind == RELU2)
            a = a < 0 ? a * 0.0f : a * a;
        else
            for (int lane = 0; lane < LANES; ++lane) a[lane] *= 0.5f * (1.0f + std::erf(a[lane] * 0.70710678f));
        store(x + i, gate ? a * load<Floats>(x + i) : a);
    }
}

template <class Cell>
inline Floats cells(const Cell* from);
template <>
inline Floats cells(const float* from) { return load<Floats>(from); }
template <>
inline Floats cells(const uint16_t* from) {
    return bits<Floats>(whole(from) << 16);
}
inline float cell(float x) { return x; }
inline float cell(uint16_t x) { return widen(x); }
inline void put_cell(float* to, float x) { *to = x; }
inline void put_cell(uint16_t* to, float x) { *to = narrow(x); }

template <class Cell>
inline float dot(const float* q, const Cell* k, int64_t width) {
    Floats total{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += load<Floats>(q + i) * cells(k + i);
    float result = sum(total);
    for (; i < width; ++i) result += q[i] * cell(k[i]);
    return result;
}

// One query over the slots [low, high): softmax(q k scale) v into out.
template <class Cell>
void attend(const Network& net, const float* q, const Cell* keys, const Cell* values, int64_t low, int64_t high,
            float* scores, float* out) {
    const int64_t count = high - low, wide = net.key_size, width = net.head_size;
    float largest = -INFINITY;
    for (int64_t s = 0; s < count; ++s) {
        scores[s] = dot(q, keys + (low + s) * wide, wide) * float(net.scale);
        largest = scores[s] > largest ? scores[s] : largest;
    }
    for (int64_t s = count; s < padded(count); ++s) scores[s] = -INFINITY;
    Floats total{};
    for (int64_t s = 0; s < count; s += LANES) {
        const Floats e = exp(load<Floats>(scores + s) - largest);
        store(scores + s, e);
        total += e;
    }
    const float factor = 1.0f / sum(total);
    int64_t i = 0;
    for (; i + 2 * LANES <= width; i += 2 * LANES) {
        Floats left{}, right{};
        const Cell* v = values + low * width + i;
        for (int64_t s = 0; s < count; ++s, v += width) {
            left += scores[s] * cells(v);
            right += scores[s] * cells(v + LANES);
        }
        store(out + i, left * factor);
        store(out + i + LANES, right * factor);
    }
    for (; i < width; ++i) {
        float mixed = 0;
        for (int64_t s = 0; s < count; ++s) mixed += scores[s] * cell(values[(low + s) * width + i]);
        out[i] = mixed * factor;
    }
}

struct Scratch {
    Rows x, normed, q, k, v, mixed, inner, gate;
    float *scores, *head;  // a thread's own, as `normed` is
};

// Slices of the scratch; without a base only their size counts.
struct Slices {
    float* base;
    int64_t used = 0;
    float* take(int64_t count) {
        float* at = base ? base + used : nullptr;
        used += padded(count);
        return at;
    }
};

int64_t layout(const Network& net, int64_t rows, int64_t room, float* base, int64_t me, Scratch* to) {
    Slices slices{base};
    const int64_t side = rows <= FEW ? 1 : padded(rows);
    const auto take = [&](int64_t features) {
        if (side == 1) return Rows{slices.take(rows * padded(features)), 1, padded(features)};
        return Rows{slices.take(side * padded(features)), side, 1};
    };
    Scratch s;
    s.x = take(net.hidden);
    s.q = take(net.heads * net.key_size);
    s.k = take(net.kv_heads * net.key_size);
    s.v = take(net.kv_heads * net.head_size);
    s.mixed = take(net.heads * net.head_size);
    s.inner = take(net.inner);
    s.gate = take(net.inner);
    for (int64_t thread = 0; thread < net.threads; ++thread) {
        const Rows normed = take(net.hidden);
        float* const scores = slices.take(padded(room) + LANES);
        float* const head = slices.take(2 * net.key_size + net.head_size + LANES);
        if (thread == me) s.normed = normed, s.scores = scores, s.head = head;
    }
    if (to) *to = s;
    return slices.used;
}

inline void gather(const Rows& x, int64_t feature, int64_t row, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = x.at[(feature + i) * x.step + row * x.stride];
}

template <class Cell>
void attention(const Network& net, const Layer& layer, const Step& step, const Held& held, const Scratch& s) {
    const int64_t E = net.key_size, Ev = net.head_size, group = net.heads / net.kv_heads;
    float *const one = s.head, *const mixed = s.head + padded(E);
    const Share share(step.rows * net.kv_heads);
    for (int64_t pair = share.first; pair < share.last; ++pair) {
        const int64_t b = pair / net.kv_heads, head = pair % net.kv_heads, place = step.lengths[b];
        const float* cos = step.cos + step.angles[b] * (E / 2);
        const float* sin = step.sin + step.angles[b] * (E / 2);
        Cell* keys = static_cast<Cell*>(held.keys) + pair * step.room * E;
        Cell* values = static_cast<Cell*>(held.values) + pair * step.room * Ev;
        const auto turned = [&](const Rows& from, int64_t h, const Norm& norm) {
            gather(from, h * E, b, E, one);
            if (norm.weight) normalise(norm, one, E, one);
            rotate(one, cos, sin, E, net.interleaved);
        };
        turned(s.k, head, layer.k_norm);
        for (int64_t i = 0; i < E; ++i) put_cell(keys + place * E + i, one[i]);
        gather(s.v, head * Ev, b, Ev, mixed);
        for (int64_t i = 0; i < Ev; ++i) put_cell(values + place * Ev + i, mixed[i]);
        const int64_t low = layer.window && place + 1 > layer.window ? place + 1 - layer.window : 0;
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
            turned(s.q, h, layer.q_norm);
            attend(net, one, keys, values, low, place + 1, s.scores, mixed);
            for (int64_t i = 0; i < Ev; ++i) s.mixed.at[(h * Ev + i) * s.mixed.step + b * s.mixed.stride] = mixed[i];
        }
    }
}

template <int kind>
void embed(const Matrix& m, int64_t token, int64_t b, const Rows& to) {
    alignas(64) float row[CHUNK];
    for (int64_t i = 0; i < m.columns; i += CHUNK) {
        const int64_t count = m.columns - i < CHUNK ? m.columns - i : CHUNK;
        unpack<kind>(m, token, i, count, row);
        for (int64_t j = 0; j < count; ++j) to.at[(i + j) * to.step + b * to.stride] = row[j] * scale_of(m, token);
    }
}

void embed(const Matrix& m, int64_t token, int64_t b, const Rows& to) {
    switch (m.kind) {
        case FP32: return embed<FP32>(m, token, b, to);
        case BF16: return embed<BF16>(m, token, b, to);
        case INT8: return embed<INT8>(m, token, b, to);
        default: return embed<INT4>(m, token, b, to);
    }
}

void feed_forward(const Network& net, const Layer& layer, const Rows& x, int64_t count, const Scratch& s) {
    const Share share(layer.up.rows);
    const bool gated = layer.gate.rows;
    multiply(layer.up, x, {s.inner, count, false});
    if (gated) multiply(layer.gate, x, {s.gate, count, false});
    const Rows& inner = s.inner;
    const int64_t pieces = inner.step == 1 ? count : 1;
    for (int64_t b = 0; b < pieces; ++b) {  // whole vectors; a last one begins earlier and would be activated twice
        const int64_t from = b * inner.stride + share.first * inner.step, size = (share.last - share.first) * inner.step;
        alignas(64) float rest[2][LANES];
        const int64_t whole = size / LANES * LANES, odd = size - whole;
        activate(inner.at + from, gated ? s.gate.at + from : nullptr, whole, net.activation);
        if (!odd) continue;
        for (int64_t i = 0; i < LANES; ++i) {
            rest[0][i] = i < odd ? inner.at[from + whole + i] : 0;
            rest[1][i] = i < odd ? s.gate.at[from + whole + i] : 0;
        }
        activate(rest[0], gated ? rest[1] : nullptr, LANES, net.activation);
        for (int64_t i = 0; i < odd; ++i) inner.at[from + whole + i] = rest[0][i];
    }
}

void run(const Network& net, const Step& step, const Scratch& s) {
    const int64_t count = step.rows;
    for (int64_t n = 0; n < net.num_layers; ++n) {
        const Layer& layer = net.layers[n];
        normalise(layer.before_attention, s.x, count, net.hidden, s.normed);
        multiply(layer.q, s.normed, {s.q, count, false});
        multiply(layer.k, s.normed, {s.k, count, false});
        multiply(layer.v, s.normed, {s.v, count, false});
#pragma omp barrier
        if (step.cache_kind == BF16)
            attention<uint16_t>(net, layer, step, step.caches[n], s);
        else
            attention<float>(net, layer, step, step.caches[n], s);
#pragma omp barrier
        multiply(layer.o, s.mixed, {s.x, count, true});
#pragma omp barrier
        normalise(layer.before_mlp, s.x, count, net.hidden, s.normed);
        feed_forward(net, layer, s.normed, count, s);
#pragma omp barrier
        multiply(layer.down, s.inner, {s.x, count, true});
#pragma omp barrier
    }
    normalise(net.norm, s.x, count, net.hidden, s.normed);
    const int64_t vocabulary = net.head.rows;
    multiply(net.head, s.normed, {{step.logits, 1, vocabulary}, count, false});
    if (const float cap = net.softcap; cap) {
        const Share share(vocabulary);
        for (int64_t b = 0; b < count; ++b)
            for (int64_t i = share.first; i < share.last; ++i) {
                float& logit = step.logits[b * vocabulary + i];
                logit = cap * std::tanh(logit / cap);
            }
    }
}

}  // namespace

extern "C" {

int64_t scratch_floats(const Network* net, int64_t rows, int64_t room) {
    return layout(*net, rows, room, nullptr, 0, nullptr);
}

void decode_step(const Network* net, const Step* step) {
#pragma omp parallel num_threads(net->threads)
    {
        Scratch s;
        layout(*net, step->rows, step->room, step->scratch, omp_get_thread_num(), &s);
        const Share share(step->rows);
        for (int64_t b = share.first; b < share.last; ++b) embed(net->embedding, step->tokens[b], b, s.x);
#pragma omp barrier
        run(*net, *step, s);
    }
}
}
