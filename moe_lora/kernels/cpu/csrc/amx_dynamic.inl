// SPDX-License-Identifier: Apache-2.0
// Dynamic formats over a tile unit, with the bits of dynamic.inl: int32 c[m][n] += a[m] . b[n] over 64 signed bytes.
// Included after amx.inl.
//
// x is the left operand: tiles of 16 rows x 64 bytes, less 128. Weights are the right operand: 64 inputs of a block of
// 16 outputs. int8 is read in place; codes of 4 bits are unpacked, one group to a tile where groups are short.

constexpr int64_t kTileBytes = 1024, kTileInputs = 64;

// From that many rows on the unit is faster; int4 pays for the sums of each group.
constexpr int64_t kTiledRowsInt8 = 16, kTiledRowsInt4 = 32;

// A dynamic tile's x and weights as the unit takes them. A group of int8 is the whole width.
struct ByteTiles {
    const uint8_t* x;      // [row / 16][step][row % 16][64]
    const int32_t* zero;   // by row, less 128
    int64_t steps, groups, depth, per_group;  // inputs in a tile of weights; tiles in a group
};

template <bool kInt4>
static inline ByteTiles byte_tiles(const DynamicTile& t) {
    static thread_local Buffer<uint8_t> packed;
    static thread_local Buffer<int32_t> zeros;
    const int64_t steps = (t.width + kTileInputs - 1) / kTileInputs;
    uint8_t* const x = packed.of((t.rows + kTileRows - 1) / kTileRows * steps * kTileBytes);
    int32_t* const zero = zeros.of(t.rows);
    for (int64_t i = 0; i < t.rows; i++) {
        zero[i] = t.zero[t.x[i]] - 128;
        for (int64_t step = 0; step < steps; step++) {
            const uint8_t* const from = t.plain + t.x[i] * t.padded + step * kTileInputs;
            uint8_t* const to = x + (i / kTileRows * steps + step) * kTileBytes + i % kTileRows * kTileInputs;
            for (int64_t k = 0; k < kTileInputs; k++) to[k] = from[k] ^ 128;
        }
    }
    if (!kInt4) return {x, zero, steps, 1, kTileInputs, steps};
    const int64_t depth = t.group < kTileInputs ? t.group : kTileInputs;
    return {x, zero, steps, t.width / t.group, depth, t.group / depth};
}

// Weights of a group and a block, a kilobyte per tile: `tile(i)` of `per_group`.
struct BlockTiles {
    const int8_t *first, *last;
    int64_t num;
    const int8_t* tile(int64_t i) const { return i + 1 == num ? last : first + i * kTileBytes; }
};

// int8: [k / 4][output][4], in place but for a part at the end.
static inline BlockTiles int8_tiles(const DynamicTile& t, const ByteTiles& all, int64_t block, int8_t* padded) {
    const int64_t words = (t.width + 3) / 4, rest = words % kTileRows;
    const int8_t* const w = static_cast<const int8_t*>(t.data) + block * words * 64;
    const int8_t* const last = w + (all.steps - 1) * kTileBytes;
    if (rest == 0) return {w, last, all.steps};
    memset(padded, 0, kTileBytes);
    memcpy(padded, last, rest * 64);
    return {w, padded, all.steps};
}

