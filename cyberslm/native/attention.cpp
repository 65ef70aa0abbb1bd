// Causal attention of whole rows, forward and backward: for training, and for prompts.
//
// Everything is turned by ninety degrees: a block of queries lies in the lanes of vectors, its keys below one another.
// So a softmax's maxima, sums and factors are vectors too, and no number crosses lanes. With weights P of queries Q:
//
//     S^T = K Q^T    P^T = exp(scale S^T - lse)    O^T = V^T P^T
//     dP^T = V dO^T    dS^T = P^T (dP^T - sum(O dO))    dV = P^T dO    dK = scale dS^T Q    dQ^T = scale K^T dS^T
//
// (Dao et al. 2022, https://arxiv.org/abs/2205.14135; Dao 2023, https://arxiv.org/abs/2307.08691). The scores of a block
// never leave the first cache. Products take words: two neighbours in bf16 where the processor multiplies such pairs,
// else one number in fp32. Sums, softmax and what gradients are summed in are fp32. A row may be cut into runs that don't
// see each other. Each result is made by one thread, so that it doesn't depend on how many there are.

#include <memory>
#include <vector>

#include "products.h"

extern "C" {

struct Heads {  // (B, H, T, width); distances in numbers, a vector's own lie together
    void* at;
    int64_t row, head, token;
};

struct Attention {
    Heads q, k, v, out, grad, dq, dk, dv;
    float* lse;           // (B, H, T), the log of each query's sum of exponentials
    const int64_t* runs;  // (count, 3): row, first token, token after the last
    int64_t count, tokens, heads, kv_heads, key_size, head_size, window, kind, threads;  // window 0: none
    int64_t past;  // keys before those of the queries' own tokens; forward only, and with whole rows as runs
    double scale;
};
}

namespace {

constexpr int SIDE = 2 * LANES;  // queries of a block
constexpr int DEPTH = 64;        // keys of a block
constexpr int TALL = LANES / 2;  // rows of a product that are made at once

struct Pairs {
    static constexpr int unit = 2;
    static Floats add(Floats total, uint32_t word, const uint32_t* lanes) { return add_pairs(total, word, lanes); }
};

struct Singles {
    static constexpr int unit = 1;
    static Floats add(Floats total, uint32_t word, const uint32_t* lanes) {
        return total + bits<float>(word) * load<Floats>(lanes);
    }
};

typedef std::vector<uint32_t> Words;
typedef std::vector<float> Numbers;

template <class Word>
constexpr int64_t words(int64_t count) {
    return (count + Word::unit - 1) / Word::unit;
}

template <class Word, class Cell>
inline uint32_t word(Cell first, Cell second) {
    if constexpr (Word::unit == 2)
        return uint32_t(first) | uint32_t(second) << 16;
    else
        return bits<uint32_t>(number(first));
}

// (rows, columns) words, both whole vectors, to (columns, rows).
inline void turn_all(const uint32_t* from, int64_t rows, int64_t columns, uint32_t* to) {
    for (int64_t i = 0; i < rows; i += LANES)
        for (int64_t j = 0; j < columns; j += LANES) turn(from + i * columns + j, columns, to + j * rows + i, rows);
}

// The vectors of one head from a run's first token on; behind its last they are zeros.
template <class Word, class Cell>
struct Vectors {
    Cell* at;
    int64_t token, count, width;

    // Tokens [from, from + size), a line each of words of neighbours in its vector.
    void along(int64_t from, int64_t size, uint32_t* to, int64_t step) const {
        const int64_t whole = width / Word::unit, real = std::clamp<int64_t>(count - from, 0, size);
        for (int64_t n = 0; n < real; ++n) {
            const Cell* const x = at + (from + n) * token;
            uint32_t* const line = to + n * step;
            for (int64_t i = 0; i < whole; ++i) line[i] = word<Word>(x[i * Word::unit], x[i * Word::unit + Word::unit - 1]);
            if (whole * Word::unit < width) line[whole] = word<Word>(x[width - 1], Cell(0));
            std::fill(line + words<Word>(width), line + step, 0);
        }
        std::fill(to + real * step, to + size * step, 0);
    }

