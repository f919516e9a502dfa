// "dot" tiles of bf16 over a tile unit: 8 registers of 16 rows x 64 bytes, and c[m][n] += a[m] . b[n] over 32 bf16.
// Included after tiles.inl. `Tiles` is the processor's unit (isa_amx.cpp) or a plain emulation of it
// (isa_amx_emulated.cpp).
//
// Weights are the unit's left operand, read where they lie. x is its right operand, whose layout pairs two
// elements of k per 32-bit word, one row of words per pair: panels of 32 rows are packed that way and padded with
// zeros. An element's sum runs over k in steps of 32, in the unit's own order within a step: by width alone.

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileWords = 256;

// Per thread: x of one panel, packed.
struct Panel {
    uint32_t* words = nullptr;
    int64_t capacity = 0;

    ~Panel() { free(words); }
    uint32_t* of(int64_t count) {
        if (count > capacity) {
            free(words);
            words = static_cast<uint32_t*>(malloc(count * sizeof(uint32_t)));
            capacity = words ? count : 0;
            if (!words) abort();
        }
        return words;
    }
};

// Group g holds rows [16 g, 16 g + 16) of the panel: word [g][step][pair of k][row].
static inline uint32_t* pack_panel(const DotTile& t, int64_t row, int64_t rows, int64_t steps, int64_t groups) {
    static thread_local Panel panel;
    uint32_t* const words = panel.of(groups * steps * kTileWords);
    memset(words, 0, groups * steps * kTileWords * sizeof(uint32_t));
    for (int64_t i = 0; i < rows; i++) {
        const bf16* x = static_cast<const bf16*>(t.x[row + i]);
        uint32_t* to = words + i / kTileRows * steps * kTileWords + i % kTileRows;
        int64_t k = 0;
        for (; k + 2 <= t.width; k += 2) memcpy(to + k / 2 * kTileRows, x + k, sizeof(uint32_t));
        if (k < t.width) memcpy(to + k / 2 * kTileRows, x + k, sizeof(bf16));
    }
    return words;
}

// 16 weights from n on, 32 elements from k on; what is missing is zero.
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

// 32 weights against a panel of `Groups` times 16 rows.
template <class Tiles, class Out, int Groups>
static inline void tile_block(const DotTile& t, const uint32_t* x, int64_t steps, int64_t row, int64_t n) {
    Tiles::template zero<0>();
    Tiles::template zero<1>();
    Tiles::template zero<2>();
    Tiles::template zero<3>();
    for (int64_t s = 0; s < steps; s++) {
        load_weights<Tiles, 4>(t, n, s * kTileDepth);
        load_weights<Tiles, 5>(t, n + kTileRows, s * kTileDepth);
        Tiles::template load<6>(x + s * kTileWords, kTileRows * int64_t(sizeof(uint32_t)));
        Tiles::template dot<0, 4, 6>();
        Tiles::template dot<1, 5, 6>();
        if constexpr (Groups == 2) {
            Tiles::template load<7>(x + (steps + s) * kTileWords, kTileRows * int64_t(sizeof(uint32_t)));
            Tiles::template dot<2, 4, 7>();
            Tiles::template dot<3, 5, 7>();
        }
    }
    store_out<Tiles, Out, 0>(t, row, n);
    store_out<Tiles, Out, 1>(t, row, n + kTileRows);
    if constexpr (Groups == 2) {
        store_out<Tiles, Out, 2>(t, row + kTileRows, n);
        store_out<Tiles, Out, 3>(t, row + kTileRows, n + kTileRows);
    }
}

template <class Tiles, class Out>
static void tile_dot(const DotTile& t) {
    const int64_t steps = (t.width + kTileDepth - 1) / kTileDepth;
    Tiles::begin();
    for (int64_t row = 0; row < t.rows; row += 2 * kTileRows) {
        const int64_t rows = t.rows - row < 2 * kTileRows ? t.rows - row : 2 * kTileRows;
        const bool two = rows > kTileRows;
        const uint32_t* x = pack_panel(t, row, rows, steps, two ? 2 : 1);
        for (int64_t n = 0; n < t.num_w; n += 2 * kTileRows)
            if (two)
                tile_block<Tiles, Out, 2>(t, x, steps, row, n);
            else
                tile_block<Tiles, Out, 1>(t, x, steps, row, n);
    }
    Tiles::end();
}

// `base` with the dots of bf16 replaced.
template <class Tiles>
static IsaTable with_tile_dots(const char* name, IsaTable base) {
    base.name = name;
    base.dot_bf16 = tile_dot<Tiles, bf16>;
    base.dot_bf16_to_f32 = tile_dot<Tiles, float>;
    for (auto& of_codes : base.dot_packed) of_codes[kBf16] = nullptr;
    return base;
}
