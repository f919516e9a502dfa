// SPDX-License-Identifier: Apache-2.0
// "dot" tiles of bf16 over a tile unit: 8 registers of 16 rows x 64 bytes, and c[m][n] += a[m] . b[n] over 32 bf16.
// Included after tiles.inl. `Tiles` is the processor's unit (isa_amx.cpp) or a plain emulation of it
// (isa_amx_emulated.cpp).
//
// Weights are the unit's left operand, read in place. x is the right operand, with two elements of k per 32-bit
// word and one row of words per pair: panels of 32 rows are packed and padded with
// zeros. An element's sum runs over k in steps of 32, in the unit's own order within a step: by width alone.
//
// Quantised weights are unpacked 32 rows at a time, into the cache. Beside one panel of x the first-level cache
// holds a few hundred inputs at a time; beside more panels, the second-level cache holds them, for its number of
// panels.

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileWords = 256;

// Rows of a panel, and weights of a block.
constexpr int64_t kPanelRows = 2 * kTileRows, kBlockColumns = 2 * kTileRows;

// Quantised weights. Bytes of the rows of x per unpacked block, and most rows. Weights per call.
// Inputs per chunk beside one panel.
constexpr int64_t kSharedBytes = 1 << 19, kMostSharedRows = 4 * kPanelRows, kTiledColumns = 512, kUnpackedInputs = 256;

// Growing memory of one thread.
template <class T>
struct Buffer {
    T* items = nullptr;
    int64_t capacity = 0;

    ~Buffer() { free(items); }
    T* of(int64_t count) {
        if (count > capacity) {
            free(items);
            items = static_cast<T*>(aligned_alloc(64, (count * sizeof(T) + 63) / 64 * 64));
            capacity = items ? count : 0;
            if (!items) abort();
        }
        return items;
    }
};

static inline int64_t num_steps(const DotTile& t) { return (t.width + kTileDepth - 1) / kTileDepth; }

// Group g holds rows [16 g, 16 g + 16) of the panel: word [g][step][pair of k][row].
static inline void pack_panel(const DotTile& t, int64_t row, uint32_t* words) {
    const int64_t rows = t.rows - row < kPanelRows ? t.rows - row : kPanelRows, steps = num_steps(t);
    const int64_t groups = (rows + kTileRows - 1) / kTileRows;
    memset(words, 0, groups * steps * kTileWords * sizeof(uint32_t));
    for (int64_t i = 0; i < rows; i++) {
        const bf16* x = static_cast<const bf16*>(t.x[row + i]);
        uint32_t* to = words + i / kTileRows * steps * kTileWords + i % kTileRows;
        int64_t k = 0;
        for (; k + 2 <= t.width; k += 2) memcpy(to + k / 2 * kTileRows, x + k, sizeof(uint32_t));
        if (k < t.width) memcpy(to + k / 2 * kTileRows, x + k, sizeof(bf16));
    }
}

// 16 weights from n on, 32 elements from k on; padded with zeros.
template <class Tiles, int Register>
static inline void load_weights(const DotTile& t, int64_t n, int64_t k) {
    const bf16* w = static_cast<const bf16*>(t.w) + n * t.width + k;
    const int64_t stride = t.width * int64_t(sizeof(bf16));
    if (n + kTileRows <= t.num_w && k + kTileDepth <= t.width) return Tiles::template load<Register>(w, stride);
    const int64_t depth = t.width - k < kTileDepth ? t.width - k : kTileDepth;
    alignas(64) bf16 padded[kTileRows * kTileDepth] = {};
    for (int64_t i = 0; i < kTileRows && n + i < t.num_w; i++)
        memcpy(padded + i * kTileDepth, w + i * t.width, depth * sizeof(bf16));
    Tiles::template load<Register>(padded, kTileDepth * int64_t(sizeof(bf16)));
}