    // The same tokens, a line for each `unit` of them, of words of what is at one place in their vectors.
    void across(int64_t from, int64_t size, uint32_t* to, int64_t step) const {
        for (int64_t n = from; n < from + size; n += Word::unit, to += step) {
            const Cell *const x = at + n * token, *const y = x + (Word::unit - 1) * token;
            const bool both = n + Word::unit <= count, one = n < count;
            for (int64_t i = 0; both && i < width; ++i) to[i] = word<Word>(x[i], y[i]);
            for (int64_t i = 0; !both && i < width; ++i) to[i] = word<Word>(one ? x[i] : Cell(0), Cell(0));
            std::fill(to + width, to + step, 0);
        }
    }

    // Puts numbers times `factor` into the vector of token n.
    void put_line(int64_t n, const float* from, float factor) const {
        Cell* const to = at + n * token;
        for (int64_t i = 0; i < width; ++i) put(to + i, from[i] * factor);
    }
};

// A left operand: words of a row lie together.
struct Left {
    const uint32_t* at;
    int64_t step, rows;
};

// c (TALL, V vectors) = a b, or added to it; b (depth, lanes).
template <class Word, int V, bool add>
inline void tile(const Left& a, const uint32_t* b, int64_t depth, int64_t lanes, float* c) {
    Floats totals[TALL][V];
#pragma GCC unroll 8
    for (int r = 0; r < TALL; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) totals[r][v] = add ? load<Floats>(c + r * lanes + v * LANES) : Floats{};
    for (int64_t d = 0; d < depth; ++d)
#pragma GCC unroll 8
        for (int r = 0; r < TALL; ++r)
#pragma GCC unroll 2
            for (int v = 0; v < V; ++v)
                totals[r][v] = Word::add(totals[r][v], a.at[r * a.step + d], b + d * lanes + v * LANES);
#pragma GCC unroll 8
    for (int r = 0; r < TALL; ++r)
#pragma GCC unroll 2
        for (int v = 0; v < V; ++v) store(c + r * lanes + v * LANES, totals[r][v]);
}

template <class Word, bool add>
void multiply(const Left& a, const uint32_t* b, int64_t depth, int64_t lanes, float* c) {
    for (int64_t col = 0; col < lanes; col += 2 * LANES)
        for (int64_t r = 0; r < a.rows; r += TALL) {
            const Left part{a.at + r * a.step, a.step, TALL};
            if (lanes - col > LANES)
                tile<Word, 2, add>(part, b + col, depth, lanes, c + r * lanes + col);
            else
                tile<Word, 1, add>(part, b + col, depth, lanes, c + r * lanes + col);
        }
}

// c (rows, lanes) = a b, or added to it, for whole TALLs and whole vectors.
template <class Word>
inline void multiply(const Left& a, const uint32_t* b, int64_t depth, int64_t lanes, float* c, bool add) {
    add ? multiply<Word, true>(a, b, depth, lanes, c) : multiply<Word, false>(a, b, depth, lanes, c);
}

// A line of SIDE numbers as words of neighbours in it.
template <class Word>
inline void pack_line(uint32_t* to, const Floats* line) {
    if constexpr (Word::unit == 2)
        store_pairs(to, line[0], line[1]);
    else
        std::memcpy(to, line, SIDE * sizeof(float));
}

// Lines below one another as words of neighbours in a column: (rows / unit, SIDE).
template <class Word>
inline void pack_lines(uint32_t* to, const float* lines, int64_t rows) {
    if constexpr (Word::unit == 2)
        for (int64_t i = 0; i < rows / 2 * SIDE; i += LANES) {
            const float* first = lines + i / SIDE * 2 * SIDE + i % SIDE;
            store_pairs(to + i, first, first + SIDE);
        }
    else
        std::memcpy(to, lines, rows * SIDE * sizeof(float));
}

// Keys [key, key + rows) against the queries from `query` on: what a query doesn't see becomes -inf.
inline void hide(float* scores, int64_t rows, int64_t key, int64_t query, int64_t window) {
    Ints lane[2];
    for (int i = 0; i < SIDE; ++i) lane[i / LANES][i % LANES] = i;
    for (int64_t s = 0; s < rows; ++s, scores += SIDE) {
        const int64_t first = key + s - query, last = window ? first + window : SIDE;
        const int low = int(std::clamp<int64_t>(first, 0, SIDE)), high = int(std::clamp<int64_t>(last, 0, SIDE));
        for (int half = 0; half < 2; ++half) {
            const Floats x = load<Floats>(scores + half * LANES);
            store(scores + half * LANES, lane[half] < low || lane[half] >= high ? splat(-INFINITY) : x);
        }
    }
}

// One run of one row.
struct Run {
    int64_t row, first, count;
};

template <class Word, class Cell>
inline Vectors<Word, Cell> vectors(const Heads& heads, const Run& run, int64_t head, int64_t width) {
    Cell* const at = static_cast<Cell*>(heads.at) + run.row * heads.row + head * heads.head + run.first * heads.token;
    return {at, heads.token, run.count, width};
}

// Keys and values of one head and run as left operands, shared by the queries of its group. `key_columns` and
// `value_columns` have a block of DEPTH keys behind the other, a line for each number of their vectors.
template <class Word, class Cell>
struct Keys {
    int64_t room, key_words, key_rows, value_words, value_rows;
    Words keys, key_columns, values, value_columns;