// int4: [k / 8][output][4], q + 8 of k + j in the low and of k + 4 + j in the high bits. totals: of the group, by
// output.
template <class I>
static inline BlockTiles int4_tiles(const DynamicTile& t, const ByteTiles& all, int64_t block, int64_t g, int8_t* out,
                                    int32_t* totals) {
    constexpr int kVectors = int(kBlockOut) / I::kLanes;
    const char* w = static_cast<const char*>(t.data) + (block * t.width + g * t.group) / 8 * 64;
    typename I::Int total[kVectors];
    for (auto& sum : total) sum = I::int_zero();
    for (int64_t i = 0; i < all.per_group; i++) {
        int8_t* row = out + i * kTileBytes;
        if (all.depth < kTileInputs) {  // beside another group's inputs
            memset(row, 0, kTileBytes);
            row += g * all.depth % kTileInputs / 4 * 64;
        }
        for (int64_t k = 0; k < all.depth; k += 8, w += 64)
            for (int half = 0; half < 2; half++, row += 64)
                for (int v = 0; v < kVectors; v++) {
                    const auto weights = I::load_nibbles(w + v * I::kLanes * 4, half);
                    memcpy(row + v * I::kLanes * 4, &weights, sizeof(weights));
                    total[v] = I::sum_bytes(weights, total[v]);
                }
    }
    memcpy(totals, total, sizeof(total));
    return {out, out + (all.per_group - 1) * kTileBytes, all.per_group};
}

// c += x . w for two tiles of rows and two blocks: c[0] and c[1] of the first block. `Rows`, `Blocks`: 1 or 2.
template <class Tiles, int Rows, int Blocks>
static inline void add_byte_products(const uint8_t* x, int64_t row_tile, const BlockTiles* w, int64_t i) {
    Tiles::template load<4>(x, kTileInputs);
    Tiles::template load<6>(w[0].tile(i), kTileInputs);
    Tiles::template dot_bytes<0, 4, 6>();
    if constexpr (Rows == 2) {
        Tiles::template load<5>(x + row_tile, kTileInputs);
        Tiles::template dot_bytes<1, 5, 6>();
    }
    if constexpr (Blocks == 2) {
        Tiles::template load<7>(w[1].tile(i), kTileInputs);
        Tiles::template dot_bytes<2, 4, 7>();
        if constexpr (Rows == 2) Tiles::template dot_bytes<3, 5, 7>();
    }
}

// Products of a group to fp32 sums of 16 rows and a block.
template <class I, class S, bool kInt4>
static inline void add_group(const DynamicTile& t, const ByteTiles& all, int64_t row, int64_t block, int64_t g,
                             const int32_t* products, const int32_t* totals, float* sums) {
    const int64_t rows = t.rows - row < kTileRows ? t.rows - row : kTileRows;
    for (int64_t n = 0; n < kBlockOut; n += I::kLanes) {
        typename I::Int total = I::int_zero();
        typename I::V by = I::zero();
        if constexpr (kInt4) {
            memcpy(&total, totals + n, sizeof(total));
            by = I::load(static_cast<const S*>(t.scale) + (block * all.groups + g) * kBlockOut + n);
        }
        for (int64_t i = 0; i < rows; i++) {
            typename I::Int found;
            memcpy(&found, products + i * kBlockOut + n, sizeof(found));
            float* const to = sums + i * kBlockOut + n;
            if constexpr (kInt4) {
                const auto exact = I::to_float(I::int_sub_product(found, I::int_set1(all.zero[row + i]), total));
                I::store(to, g ? I::fma(exact, by, I::load(to)) : I::mul(exact, by));
            } else {
                I::store(to, I::to_float(found));
            }
        }
    }
}

// A group of 16 or 32 rows and one or two blocks. sums: [block][row][output] of 16 rows, and of the next 16.
template <class Tiles, class T, bool kInt4, int Rows, int Blocks>
static inline void dynamic_tile_block(const DynamicTile& t, const ByteTiles& all, int64_t row, int64_t block, int64_t g,
                                      const BlockTiles* w, const int32_t (*totals)[kBlockOut], float* sums) {
    const int64_t row_tile = all.steps * kTileBytes;
    const int64_t first = g * all.per_group * all.depth / kTileInputs;
    const uint8_t* const x = all.x + row / kTileRows * row_tile + first * kTileBytes;
    alignas(64) int32_t products[4][kTileWords];
    zero_sums<Tiles>();
    for (int64_t i = 0; i < all.per_group; i++)
        add_byte_products<Tiles, Rows, Blocks>(x + i * kTileBytes, row_tile, w, i);
    Tiles::template store<0>(products[0], 64);
    if constexpr (Rows == 2) Tiles::template store<1>(products[1], 64);
    if constexpr (Blocks == 2) Tiles::template store<2>(products[2], 64);
    if constexpr (Rows == 2 && Blocks == 2) Tiles::template store<3>(products[3], 64);
    for (int b = 0; b < Blocks; b++)
        for (int r = 0; r < Rows; r++)
            add_group<typename Tiles::Vectors, T, kInt4>(t, all, row + r * kTileRows, block + b, g, products[2 * b + r],
                                                         totals[b], sums + (2 * r + b) * kTileWords);
}