// Sums [weight][row] of a register to the rows of out, with bias.
template <class Tiles, class Out, int Register>
static inline void store_out(const DotTile& t, int64_t row, int64_t n) {
    alignas(64) float sums[kTileWords];
    Tiles::template store<Register>(sums, kTileRows * int64_t(sizeof(float)));
    for (int64_t i = 0; i < kTileRows && row + i < t.rows; i++) {
        Out* out = static_cast<Out*>(t.out[row + i]) + t.column;
        const Out* bias = static_cast<const Out*>(t.bias);
        const auto sum = [&](int64_t j) { return sums[j * kTileRows + i]; };
        int64_t j = 0;
        for (; j + 4 <= kTileRows && n + j + 4 <= t.num_w; j += 4)
            store_sums<Out, 4>(Quad{sum(j), sum(j + 1), sum(j + 2), sum(j + 3)}, out + n + j,
                               bias ? bias + n + j : nullptr);
        for (; j < kTileRows && n + j < t.num_w; j++)
            store_sums<Out, 1>(Quad{sum(j), 0, 0, 0}, out + n + j, bias ? bias + n + j : nullptr);
    }
}

template <class Tiles>
static inline void zero_sums() {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
}

// Adds the products of 32 weights from n on, over their whole width, with `Groups` times 16 rows of x, `group` words
// apart.
template <class Tiles, int Groups>
static inline void add_products(const DotTile& t, int64_t n, const uint32_t* x, int64_t group) {
    for (int64_t k = 0; k < t.width; k += kTileDepth, x += kTileWords) {
        load_weights<Tiles, 4>(t, n, k);
        load_weights<Tiles, 5>(t, n + kTileRows, k);
        Tiles::template load<6>(x, kTileRows * int64_t(sizeof(uint32_t)));
        Tiles::template dot<0, 4, 6>();
        Tiles::template dot<1, 5, 6>();
        if constexpr (Groups == 2) {
            Tiles::template load<7>(x + group, kTileRows * int64_t(sizeof(uint32_t)));
            Tiles::template dot<2, 4, 7>();
            Tiles::template dot<3, 5, 7>();
        }
    }
}

template <class Tiles, class Out, int Groups>
static inline void store_block(const DotTile& t, int64_t row, int64_t n) {
    store_out<Tiles, Out, 0>(t, row, n);
    store_out<Tiles, Out, 1>(t, row, n + kTileRows);
    if constexpr (Groups == 2) {
        store_out<Tiles, Out, 2>(t, row + kTileRows, n);
        store_out<Tiles, Out, 3>(t, row + kTileRows, n + kTileRows);
    }
}

// Sums of one panel and 32 weights: products(groups) adds them.
template <class Tiles, class Out, class Products>
static inline void tile_block(const DotTile& t, int64_t row, int64_t n, const Products& products) {
    zero_sums<Tiles>();
    if (t.rows - row > kTileRows) {
        products(Constant<2>());
        store_block<Tiles, Out, 2>(t, row, n);
    } else {
        products(Constant<1>());
        store_block<Tiles, Out, 1>(t, row, n);
    }
}

template <class Tiles, class Out>
static void tile_dot(const DotTile& t) {
    static thread_local Buffer<uint32_t> panel;
    const int64_t group = num_steps(t) * kTileWords;
    uint32_t* const x = panel.of(2 * group);
    Tiles::begin();
    for (int64_t row = 0; row < t.rows; row += kPanelRows) {
        pack_panel(t, row, x);
        for (int64_t n = 0; n < t.num_w; n += kBlockColumns)
            tile_block<Tiles, Out>(t, row, n, [&](auto groups) {
                add_products<Tiles, decltype(groups)::value>(t, n, x, group);
            });
    }
    Tiles::end();
}

// Up to 32 rows of weights from n on, inputs [k, k + width), unpacked.
template <class Tiles, Codes kCodes>
static inline DotTile unpack_block(const PackedTile& t, int64_t n, int64_t k, int64_t width) {
    static thread_local Buffer<bf16> unpacked;
    PackedTile part = t;
    part.num_w = t.num_w - n < kBlockColumns ? t.num_w - n : kBlockColumns;
    part.width = t.width - k < width ? t.width - k : width;
    part.w = static_cast<const char*>(t.w) + n * t.row_bytes + (kCodes == kNibbles ? k / 2 : k);
    part.scale = t.scale + n * t.groups + (t.groups == 1 ? 0 : k / t.group);
    bf16* const to = unpacked.of(part.num_w * part.width);
    Tiles::base().unpack[kCodes][kBf16](part, to);
    part.w = to;
    return part;
}