    Keys(const Attention& a, Run run, int64_t head, bool backward)
        : room(padded(run.count + a.past, DEPTH)),
          key_words(words<Word>(a.key_size)),
          key_rows(padded(a.key_size)),
          value_words(words<Word>(a.head_size)),
          value_rows(padded(a.head_size)),
          keys(room * key_words),
          key_columns(backward ? room / Word::unit * key_rows : 0),
          values(backward ? room * value_words : 0),
          value_columns(backward ? 0 : room / Word::unit * value_rows) {
        run.count += a.past;
        const auto k = vectors<Word, Cell>(a.k, run, head, a.key_size), v = vectors<Word, Cell>(a.v, run, head, a.head_size);
        k.along(0, room, keys.data(), key_words);
        if (backward) v.along(0, room, values.data(), value_words);
        const auto& turned = backward ? k : v;
        const int64_t rows = backward ? key_rows : value_rows;
        uint32_t* to = (backward ? key_columns : value_columns).data();
        Words block(DEPTH / Word::unit * rows);
        for (int64_t from = 0; from < room; from += DEPTH, to += block.size()) {
            turned.across(from, DEPTH, block.data(), rows);
            turn_all(block.data(), DEPTH / Word::unit, rows, to);
        }
    }
    Left block(int64_t from, int64_t rows) const { return {keys.data() + from * key_words, key_words, rows}; }
    Left value_block(int64_t from, int64_t rows) const { return {values.data() + from * value_words, value_words, rows}; }
    Left columns(int64_t from) const { return part(key_columns, from, key_rows); }
    Left down_values(int64_t from) const { return part(value_columns, from, value_rows); }

