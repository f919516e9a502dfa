// SPDX-License-Identifier: Apache-2.0
// "dot" tiles of bf16 over a tile unit: 8 registers of 16 rows x 64 bytes, and c[m][n] += a[m] . b[n] over 32 bf16.
// Included after tiles.inl. `Tiles` is the processor's unit (isa_amx.cpp) or a plain emulation of it
// (isa_amx_emulated.cpp).
//
// Weights are the unit's left operand, read in place. x is the right operand, with two elements of k per 32-bit
// word and one row of words per pair: panels of up to 32 rows are packed and padded with zeros. An element's sum runs over k in steps of 32, in the unit's own order within a step: by width alone.
//
// Quantised weights are unpacked 32 rows at a time, in chunks of a few hundred inputs, between the products of
// the chunk before: memory loads meanwhile.

constexpr int64_t kTileRows = 16, kTileDepth = 32, kTileWords = 256;

// Rows of a panel, and weights of a block.
constexpr int64_t kPanelRows = 2 * kTileRows, kBlockColumns = 2 * kTileRows;

// Quantised weights. Bytes of the panels that share an unpacked chunk, and their most. Weights per call.
// Inputs per chunk; its rows are unpacked a few at a time.
constexpr int64_t kSharedBytes = 1 << 20, kMostPanels = 4, kTiledColumns = 512, kUnpackedInputs = 256,
                  kPieceRows = 8, kNumPieces = kBlockColumns / kPieceRows;

static inline int64_t num_steps(const DotTile& t) { return (t.width + kTileDepth - 1) / kTileDepth; }

// Rows of x side by side in a panel: 16, or fewer for a panel that the first-level cache holds. An emulated unit reads
// words of the next pairs too, and nothing reads their sums.
static inline int64_t rows_apart(const DotTile& t) {
    int64_t rows = 1;
    while (rows < t.rows && rows < kTileRows) rows *= 2;
    return rows;
}

