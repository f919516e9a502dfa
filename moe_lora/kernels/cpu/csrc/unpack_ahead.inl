// SPDX-License-Identifier: Apache-2.0
// Dots of bf16 over quantised weights beside many rows of x: a block of weights is unpacked once, in the steps of the
// dots over the block before. Dots leave a part of the vector ports idle. Included after unpack.inl.

// Bytes of an unpacked block, a share of the second-level cache. Weights per call.
constexpr int64_t kAheadBytes = 64 << 10, kPairsBytes = 16 << 10, kManyColumns = 512;

// Weights beside kMaxRows rows of x, whose sums leave a few registers free.
constexpr int kPairsColumns = 3;

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

// From a row of an unpacked block to the next: rows of 4 KiB would push each other out of the sets of the first-level
// cache.
static inline int64_t padded(int64_t width) { return width + 32; }

// Unpacks R rows of W beside the steps of one block of dots, in spans of two steps.
template <class W, int R>
struct UnpackAhead {
    const PackedTile& tile;
    typename W::T* const to;
    int64_t n = 0;

    struct Walk {
        typename W::template Rows<R> w;
        typename W::T* const out;
        const int64_t apart, distance;
        template <class Number>
        MOE_LORA_INLINE void step(int64_t k, Number) {
            w.open(k);
            MOE_LORA_UNROLL
            for (int j = 0; j < R; j++) {
                if (Number::value == 0) __builtin_prefetch(w.w + j * w.row_bytes + k * W::kBits / 8 + distance, 0, 2);
                w.template put<Number::value>(j, k, out + j * apart + k);
            }
        }
    };
    bool is_due() const { return n + R <= tile.num_w; }
    template <class Rows>
    MOE_LORA_INLINE Walk start() const {
        return {{tile, n}, to + n * padded(tile.width), padded(tile.width), tile.num_w * tile.row_bytes};
    }
    MOE_LORA_INLINE void stop(const Walk&) { n += R; }
};

// The rows from n on, beside no dots.
template <class W>
static void unpack_rest(const PackedTile& t, int64_t n, typename W::T* to) {
    UnpackAhead<W, 1> ahead{t, to, n};
    while (ahead.is_due()) {
        auto walk = ahead.template start<void>();
        for_each_step<W>(t.width, [&](int64_t k, auto number) __attribute__((always_inline)) { walk.step(k, number); });
        ahead.stop(walk);
    }
}

// An unpacked block, whose steps come in the spans of its source.
template <class W>
struct UnpackedWeights : PlainWeights<typename W::I, typename W::T> {
    using Plain = PlainWeights<typename W::I, typename W::T>;
    static constexpr int kSpan = 2 * W::D::kStep;

    template <int N>
    struct Rows : Plain::template Rows<N> {
        static MOE_LORA_INLINE DotTile apart(DotTile t) {
            t.width = padded(t.width);
            return t;
        }
        MOE_LORA_INLINE Rows(const DotTile& t, int64_t n) : Plain::template Rows<N>(apart(t), n) {}
    };
};

// All rows of x against a block, while `next` is unpacked to `to`, R rows per block of four weights.
template <class W, int R>
static void dot_and_unpack(const DotTile& t, const PackedTile& next, typename W::T* to) {
    using I = typename W::I;
    using T = typename W::T;
    using Block = UnpackedWeights<W>;
    const int64_t groups = num_row_groups(t.rows, I::kMaxRows);
    constexpr int kLeast = I::kMaxRows * 2 / 3;
    UnpackAhead<W, R> ahead{next, to};
    Prefetch none{};
    for (int64_t g = 0; g < groups; g++) {
        const int64_t row = t.rows * g / groups;
        const int rows = int(t.rows * (g + 1) / groups - row);
        int64_t n = 0;
        for (; n + 4 <= t.num_w; n += 4)
            if (ahead.is_due())
                dot_rows<Block, T, 4, I::kMaxRows, kLeast>(t, row, rows, n, ahead);
            else
                dot_rows<Block, T, 4, I::kMaxRows, kLeast>(t, row, rows, n, none);
        for (; n < t.num_w; n++) dot_rows<Block, T, 1, I::kMaxRows, kLeast>(t, row, rows, n, none);
    }
    unpack_rest<W>(next, ahead.n, to);
}