   private:
    static Left part(const Words& all, int64_t from, int64_t rows) {
        return {all.data() + from / Word::unit * rows, DEPTH / Word::unit, rows};
    }
};

// The blocks of keys that the queries of keys [query, query + SIDE) look among, as f(first key, rows, whether any is hidden).
template <class F>
inline void each_block(const Attention& a, const Run& run, int64_t query, F f) {
    const int64_t last = std::min(query + SIDE, run.count + a.past);
    const int64_t start = a.window ? std::max<int64_t>(0, query - a.window + 1) : 0;
    for (int64_t key = start / DEPTH * DEPTH; key < last; key += DEPTH) {
        const int64_t rows = padded(std::min<int64_t>(DEPTH, last - key), TALL);
        f(key, rows, key + rows > query + 1 || (a.window && last - key > a.window));
    }
}

// Scores of a block of keys, scaled, hidden ones -inf.
template <class Word, class Cell>
inline void make_scores(const Attention& a, const Keys<Word, Cell>& keys, const Words& queries, int64_t query, int64_t key,
                        int64_t rows, bool some_hidden, float* scores) {
    multiply<Word>(keys.block(key, rows), queries.data(), keys.key_words, SIDE, scores, false);
    if (some_hidden) hide(scores, rows, key, query, a.window);
}

// The queries from `query` on as right operands, (words of the vector, SIDE); `line` has room for SIDE vectors.
template <class Word, class Cell>
inline void to_lanes(const Vectors<Word, Cell>& from, int64_t query, Words& line, Words& to) {
    const int64_t columns = to.size() / SIDE;
    from.along(query, SIDE, line.data(), columns);
    turn_all(line.data(), SIDE, columns, to.data());
}

// Numbers (width, SIDE) times a factor for each lane to the vectors of the queries from `query` on.
template <class Word, class Cell>
inline void from_lanes(const Vectors<Word, Cell>& to, int64_t query, const Numbers& from, const Floats* factor, Words& line) {
    const int64_t columns = from.size() / SIDE;
    turn_all(reinterpret_cast<const uint32_t*>(from.data()), columns, SIDE, line.data());
    for (int64_t lane = 0; lane < std::min<int64_t>(SIDE, to.count - query); ++lane)
        to.put_line(query + lane, reinterpret_cast<const float*>(line.data()) + lane * columns, factor[lane / LANES][lane % LANES]);
}

template <class Word, class Cell>
struct Forward {
    const Attention& a;
    Words queries, weights, line;
    Numbers scores, mixed;

    explicit Forward(const Attention& a)
        : a(a),
          queries(padded(words<Word>(a.key_size)) * SIDE),
          weights(DEPTH / Word::unit * SIDE),
          line(padded(std::max(a.key_size, a.head_size)) * SIDE),
          scores(DEPTH * SIDE),
          mixed(padded(a.head_size) * SIDE) {}

    void operator()(const Run& run, int64_t head, int64_t query, const Keys<Word, Cell>& keys) {
        to_lanes(vectors<Word, Cell>(a.q, run, head, a.key_size), query, line, queries);
        Floats largest[2] = {splat(-1e30f), splat(-1e30f)}, total[2] = {};
        bool begun = false;
        each_block(a, run, query + a.past, [&](int64_t key, int64_t rows, bool some_hidden) {
            make_scores(a, keys, queries, query + a.past, key, rows, some_hidden, scores.data());
            soften(rows, largest, total, begun);
            pack_lines<Word>(weights.data(), scores.data(), rows);
            multiply<Word>(keys.down_values(key), weights.data(), rows / Word::unit, SIDE, mixed.data(), begun);
            begun = true;
        });
        const Floats factor[2] = {1.0f / total[0], 1.0f / total[1]};
        from_lanes(vectors<Word, Cell>(a.out, run, head, a.head_size), query, mixed, factor, line);
        float* const lse = a.lse + (run.row * a.heads + head) * a.tokens + run.first + query;
        for (int64_t lane = 0; lane < std::min<int64_t>(SIDE, run.count - query); ++lane)
            lse[lane] = largest[lane / LANES][lane % LANES] + std::log(total[lane / LANES][lane % LANES]);
    }

   private:
    // Scores to weights by the largest so far, by which what was mixed before is brought down too.
    void soften(int64_t rows, Floats* largest, Floats* total, bool begun) {
        const float scale = float(a.scale);
        for (int half = 0; half < 2; ++half) {
            float* const line = scores.data() + half * LANES;
            Floats top = largest[half];
            for (int64_t s = 0; s < rows; ++s) {
                const Floats x = load<Floats>(line + s * SIDE) * scale;
                top = x > top ? x : top;
            }
            const Floats down = exp(largest[half] - top);
            Floats sum = total[half] * down;
            for (int64_t s = 0; s < rows; ++s) {
                const Floats e = exp(load<Floats>(line + s * SIDE) * scale - top);
                store(line + s * SIDE, e);
                sum += e;
            }
            largest[half] = top, total[half] = sum;
            if (!begun) continue;
            for (float* at = mixed.data() + half * LANES; at < mixed.data() + mixed.size(); at += SIDE)
                store(at, load<Floats>(at) * down);
        }
    }
};

template <class Word, class Cell>
struct Backward {
    const Attention& a;
    const int64_t key_lanes, value_lanes;
    Words queries, grads, queries_down, grads_down, weights, slopes, slopes_down, line;
    Numbers scores, d_weights, dq, dk, dv;