template <class Tiles, class T, bool kInt4, void (*IsaTable::*kFew)(const DynamicTile&)>
static void dynamic_tile_dot(const DynamicTile& t) {
    using I = typename Tiles::Vectors;
    if (t.rows < (kInt4 ? kTiledRowsInt4 : kTiledRowsInt8)) return (Tiles::base().*kFew)(t);
    static thread_local Buffer<int8_t> unpacked;
    static thread_local Buffer<float> buffer;
    const ByteTiles all = byte_tiles<kInt4>(t);
    const int64_t blocks = (t.num_w + kBlockOut - 1) / kBlockOut;
    const int64_t tiles_bytes = kInt4 ? all.per_group * kTileBytes : kTileBytes;
    int8_t* const tiles = unpacked.of(2 * tiles_bytes);
    float* const sums = buffer.of((t.rows + kTileRows - 1) / kTileRows * 2 * kTileWords);
    Tiles::begin(kTileRows);
    for (int64_t block = 0; block < blocks; block += 2) {
        const int num = block + 1 < blocks ? 2 : 1;
        for (int64_t g = 0; g < all.groups; g++) {
            BlockTiles w[2];
            alignas(64) int32_t totals[2][kBlockOut];
            for (int b = 0; b < num; b++)
                if constexpr (kInt4)
                    w[b] = int4_tiles<I>(t, all, block + b, g, tiles + b * tiles_bytes, totals[b]);
                else
                    w[b] = int8_tiles(t, all, block + b, tiles + b * tiles_bytes);
            for (int64_t row = 0; row < t.rows; row += kPanelRows)
                for_groups(t.rows - row, [&](auto rows) {
                    constexpr int kRows = decltype(rows)::value;
                    float* const to = sums + row / kTileRows * 2 * kTileWords;
                    num == 2 ? dynamic_tile_block<Tiles, T, kInt4, kRows, 2>(t, all, row, block, g, w, totals, to)
                             : dynamic_tile_block<Tiles, T, kInt4, kRows, 1>(t, all, row, block, g, w, totals, to);
                });
        }
        for (int64_t row = 0; row < t.rows; row++)
            for (int b = 0; b < num; b++)
                finish_row<I, T, kInt4>(t, row, block + b,
                                        sums + (row / kTileRows * 2 + b) * kTileWords + row % kTileRows * kBlockOut);
    }
    Tiles::end();
}

// The table with the unit's dots of bytes.
template <class Tiles>
static IsaTable with_dynamic_tiles(IsaTable table) {
    table.tiled_rows_int8 = kTiledRowsInt8, table.tiled_rows_int4 = kTiledRowsInt4;
    table.dynamic_int8_f32 = dynamic_tile_dot<Tiles, float, false, &IsaTable::dynamic_int8_f32>;
    table.dynamic_int8_bf16 = dynamic_tile_dot<Tiles, bf16, false, &IsaTable::dynamic_int8_bf16>;
    table.dynamic_int4_f32 = dynamic_tile_dot<Tiles, float, true, &IsaTable::dynamic_int4_f32>;
    table.dynamic_int4_bf16 = dynamic_tile_dot<Tiles, bf16, true, &IsaTable::dynamic_int4_bf16>;
    return table;
}