template <class W>
static void many_tile(const PackedTile& t) {
    using I = typename W::I;
    using T = typename W::T;
    static thread_local Buffer<T> buffer;
    const int64_t groups = num_row_groups(t.rows, I::kMaxRows), wanted = kAheadBytes / (t.width * int64_t(sizeof(T)));
    const int64_t block = wanted < 8 ? 4 : wanted / 4 * 4;
    T *now = buffer.of(2 * block * padded(t.width)), *then = now + block * padded(t.width);
    unpack_rest<W>(rows_of(t, 0, block), 0, now);
    for (int64_t n = 0; n < t.num_w; n += block) {
        DotTile tile = rows_of(t, n, block);
        tile.w = now;
        const PackedTile next = rows_of(t, n + block, block);
        groups >= 4 ? dot_and_unpack<W, 1>(tile, next, then) : dot_and_unpack<W, 2>(tile, next, then);
        T* const last = now;
        now = then, then = last;
    }
}

// M rows of x against N weights of `width` in pairs of vectors: all even elements meet their sums first.
template <class I, int M, int N>
static __attribute__((noinline)) void pairs_block(const DotTile& t, int64_t row, int64_t n) {
    using D = typename I::template Dot<bf16>;
    const float* w[N];
    const bf16* x[M];
    typename I::V acc[M][N];
    MOE_LORA_UNROLL
    for (int j = 0; j < N; j++) w[j] = static_cast<const float*>(t.w) + (n + j) * t.width;
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++) {
        x[i] = static_cast<const bf16*>(t.x[row + i]);
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) acc[i][j] = I::zero();
    }
    for (int64_t k = 0; k < t.width; k += D::kStep) {
        typename I::V xv[M];
        const auto add = [&](int64_t place) __attribute__((always_inline)) {
            MOE_LORA_UNROLL
            for (int j = 0; j < N; j++) {
                const typename I::V wv = I::load_in_order(w[j] + place);
                MOE_LORA_UNROLL
                for (int i = 0; i < M; i++) I::add_product_in_order(acc[i][j], xv[i], wv);
            }
        };
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) xv[i] = I::even_in_order(x[i] + k);
        add(k);
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) xv[i] = I::odd_in_order(x[i] + k);
        add(k + I::kLanes);
    }
    store_dots<I, bf16, M, N>(t, row, n, acc);
}

template <class I, int N, int M>
static inline void pairs_rows(const DotTile& t, int64_t row, int rows, int64_t n) {
    if constexpr (M > 1)
        if (rows < M) return pairs_rows<I, N, M - 1>(t, row, rows, n);
    pairs_block<I, M, N>(t, row, n);
}

template <class W>
static inline void unpack_pairs(typename W::template Rows<1> w, int64_t width, int64_t ahead, float* out) {
    using I = typename W::I;
    constexpr int kStep = W::D::kStep;
    const uint8_t* const next = w.w + ahead;
    for (int64_t k = 0; k < width; k += kManyStep) {
        __builtin_prefetch(next + k * W::kBits / 8, 0, 3);
        MOE_LORA_UNROLL
        for (int64_t i = 0; i < kManyStep; i += kStep) {
            if (i % 32 == 0) w.open(k + i);
            const typename I::Pairs v = w.template load<0>(0, k + i);
            I::store(out + k + i, v.even);
            I::store(out + k + i + I::kLanes, v.odd);
        }
    }
}

// Weights become fp32 in the cache: without products of bf16, each of their dots converts them anew.
template <class W>
static void pairs_tile(const PackedTile& t) {
    using I = typename W::I;
    static thread_local Buffer<float> buffer;
    const int64_t groups = num_row_groups(t.rows, I::kMaxRows);
    const int64_t wanted = kPairsBytes / (t.width * int64_t(sizeof(float)));
    const int64_t block = wanted < 2 * kPairsColumns ? kPairsColumns : wanted / kPairsColumns * kPairsColumns;
    float* const unpacked = buffer.of(block * t.width);
    for (int64_t n0 = 0; n0 < t.num_w; n0 += block) {
        const PackedTile part = rows_of(t, n0, block);
        for (int64_t n = 0; n < part.num_w; n++) {
            const typename W::template Rows<1> from(part, n);
            unpack_pairs<W>(from, t.width, block * t.row_bytes, unpacked + n * t.width);
        }
        DotTile tile = part;
        tile.w = unpacked;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = t.rows * g / groups;
            const int rows = int(t.rows * (g + 1) / groups - row);
            int64_t n = 0;
            for (; n + kPairsColumns <= part.num_w; n += kPairsColumns)
                pairs_rows<I, kPairsColumns, I::kMaxRows>(tile, row, rows, n);
            for (; n < part.num_w; n++) pairs_rows<I, 1, I::kMaxRows>(tile, row, rows, n);
        }
    }
}

template <class W>
constexpr PackedDot many() {
    if constexpr (W::kPairs)
        return {pairs_tile<W>, kPackedFew + 1, INT64_MAX, kManyColumns};
    else if constexpr (W::I::kTallRows > W::I::kMaxRows)
        return {many_tile<W>, kPackedPairs + 1, INT64_MAX, kManyColumns};
    else
        return {};
}