    explicit Backward(const Attention& a)
        : a(a),
          key_lanes(padded(a.key_size)),
          value_lanes(padded(a.head_size)),
          queries(padded(words<Word>(a.key_size)) * SIDE),
          grads(padded(words<Word>(a.head_size)) * SIDE),
          queries_down(SIDE / Word::unit * key_lanes),
          grads_down(SIDE / Word::unit * value_lanes),
          weights(DEPTH * SIDE / Word::unit),
          slopes(DEPTH * SIDE / Word::unit),
          slopes_down(DEPTH * SIDE / Word::unit),
          line(padded(std::max(a.key_size, a.head_size)) * SIDE),
          scores(DEPTH * SIDE),
          d_weights(DEPTH * SIDE),
          dq(key_lanes * SIDE) {}

    void operator()(const Run& run, int64_t kv_head) {
        const Keys<Word, Cell> keys(a, run, kv_head, true);
        const int64_t group = a.heads / a.kv_heads;
        dk.assign(keys.room * key_lanes, 0.0f), dv.assign(keys.room * value_lanes, 0.0f);
        for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head)
            for (int64_t query = 0; query < run.count; query += SIDE) one_block(run, head, query, keys);
        const auto to_k = vectors<Word, Cell>(a.dk, run, kv_head, a.key_size);
        const auto to_v = vectors<Word, Cell>(a.dv, run, kv_head, a.head_size);
        for (int64_t n = 0; n < run.count; ++n) {
            to_k.put_line(n, &dk[n * key_lanes], float(a.scale));
            to_v.put_line(n, &dv[n * value_lanes], 1.0f);
        }
    }

   private:
    void one_block(const Run& run, int64_t head, int64_t query, const Keys<Word, Cell>& keys) {
        const auto q = vectors<Word, Cell>(a.q, run, head, a.key_size);
        const auto grad = vectors<Word, Cell>(a.grad, run, head, a.head_size);
        const auto out = vectors<Word, Cell>(a.out, run, head, a.head_size);
        to_lanes(q, query, line, queries);
        q.across(query, SIDE, queries_down.data(), key_lanes);
        to_lanes(grad, query, line, grads);
        grad.across(query, SIDE, grads_down.data(), value_lanes);
        Floats lse[2] = {}, delta[2] = {};
        const float* const from = a.lse + (run.row * a.heads + head) * a.tokens + run.first + query;
        for (int64_t lane = 0; lane < std::min<int64_t>(SIDE, run.count - query); ++lane) {
            const Cell *x = out.at + (query + lane) * out.token, *y = grad.at + (query + lane) * grad.token;
            float sum = 0;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < a.head_size; ++i) sum += number(x[i]) * number(y[i]);
            lse[lane / LANES][lane % LANES] = from[lane], delta[lane / LANES][lane % LANES] = sum;
        }
        bool begun = false;
        each_block(a, run, query, [&](int64_t key, int64_t rows, bool some_hidden) {
            make_scores(a, keys, queries, query, key, rows, some_hidden, scores.data());
            multiply<Word>(keys.value_block(key, rows), grads.data(), keys.value_words, SIDE, d_weights.data(), false);
            slope(rows, lse, delta);
            constexpr int64_t wide = SIDE / Word::unit;
            multiply<Word>({weights.data(), wide, rows}, grads_down.data(), wide, value_lanes, &dv[key * value_lanes], true);
            multiply<Word>({slopes.data(), wide, rows}, queries_down.data(), wide, key_lanes, &dk[key * key_lanes], true);
            pack_lines<Word>(slopes_down.data(), d_weights.data(), rows);
            multiply<Word>(keys.columns(key), slopes_down.data(), rows / Word::unit, SIDE, dq.data(), begun);
            begun = true;
        });
        const Floats factor[2] = {splat(float(a.scale)), splat(float(a.scale))};
        from_lanes(vectors<Word, Cell>(a.dq, run, head, a.key_size), query, dq, factor, line);
    }

    // Weights again, and in place of their gradients those of the scores.
    void slope(int64_t rows, const Floats* lse, const Floats* delta) {
        const float scale = float(a.scale);
        for (int64_t s = 0; s < rows; ++s) {
            Floats p[2], ds[2];
            for (int half = 0; half < 2; ++half) {
                float* const to = d_weights.data() + s * SIDE + half * LANES;
                p[half] = exp(load<Floats>(scores.data() + s * SIDE + half * LANES) * scale - lse[half]);
                ds[half] = p[half] * (load<Floats>(to) - delta[half]);
                store(to, ds[half]);
            }
            pack_line<Word>(weights.data() + s * SIDE / Word::unit, p);
            pack_line<Word>(slopes.data() + s * SIDE / Word::unit, ds);
        }
    }
};

