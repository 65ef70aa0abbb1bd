// Products of int8 matrices with the same many rows, as of a prompt: rows are rounded in panels, which stay in the first
// cache while the weights of one group of features after the other meet them.

#include <vector>

#include "bytes.h"

extern "C" {

struct Int8Product {  // one behind the other, y (rows, features) = x (rows, columns) times weight (features, columns)
    const int8_t* weight;
    const float* scales;
    void* y;
    int64_t features;
};

struct Int8Products {
    const void* x;
    const Int8Product* products;
    int64_t count, rows, columns, kind, threads;
};
}

namespace {

constexpr int64_t ROOM = 1 << 18;  // words of panels that are rounded at once
constexpr int64_t FEATURES = 48;  // of a group: a multiple of LANES and of the weight rows that are taken at once

#ifdef __AVX512VNNI__
constexpr int64_t PANEL = 2 * LANES;

template <class Cell>
void round_panel(const Cell* x, int64_t rows, int64_t columns, const Bytes& to) {
    for (int64_t block = 0; block < blocks_of(columns); ++block)
        for (int64_t half = 0; half < PANEL; half += LANES) {
            const int64_t count = std::min<int64_t>(LANES, rows - half), left = columns - block * BLOCK;
            alignas(64) uint32_t words[LANES * WORDS] = {}, largest[LANES * LANES] = {}, beside[LANES * LANES];
            Floats numbers[LANES][BLOCK / LANES];
            for (int64_t b = 0; b < count; ++b) {
                const Most most = take_block(x + (half + b) * columns + block * BLOCK, left, numbers[b]);
                _mm512_store_si512(largest + b * LANES, most.bits);
            }
            turn(largest, LANES, beside, LANES);
            Most most;
            for (int64_t i = 0; i < LANES; ++i) most.add(load<Floats>(beside + i * LANES));
            const Rounding<Floats> by(Floats(most.bits));
            for (int64_t b = 0; b < count; ++b) round_block(numbers[b], by.factor[b], words + b * WORDS);
            uint32_t* const turned = to.words + block * WORDS * PANEL + half;
            turn(words, WORDS, turned, PANEL);
            Sums sums{};
            for (int64_t j = 0; j < WORDS; ++j) sums = add_bytes(sums, Sums{} + FLIP, load<Sums>(turned + j * PANEL));
            const Sums start = -sums;
            std::memcpy(to.starts + block * PANEL + half, &start, sizeof start);
            std::memcpy(to.scales + block * PANEL + half, &by.scale, sizeof by.scale);
        }
}

template <class Cell>
void multiply_panel(const Matrix& m, int64_t first, int64_t last, const Bytes& x, int64_t rows, Cell* y) {
    alignas(64) float tile[FEATURES * PANEL], square[LANES * LANES];
    const auto some = [&](auto count, int64_t row) {
        byte_lanes<LANES, 2, count>(m, row, x, 0, [&](int r, int v, Floats numbers) {
            store(tile + (row - first + r) * PANEL + v * LANES, numbers);
        });
    };
    int64_t row = first;
    for (; row + AT_ONCE / 2 <= last; row += AT_ONCE / 2) some(Number<AT_ONCE / 2>{}, row);
    for (; row < last; ++row) some(Number<1>{}, row);
    for (int64_t f = first; f < last; f += LANES)
        for (int64_t half = 0; half < rows; half += LANES) {
            turn(reinterpret_cast<uint32_t*>(tile) + (f - first) * PANEL + half, PANEL, reinterpret_cast<uint32_t*>(square), LANES);
            for (int64_t b = 0; b < LANES && half + b < rows; ++b)
                give(y + (half + b) * m.rows + f, load<Floats>(square + b * LANES), std::min<int64_t>(LANES, last - f));
        }
}

inline Matrix matrix(const Int8Products& p, int64_t i) {
    const Int8Product& own = p.products[i];
    return {own.weight, own.scales, nullptr, own.features, p.columns, INT8};
}

// Room that a thread keeps for its next call: given back, the pages would come anew, and cleared, each time.
inline uint32_t* kept_room(int64_t words) {
    constexpr int64_t line = 64 / sizeof(uint32_t);
    thread_local std::vector<uint32_t> room;
    if (int64_t(room.size()) < words + line) room.resize(words + line);
    return room.data() + (line - reinterpret_cast<uintptr_t>(room.data()) / sizeof(uint32_t) % line) % line;
}

template <class Cell>
void multiply_many(const Int8Products& p) {
    const int64_t size = padded(room_for_bytes(p.columns, PANEL)), panels = (p.rows + PANEL - 1) / PANEL;
    const int64_t at_once = std::clamp<int64_t>(ROOM / size, 1, panels);
    uint32_t* const room = kept_room(at_once * size);
#pragma omp parallel num_threads(p.threads)
    for (int64_t from = 0; from < panels; from += at_once) {
        const int64_t to = std::min(panels, from + at_once);
        const auto rows_of = [&](int64_t panel) { return std::min(PANEL, p.rows - panel * PANEL); };
        const auto bytes = [&](int64_t panel) { return Bytes(room + (panel - from) * size, p.columns, PANEL, PANEL); };
#pragma omp for schedule(static)
        for (int64_t panel = from; panel < to; ++panel)
            round_panel(static_cast<const Cell*>(p.x) + panel * PANEL * p.columns, rows_of(panel), p.columns, bytes(panel));
        for (int64_t i = 0; i < p.count; ++i) {
            const Matrix m = matrix(p, i);
            Cell* const y = static_cast<Cell*>(p.products[i].y);
#pragma omp for schedule(dynamic, 1) nowait
            for (int64_t first = 0; first < m.rows; first += FEATURES)
                for (int64_t panel = from; panel < to; ++panel)
                    multiply_panel(m, first, std::min(m.rows, first + FEATURES), bytes(panel), rows_of(panel),
                                   y + panel * PANEL * m.rows);
        }
#pragma omp barrier
    }
}

void multiply_few(const Int8Products& p) {
    const int64_t size = room_for_bytes(p.columns, p.rows);
    uint32_t* const room = kept_room(p.threads * size);
    const Rows x{static_cast<float*>(const_cast<void*>(p.x)), 1, p.columns};
#pragma omp parallel num_threads(p.threads)
    for (int64_t i = 0; i < p.count; ++i) {
        const Matrix m = matrix(p, i);
        const Share share(m.rows);
        const Rows y{static_cast<float*>(p.products[i].y), 1, m.rows};
        byte_products(m, share.first, share.last, x, {y, p.rows, false}, room + omp_get_thread_num() * size);
    }
}
#endif

}  // namespace

extern "C" {

int64_t multiplies_bytes() { return HAS_BYTES; }

void int8_products(const Int8Products* p) {
#ifdef __AVX512VNNI__
    if (p->kind == BF16) return multiply_many<uint16_t>(*p);
    p->rows <= FEW ? multiply_few(*p) : multiply_many<float>(*p);
#endif
}
}
