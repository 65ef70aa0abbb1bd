// One decoding step of a whole network: a token of each row in, or a few, and logits out.
//
// A team of threads runs through all layers inside one parallel region and meets at a barrier where a result is shared,
// four times a layer: waking threads for each product costs more than the product itself. Weights stay where they are,
// as fp32, bf16, int8 (a scale a row) or int4 (a scale for 32 numbers), and are widened in registers. Attention reads
// only the slots that a row holds.
//
// Plain C++17 with the vector extensions of GCC and Clang, for any processor; `mirror.py` describes the structures.

#include "products.h"

extern "C" {

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
    const int64_t* tokens;  // (N), each row's in order, one row after the other
    const int64_t* places;  // (N) the slot, which is the position
    const int64_t* angles;  // (N) the row of the tables
    const int64_t* starts;  // (B + 1) each row's first token, and N
    const float* cos;        // (.., key_size / 2)
    const float* sin;
    const Held* caches;
    float* logits;   // (N, V)
    float* scratch;  // `scratch_floats` of them
    int64_t tokens_fed, rows, room, cache_kind;
};
}

namespace {

// Sums are in LANES parts, each with every LANES-th number, and these folded: the same for a row alone and side by side.
void normalise(const Norm& norm, const float* x, int64_t width, float* out) {
    const auto mean_of = [&](auto&& add) {
        Floats parts{};
        int64_t i = 0;
        for (; i + LANES <= width; i += LANES) parts = add(parts, load<Floats>(x + i));
        for (; i < width; ++i) parts[i % LANES] = add(float(parts[i % LANES]), x[i]);
        return sum(parts) / width;
    };
    const float mean = norm.layer ? mean_of([](auto parts, auto value) { return parts + value; }) : 0.0f;
    const float square = mean_of([&](auto parts, auto value) { return joined(value - mean, value - mean, parts); });
    const float factor = 1.0f / std::sqrt(square + float(norm.eps));
    for (int64_t i = 0; i < width; ++i)
        out[i] = joined((x[i] - mean) * factor, norm.weight[i], norm.bias ? norm.bias[i] : 0.0f);
}

// The same for eight rows that lie side by side.
void normalise_lanes(const Norm& norm, const float* x, int64_t width, int64_t step, float* out) {
    typedef Wide<8>::Vector Vector;
    const auto mean_of = [&](auto&& add) {
        Vector parts[LANES] = {};
        for (int64_t i = 0; i < width; i += LANES)
            for (int64_t j = 0; j < LANES && i + j < width; ++j) parts[j] = add(parts[j], load<Vector>(x + (i + j) * step));
        for (int size = LANES / 2; size; size /= 2)
            for (int j = 0; j < size; ++j) parts[j] += parts[j + size];
        return parts[0] / float(width);
    };
    const Vector mean = norm.layer ? mean_of([](Vector parts, Vector value) { return parts + value; }) : Vector{};
    const Vector square = mean_of([&](Vector parts, Vector value) { return joined(value - mean, value - mean, parts); });
    Vector factor;
    for (int lane = 0; lane < 8; ++lane) factor[lane] = 1.0f / std::sqrt(square[lane] + float(norm.eps));
    for (int64_t i = 0; i < width; ++i) {
        const Vector weight = Vector{} + norm.weight[i], bias = Vector{} + (norm.bias ? norm.bias[i] : 0.0f);
        const Vector value = joined((load<Vector>(x + i * step) - mean) * factor, weight, bias);
        std::memcpy(out + i * step, &value, sizeof value);
    }
}

// For the products with m.
void normalise(const Norm& norm, const Rows& x, int64_t count, int64_t width, const Rows& out, const Matrix& m) {
    if (x.step == 1)
        for (int64_t b = 0; b < count; ++b) {
            normalise(norm, x.at + b * x.stride, width, out.at + b * out.stride);
            round_rows(m, out.at + b * out.stride, width);
        }
    else {
        for (int64_t b = 0; b < x.step; b += 8) normalise_lanes(norm, x.at + b, width, x.step, out.at + b);
        round_rows(m, out.at, width * x.step);
    }
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
inline float dot(const float* q, const Cell* k, int64_t width) {
    Floats total{};
    int64_t i = 0;
    for (; i + LANES <= width; i += LANES) total += load<Floats>(q + i) * take(k + i);
    float result = sum(total);
    for (; i < width; ++i) result += q[i] * number(k[i]);
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
            left += scores[s] * take(v);
            right += scores[s] * take(v + LANES);
        }
        store(out + i, left * factor);
        store(out + i + LANES, right * factor);
    }
    for (; i < width; ++i) {
        float mixed = 0;
        for (int64_t s = 0; s < count; ++s) mixed += scores[s] * number(values[(low + s) * width + i]);
        out[i] = mixed * factor;
    }
}

struct Scratch {
    Rows x, normed, q, k, v, mixed, inner, gate;
    float *scores, *head;  // a thread's own, as `normed` and `room` are
    uint32_t* room;
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
    const int64_t side = rows <= FEW ? 1 : rows <= 8 ? 8 : padded(rows);
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
        const int64_t widest = std::max({net.hidden, net.inner, net.heads * net.head_size});
        float* const words = slices.take(room_for_products(widest, rows, side));
        if (thread == me) {
            s.normed = normed, s.scores = scores, s.head = head;
            s.room = reinterpret_cast<uint32_t*>(words);
        }
    }
    if (to) *to = s;
    return slices.used;
}