// Group g holds rows [16 g, 16 g + 16) of the panel: word [g][step][pair of k][row].
template <class Tiles>
static inline void pack_panel(const DotTile& t, int64_t row, uint32_t* words) {
    const int64_t rows = t.rows - row < kPanelRows ? t.rows - row : kPanelRows, apart = rows_apart(t);
    for (int64_t i = 0; i < rows; i += kTileRows, words += num_steps(t) * kTileWords) {
        const int64_t count = rows - i < kTileRows ? rows - i : kTileRows;
        if (apart == 1 && t.width > 0) {
            memset(words + (num_steps(t) - 1) * kTileRows, 0, 2 * kTileRows * sizeof(uint32_t));
            memcpy(words, t.x[row], t.width * sizeof(bf16));
        } else {
            for (int64_t k = 0; k < t.width; k += kTileDepth)
                Tiles::pack(t.x + row + i, count, k, t.width - k < kTileDepth ? t.width - k : kTileDepth,
                            words + k / 2 * apart, apart);
        }
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
// apart. between(): work beside each step.
template <class Tiles, int Groups, class Between>
static inline void add_products(const DotTile& t, int64_t n, const uint32_t* x, int64_t group, const Between& between) {
    const int64_t apart = rows_apart(t);
    for (int64_t k = 0; k < t.width; k += kTileDepth, x += kTileRows * apart) {
        load_weights<Tiles, 4>(t, n, k);
        load_weights<Tiles, 5>(t, n + kTileRows, k);
        Tiles::template load<6>(x, apart * int64_t(sizeof(uint32_t)));
        Tiles::template dot<0, 4, 6>();
        Tiles::template dot<1, 5, 6>();
        if constexpr (Groups == 2) {
            Tiles::template load<7>(x + group, apart * int64_t(sizeof(uint32_t)));
            Tiles::template dot<2, 4, 7>();
            Tiles::template dot<3, 5, 7>();
        }
        between();
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

// body(Constant<number of groups of 16 rows>) for a panel of the next rows.
template <class Body>
static inline void for_groups(int64_t rows, const Body& body) {
    rows > kTileRows ? body(Constant<2>()) : body(Constant<1>());
}

template <class Tiles, class Out>
static void tile_dot(const DotTile& t) {
    static thread_local Buffer<uint32_t> panel;
    const int64_t group = num_steps(t) * kTileWords;
    uint32_t* const x = panel.of(2 * group + kTileRows);
    Tiles::begin(rows_apart(t));
    for (int64_t row = 0; row < t.rows; row += kPanelRows) {
        pack_panel<Tiles>(t, row, x);
        for (int64_t n = 0; n < t.num_w; n += kBlockColumns)
            for_groups(t.rows - row, [&](auto groups) {
                constexpr int kGroups = decltype(groups)::value;
                zero_sums<Tiles>();
                add_products<Tiles, kGroups>(t, n, x, group, [] {});
                store_block<Tiles, Out, kGroups>(t, row, n);
            });
    }
    Tiles::end();
}

// Inputs of a chunk: whole groups and whole 64 codes of 4 bits, or a part of one group.
static inline int64_t unpacked_inputs(const PackedTile& t) {
    if (t.groups == 1 || t.group % kUnpackedInputs == 0) return kUnpackedInputs;
    int64_t unit = t.group;
    while (unit % 64) unit += t.group;
    return (kUnpackedInputs + unit - 1) / unit * unit;
}

// Unpacked chunks: number `block * per_block + part` has 32 weights and up to `inputs` inputs. The products of a
// chunk's panels are added while the next chunk is unpacked.
template <class Tiles, Codes kCodes>
class Chunks {
   public:
    const int64_t per_block, inputs;

    Chunks(const PackedTile& t, int64_t num_panels)
        : per_block((t.width + unpacked_inputs(t) - 1) / unpacked_inputs(t)),
          inputs(unpacked_inputs(t)),
          t_(t),
          num_panels_(num_panels),
          fetch_(static_cast<const char*>(t.w) + kBlockColumns * t.row_bytes) {
        static thread_local Buffer<bf16> unpacked;
        unpacked_ = unpacked.of(2 * kBlockColumns * inputs);
        open(0);
        while (left_ > 0) unpack();
    }
    // The chunk, unpacked. From here on `add` unpacks the following one.
    DotTile begin(int64_t number) {
        open(number + 1);
        credit_ = 0;
        DotTile found = part(number);
        found.w = place(number);
        return found;
    }
    // Adds the products of a chunk with a panel.
    template <int Groups>
    void add(const DotTile& chunk, const uint32_t* x, int64_t group) {
        const int64_t turns = num_panels_ * num_steps(chunk);
        add_products<Tiles, Groups>(chunk, 0, x, group, [&] {
            for (credit_ += kNumPieces; credit_ >= turns; credit_ -= turns) unpack();
        });
    }

   private:
    bf16* place(int64_t number) const { return unpacked_ + number % 2 * kBlockColumns * inputs; }
    PackedTile part(int64_t number) const {
        const int64_t n = number / per_block * kBlockColumns, k = number % per_block * inputs;
        PackedTile found = t_;
        found.num_w = t_.num_w - n < kBlockColumns ? t_.num_w - n : kBlockColumns;
        found.width = t_.width - k < inputs ? t_.width - k : inputs;
        found.w = static_cast<const char*>(t_.w) + n * t_.row_bytes + (kCodes == kNibbles ? k / 2 : k);
        found.scale = t_.scale + n * t_.groups + (t_.groups == 1 ? 0 : k / t_.group);
        return found;
    }
    // Has `unpack` begin a chunk.
    void open(int64_t number) {
        next_ = part(number);
        left_ = next_.num_w, to_ = place(number);
    }
    void unpack() {
        if (left_ <= 0) return;
        next_.num_w = left_ < kPieceRows ? left_ : kPieceRows;
        next_.next = fetch_;
        fetch_ += next_.num_w * next_.width / (kCodes == kNibbles ? 2 : 1);
        Tiles::template unpack<kCodes>(next_, to_);
        to_ += kPieceRows * next_.width;
        next_.w = static_cast<const char*>(next_.w) + kPieceRows * t_.row_bytes;
        next_.scale += kPieceRows * t_.groups, left_ -= kPieceRows;
    }

    const PackedTile& t_;
    const int64_t num_panels_;
    const char* fetch_;
    bf16 *unpacked_, *to_;
    PackedTile next_;
    int64_t left_, credit_;
};

// Sums of a panel between two of its chunks.
template <class Tiles>
static inline void save_sums(float* to) {
    Tiles::template store<0>(to, 64);
    Tiles::template store<1>(to + kTileWords, 64);
    Tiles::template store<2>(to + 2 * kTileWords, 64);
    Tiles::template store<3>(to + 3 * kTileWords, 64);
}
template <class Tiles>
static inline void load_sums(const float* from) {
    Tiles::template load<0>(from, 64);
    Tiles::template load<1>(from + kTileWords, 64);
    Tiles::template load<2>(from + 2 * kTileWords, 64);
    Tiles::template load<3>(from + 3 * kTileWords, 64);
}

// Rows of x per unpacked chunk, whole panels.
static inline int64_t shared_rows(const DotTile& t) {
    const int64_t panel_bytes = kPanelRows * num_steps(t) * kTileDepth * int64_t(sizeof(bf16));
    const int64_t panels = kSharedBytes / (panel_bytes ? panel_bytes : 1);
    return (panels < 1 ? 1 : panels < kMostPanels ? panels : kMostPanels) * kPanelRows;
}

template <class Tiles, Codes kCodes>
static void packed_tile_dot(const PackedTile& t) {
    static thread_local Buffer<uint32_t> panels;
    const int64_t group = num_steps(t) * kTileWords, panel = 2 * group, shared = shared_rows(t);
    uint32_t* const x = panels.of(shared / kPanelRows * panel + kTileRows);
    alignas(64) float sums[kMostPanels][4 * kTileWords];
    Tiles::begin(rows_apart(t));
    for (int64_t first = 0; first < t.rows; first += shared) {
        const int64_t rows = t.rows - first < shared ? t.rows - first : shared;
        const int64_t num_panels = (rows + kPanelRows - 1) / kPanelRows;
        for (int64_t p = 0; p < num_panels; p++) pack_panel<Tiles>(t, first + p * kPanelRows, x + p * panel);
        Chunks<Tiles, kCodes> chunks(t, num_panels);
        for (int64_t n = 0, number = 0; n < t.num_w; n += kBlockColumns)
            for (int64_t part = 0; part < chunks.per_block; part++) {
                const DotTile chunk = chunks.begin(number++);
                const bool last = part + 1 == chunks.per_block;
                for (int64_t p = 0; p < num_panels; p++)
                    for_groups(t.rows - first - p * kPanelRows, [&](auto groups) {
                        constexpr int kGroups = decltype(groups)::value;
                        if (part == 0)
                            zero_sums<Tiles>();
                        else if (num_panels > 1)
                            load_sums<Tiles>(sums[p]);
                        const uint32_t* const from = x + p * panel + part * chunks.inputs / 2 * rows_apart(t);
                        chunks.template add<kGroups>(chunk, from, group);
                        if (last)
                            store_block<Tiles, bf16, kGroups>(t, first + p * kPanelRows, n);
                        else if (num_panels > 1)
                            save_sums<Tiles>(sums[p]);
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
        table.dot_packed[codes][kBf16] = {dot, 1, INT64_MAX, kTiledColumns};
    };
    packed(kInt8, packed_tile_dot<Tiles, kInt8>);
    packed(kInt8Zero, packed_tile_dot<Tiles, kInt8Zero>);
    packed(kFp8, packed_tile_dot<Tiles, kFp8>);
    packed(kNibbles, packed_tile_dot<Tiles, kNibbles>);
    for (PackedDot& many : table.dot_many) many = {};
    return table;
}