inline Run run_of(const Attention& a, int64_t i) {
    return {a.runs[3 * i], a.runs[3 * i + 1], a.runs[3 * i + 2] - a.runs[3 * i + 1]};
}

// A thread takes all that look at the same keys; with few keys' heads first these are made, then any thread takes any block
// of queries.
template <class Word, class Cell>
void all_forward(const Attention& a) {
    const int64_t group = a.heads / a.kv_heads, items = a.count * a.kv_heads, blocks = (a.tokens + SIDE - 1) / SIDE;
    const auto keys_of = [&](int64_t item) {
        return std::make_unique<const Keys<Word, Cell>>(a, run_of(a, item / a.kv_heads), item % a.kv_heads, false);
    };
    const bool few = items < 4 * a.threads;
    std::vector<std::unique_ptr<const Keys<Word, Cell>>> all(few ? items : 0);
#pragma omp parallel num_threads(a.threads)
    {
        Forward<Word, Cell> forward(a);
        const auto all_heads = [&](int64_t item, int64_t block, const Keys<Word, Cell>& keys) {
            const Run run = run_of(a, item / a.kv_heads);
            if (block * SIDE >= run.count) return;
            for (int64_t i = 0; i < group; ++i) forward(run, item % a.kv_heads * group + i, block * SIDE, keys);
        };
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < items; ++item) {
            auto keys = keys_of(item);
            for (int64_t block = 0; block < blocks && !few; ++block) all_heads(item, block, *keys);
            if (few) all[item] = std::move(keys);
        }
#pragma omp for schedule(dynamic, 1)
        for (int64_t i = 0; i < int64_t(all.size()) * blocks; ++i)  // the last blocks, which take the longest, first
            all_heads(i % items, blocks - 1 - i / items, *all[i % items]);
    }
}

template <class Word, class Cell>
void all_backward(const Attention& a) {
#pragma omp parallel num_threads(a.threads)
    {
        Backward<Word, Cell> backward(a);
#pragma omp for schedule(dynamic, 1)
        for (int64_t item = 0; item < a.count * a.kv_heads; ++item) backward(run_of(a, item / a.kv_heads), item % a.kv_heads);
    }
}

typedef std::conditional_t<HAS_PAIRS, Pairs, Singles> Best;

}  // namespace

extern "C" {

void attention_forward(const Attention* a) {
    a->kind == BF16 ? all_forward<Best, uint16_t>(*a) : all_forward<Singles, float>(*a);
}

void attention_backward(const Attention* a) {
    a->kind == BF16 ? all_backward<Best, uint16_t>(*a) : all_backward<Singles, float>(*a);
}
}