inline void gather(const Rows& x, int64_t feature, int64_t row, int64_t count, float* to) {
    for (int64_t i = 0; i < count; ++i) to[i] = x.at[(feature + i) * x.step + row * x.stride];
}

// A row's tokens in order, by one thread for each of its key heads: each sees those before it.
template <class Cell>
void attention(const Network& net, const Layer& layer, const Step& step, const Held& held, const Scratch& s) {
    const int64_t E = net.key_size, Ev = net.head_size, group = net.heads / net.kv_heads;
    float *const one = s.head, *const mixed = s.head + padded(E);
    const auto attend_one = [&](int64_t b, int64_t head, Cell* keys, Cell* values) {
        const int64_t place = step.places[b];
        const float* cos = step.cos + step.angles[b] * (E / 2);
        const float* sin = step.sin + step.angles[b] * (E / 2);
        const auto turned = [&](const Rows& from, int64_t h, const Norm& norm) {
            gather(from, h * E, b, E, one);
            if (norm.weight) normalise(norm, one, E, one);
            rotate(one, cos, sin, E, net.interleaved);
        };
        turned(s.k, head, layer.k_norm);
        for (int64_t i = 0; i < E; ++i) put(keys + place * E + i, one[i]);
        gather(s.v, head * Ev, b, Ev, mixed);
        for (int64_t i = 0; i < Ev; ++i) put(values + place * Ev + i, mixed[i]);
        const int64_t low = layer.window && place + 1 > layer.window ? place + 1 - layer.window : 0;
        for (int64_t h = head * group; h < (head + 1) * group; ++h) {
            turned(s.q, h, layer.q_norm);
            attend(net, one, keys, values, low, place + 1, s.scores, mixed);
            round_rows(layer.o, mixed, Ev);
            for (int64_t i = 0; i < Ev; ++i) s.mixed.at[(h * Ev + i) * s.mixed.step + b * s.mixed.stride] = mixed[i];
        }
    };
    const Share share(step.rows * net.kv_heads);
    for (int64_t pair = share.first; pair < share.last; ++pair) {
        const int64_t row = pair / net.kv_heads, head = pair % net.kv_heads;
        Cell* keys = static_cast<Cell*>(held.keys) + pair * step.room * E;
        Cell* values = static_cast<Cell*>(held.values) + pair * step.room * Ev;
        for (int64_t b = step.starts[row]; b < step.starts[row + 1]; ++b) attend_one(b, head, keys, values);
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
    multiply(layer.up, x, {s.inner, count, false}, s.room);
    if (gated) multiply(layer.gate, x, {s.gate, count, false}, s.room);
    const Rows& inner = s.inner;
    const int64_t pieces = inner.step == 1 ? count : 1;
    for (int64_t b = 0; b < pieces; ++b) {
        const int64_t from = b * inner.stride + share.first * inner.step;
        const int64_t size = (share.last - share.first) * inner.step;
        alignas(64) float rest[2][LANES];
        const int64_t whole = size / LANES * LANES, odd = size - whole;
        activate(inner.at + from, gated ? s.gate.at + from : nullptr, whole, net.activation);
        round_rows(layer.down, inner.at + from, whole);
        if (!odd) continue;
        for (int64_t i = 0; i < LANES; ++i) {
            rest[0][i] = i < odd ? inner.at[from + whole + i] : 0;
            rest[1][i] = i < odd ? s.gate.at[from + whole + i] : 0;
        }
        activate(rest[0], gated ? rest[1] : nullptr, LANES, net.activation);
        round_rows(layer.down, rest[0], odd);
        for (int64_t i = 0; i < odd; ++i) inner.at[from + whole + i] = rest[0][i];
    }
}

void run(const Network& net, const Step& step, const Scratch& s) {
    const int64_t count = step.tokens_fed;
    for (int64_t n = 0; n < net.num_layers; ++n) {
        const Layer& layer = net.layers[n];
        normalise(layer.before_attention, s.x, count, net.hidden, s.normed, layer.q);
        multiply(layer.q, s.normed, {s.q, count, false}, s.room);
        multiply(layer.k, s.normed, {s.k, count, false}, s.room);
        multiply(layer.v, s.normed, {s.v, count, false}, s.room);
#pragma omp barrier
        if (step.cache_kind == BF16)
            attention<uint16_t>(net, layer, step, step.caches[n], s);
        else
            attention<float>(net, layer, step, step.caches[n], s);
#pragma omp barrier
        multiply(layer.o, s.mixed, {s.x, count, true}, s.room);
#pragma omp barrier
        normalise(layer.before_mlp, s.x, count, net.hidden, s.normed, layer.up);
        feed_forward(net, layer, s.normed, count, s);
#pragma omp barrier
        multiply(layer.down, s.inner, {s.x, count, true}, s.room);
#pragma omp barrier
    }
    normalise(net.norm, s.x, count, net.hidden, s.normed, net.head);
    const int64_t vocabulary = net.head.rows;
    multiply(net.head, s.normed, {{step.logits, 1, vocabulary}, count, false}, s.room);
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
        layout(*net, step->tokens_fed, step->room, step->scratch, omp_get_thread_num(), &s);
        const Share share(step->tokens_fed);
        for (int64_t b = share.first; b < share.last; ++b) embed(net->embedding, step->tokens[b], b, s.x);
#pragma omp barrier
        run(*net, *step, s);
    }
}
}