// Inputs of a chunk: whole groups and whole 64 codes of 4 bits, or a part of one group.
static inline int64_t unpacked_inputs(const PackedTile& t) {
    if (t.groups == 1 || t.group % kUnpackedInputs == 0) return kUnpackedInputs;
    int64_t unit = t.group;
    while (unit % 64) unit += t.group;
    return (kUnpackedInputs + unit - 1) / unit * unit;
}

// One panel: each weight is unpacked once, where its products are added.
template <class Tiles, Codes kCodes>
static inline void packed_panel(const PackedTile& t, int64_t row, const uint32_t* x) {
    const int64_t inputs = unpacked_inputs(t);
    for (int64_t n = 0; n < t.num_w; n += kBlockColumns)
        tile_block<Tiles, bf16>(t, row, n, [&](auto groups) {
            for (int64_t k = 0; k < t.width; k += inputs)
                add_products<Tiles, decltype(groups)::value>(unpack_block<Tiles, kCodes>(t, n, k, inputs), 0,
                                                             x + k / kTileDepth * kTileWords,
                                                             num_steps(t) * kTileWords);
        });
}

// Rows of x per unpacked block, whole panels.
static inline int64_t shared_rows(const DotTile& t) {
    const int64_t rows = kSharedBytes / (num_steps(t) * kTileDepth * int64_t(sizeof(bf16)) + 1) / kPanelRows * kPanelRows;
    return rows < kPanelRows ? kPanelRows : rows > kMostSharedRows ? kMostSharedRows : rows;
}

template <class Tiles, Codes kCodes>
static void packed_tile_dot(const PackedTile& t) {
    static thread_local Buffer<uint32_t> panels;
    const int64_t group = num_steps(t) * kTileWords, panel = 2 * group, shared = shared_rows(t);
    uint32_t* const x = panels.of(shared / kPanelRows * panel);
    Tiles::begin();
    for (int64_t first = 0; first < t.rows; first += shared) {
        const int64_t end = t.rows - first < shared ? t.rows : first + shared;
        for (int64_t row = first; row < end; row += kPanelRows)
            pack_panel(t, row, x + (row - first) / kPanelRows * panel);
        if (end - first <= kPanelRows) {
            packed_panel<Tiles, kCodes>(t, first, x);
            continue;
        }
        for (int64_t n = 0; n < t.num_w; n += kBlockColumns) {
            const DotTile w = unpack_block<Tiles, kCodes>(t, n, 0, t.width);
            for (int64_t row = first; row < end; row += kPanelRows)
                tile_block<Tiles, bf16>(t, row, n, [&](auto groups) {
                    add_products<Tiles, decltype(groups)::value>(w, 0, x + (row - first) / kPanelRows * panel, group);
                });
        }
    }
    Tiles::end();
}

// `Tiles::base()` with the dots of bf16 replaced.
template <class Tiles>
static IsaTable with_tile_dots(const char* name) {
    IsaTable table = Tiles::base();
    table.name = name;
    table.dot_bf16 = tile_dot<Tiles, bf16>;
    table.dot_bf16_to_f32 = tile_dot<Tiles, float>;
    table.dot_columns[kBf16] = kBlockColumns;
    const auto packed = [&](Codes codes, void (*dot)(const PackedTile&)) {
        table.dot_packed[codes][kBf16] = {dot, INT64_MAX, kTiledColumns};
    };
    packed(kInt8, packed_tile_dot<Tiles, kInt8>);
    packed(kInt8Zero, packed_tile_dot<Tiles, kInt8Zero>);
    packed(kFp8, packed_tile_dot<Tiles, kFp8>);
    packed(kNibbles, packed_tile_dot<Tiles, kNibbles>);
    return table;
}
