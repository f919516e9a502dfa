// SPDX-License-Identifier: Apache-2.0
// The vector code, written once over a set of vector operations `I` (vec_*.h) and compiled once per
// instruction set. Included inside an anonymous namespace, after the target is set.

// Loops over registers must be unrolled before arrays of accumulators are analysed, or the arrays live in memory.
#define MOE_LORA_UNROLL _Pragma("GCC unroll 16")
#define MOE_LORA_INLINE inline __attribute__((always_inline))

typedef float Quad __attribute__((vector_size(16)));
typedef uint32_t QuadBits __attribute__((vector_size(16)));
typedef uint16_t QuadHalf __attribute__((vector_size(8)));

static inline float widen(float value) { return value; }
static inline float widen(bf16 value) {
    uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

static inline Quad load_quad(const float* p) {
    Quad value;
    memcpy(&value, p, 16);
    return value;
}
static inline Quad load_quad(const bf16* p) { return Quad{widen(p[0]), widen(p[1]), widen(p[2]), widen(p[3])}; }

static inline void store_quad(float* p, Quad value) { memcpy(p, &value, 16); }
static inline void store_quad(bf16* p, Quad value) {
    QuadBits bits = (QuadBits)value;
    QuadBits rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
    QuadBits is_nan = (QuadBits)(value != value);
    QuadHalf half = __builtin_convertvector((rounded & ~is_nan) | (is_nan & 0x7fc0u), QuadHalf);
    memcpy(p, &half, 8);
}

constexpr Fp8Values kFp8Values;

// Values of 16 codes, for processors without permutations of that size.
template <class T>
struct CodeTable {
    T of[16];
    inline void look_up(const uint8_t* bytes, int shift, T* out, int count) const {
        for (int i = 0; i < count; i++) out[i] = of[bytes[i] >> shift & 15];
    }
};

// 48 KiB of data cache, slightly overdrawn (x is read more often than weights); a share of the second level.
constexpr int64_t kFirstCacheBytes = 52 << 10, kBlockBytes = 128 << 10;

// Work beside the steps of a dot, over the weights after the current ones: fetches a few lines per step.
struct Prefetch {
    const char* at;
    const char* end;
    int lines;

    template <class Rows>
    struct Walk {
        const char* at;
        const int lines;
        template <class Number>
        MOE_LORA_INLINE void step(int64_t, Number) {
            at = Rows::fetch(at, lines);
        }
    };
    template <class Rows>
    MOE_LORA_INLINE Walk<Rows> start() const {
        return {at, at < end ? lines : 0};
    }
    template <class Rows>
    MOE_LORA_INLINE void stop(const Walk<Rows>& walk) {
        at = walk.at;
    }
};

template <int Bytes>
static inline const char* fetch_ahead(const char* ahead, int lines) {
    if (lines == 0) return ahead;
    __builtin_prefetch(ahead, 0, 3);
    if (lines > 1) __builtin_prefetch(ahead + Bytes, 0, 3);
    if (lines > 2) {
        __builtin_prefetch(ahead + 2 * Bytes, 0, 3);
        __builtin_prefetch(ahead + 3 * Bytes, 0, 3);
    }
    return ahead + lines * Bytes;
}

// Adds the bias and rounds; `count` of the four sums are wanted.
template <class Out, int Count>
static inline void store_sums(Quad sums, Out* out, const Out* bias) {
    Out four[4] = {};
    if (bias) {
        memcpy(four, bias, Count * sizeof(Out));
        sums += load_quad(four);
    }
    store_quad(four, sums);
    memcpy(out, four, Count * sizeof(Out));
}

// Weights of T in memory; further sources are in unpack.inl. kSpan: elements of k per
// turn of the loop, one or two steps.
template <class I_, class T_>
struct PlainWeights {
    using I = I_;
    using T = T_;
    using D = typename I::template Dot<T>;
    using Weights = typename D::Raw;
    static MOE_LORA_INLINE Weights input(typename D::Raw x) { return x; }
    using Tile = DotTile;
    static constexpr int kSpan = D::kStep;

    // N rows from n on.
    template <int N>
    struct Rows {
        const T* w;
        int64_t width;
        static MOE_LORA_INLINE const char* fetch(const char* ahead, int lines) {
            return fetch_ahead<sizeof(typename D::Raw)>(ahead, lines);
        }
        MOE_LORA_INLINE Rows(const Tile& t, int64_t n) : w(static_cast<const T*>(t.w) + n * t.width), width(t.width) {}
        MOE_LORA_INLINE void open(int64_t) {}
        template <int Step>
        MOE_LORA_INLINE typename D::Raw load(int j, int64_t k) const {
            return D::load(w + j * width + k);
        }
        MOE_LORA_INLINE typename D::Raw load_part(int j, int64_t k, int count) const {
            return D::load_part(w + j * width + k, count);
        }
    };
};

template <int Value>
struct Constant {
    static constexpr int value = Value;
};

// step(k, Constant<number of the step in its span>) for each whole step of the width; returns the start of the rest.
template <class W, class Step>
static MOE_LORA_INLINE int64_t for_each_step(int64_t width, const Step& step) {
    constexpr int kStep = W::D::kStep;
    static_assert(W::kSpan == kStep || W::kSpan == 2 * kStep, "one step or two");
    const int64_t whole = width / kStep * kStep;
    for (int64_t k = 0; k < whole; k += W::kSpan) {
        step(k, Constant<0>());
        if constexpr (W::kSpan > kStep)
            if (k + kStep < whole) step(k + kStep, Constant<1>());
    }
    return whole;
}

// Sums of M rows of x and N weights, reduced by fours, of two rows of x together if N is 2.
template <class I, class Out, int M, int N>
static MOE_LORA_INLINE void store_dots(const DotTile& t, int64_t row, int64_t n, const typename I::V (&acc)[M][N]) {
    const Out* bias = t.bias ? static_cast<const Out*>(t.bias) + n : nullptr;
    const auto out = [&](int i) { return static_cast<Out*>(t.out[row + i]) + t.column + n; };
    if constexpr (N == 2) {
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i += 2) {
            constexpr int kLast = M - 1;
            const int second = i < kLast ? i + 1 : i;
            const Quad sums = I::sum4(acc[i][0], acc[i][1], acc[second][0], acc[second][1]);
            store_sums<Out, 2>(sums, out(i), bias);
            if (second > i) store_sums<Out, 2>(Quad{sums[2], sums[3], 0, 0}, out(second), bias);
        }
    } else {
        static_assert(N <= 4, "a row of up to four sums");
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++)
            store_sums<Out, N>(I::sum4(acc[i][0], acc[i][N > 1], acc[i][N > 2 ? 2 : 0], acc[i][N > 3 ? 3 : 0]), out(i),
                               bias);
    }
}

// M rows of x against N rows of w.
template <class W, class Out, int M, int N, class Ahead>
static inline void dot_block(const typename W::Tile& t, int64_t row, int64_t n, Ahead& ahead) {
    using I = typename W::I;
    using T = typename W::T;
    using D = typename W::D;
    typename W::template Rows<N> w(t, n);
    const T* x[M];
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++) x[i] = static_cast<const T*>(t.x[row + i]);
    typename I::V acc[M][N];
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++)
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) acc[i][j] = I::zero();
    auto walk = ahead.template start<typename W::template Rows<N>>();
    const auto step = [&](int64_t k, auto number) __attribute__((always_inline)) {
        w.open(k);
        typename W::Weights wv[N];
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) wv[j] = w.template load<decltype(number)::value>(j, k);
        walk.step(k, number);
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) {
            const typename W::Weights xv = W::input(D::load(x[i] + k));
            MOE_LORA_UNROLL
            for (int j = 0; j < N; j++) acc[i][j] = D::dot(xv, wv[j], acc[i][j]);
        }
    };
    const int64_t k = for_each_step<W>(t.width, step);
    if (k < t.width) {
        w.open(k);
        const int count = int(t.width - k);
        typename W::Weights wv[N];
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) wv[j] = w.load_part(j, k, count);
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) {
            const typename W::Weights xv = W::input(D::load_part(x[i] + k, count));
            MOE_LORA_UNROLL
            for (int j = 0; j < N; j++) acc[i][j] = D::dot(xv, wv[j], acc[i][j]);
        }
    }
    ahead.stop(walk);
    store_dots<I, Out, M, N>(t, row, n, acc);
}

// Least to M rows of x.
template <class W, class Out, int N, int M, int Least = 1, class Ahead>
static inline void dot_rows(const typename W::Tile& t, int64_t row, int rows, int64_t n, Ahead& ahead) {
    if constexpr (M > Least)
        if (rows < M) return dot_rows<W, Out, N, M - 1, Least>(t, row, rows, n, ahead);
    dot_block<W, Out, M, N>(t, row, n, ahead);
}

// More rows than registers for four weights, but few enough for two: one pass over w, if
// x, read anew per pair of weights, stays in the first-level cache.
template <class W, class Out>
static void dot_pairs(const DotTile& t) {
    const int64_t row_bytes = t.width * int64_t(sizeof(typename W::T));
    const char* w = static_cast<const char*>(t.w);
    for (int64_t n = 0; n < t.num_w; n += 2) {
        const bool pair = n + 2 <= t.num_w;
        const char* ahead = n + 4 < t.num_w ? w + (n + 4) * row_bytes : static_cast<const char*>(t.next);
        Prefetch prefetch{ahead, ahead ? ahead + 2 * row_bytes : ahead, 2};
        if (pair)
            dot_rows<W, Out, 2, W::I::kTallRows>(t, 0, int(t.rows), n, prefetch);
        else
            for (int64_t row = 0; row < t.rows; row++) dot_block<W, Out, 1, 1>(t, row, n, prefetch);
    }
}

// Rows in balanced groups that fit the registers. If x, the current and the following weights fit the
// first-level cache, weights come from memory four rows at a time; else a block of them stays in the second-level
// cache while all groups pass over it. The following weights are fetched meanwhile.
template <class I, class T, class Out>
static void dot_tile(const DotTile& t) {
    using W = PlainWeights<I, T>;
    const int64_t row_bytes = t.width > 0 ? t.width * int64_t(sizeof(T)) : 1;
    if constexpr (I::kTallRows > I::kMaxRows)
        if (t.rows > I::kMaxRows && t.rows <= I::kTallRows && t.rows * row_bytes <= kFirstCacheBytes / 2)
            return dot_pairs<W, Out>(t);
    const int64_t groups = (t.rows + I::kMaxRows - 1) / I::kMaxRows;
    int64_t block = 4;
    if (groups > 1 && (t.rows + 8) * row_bytes > kFirstCacheBytes) block = kBlockBytes / row_bytes / 4 * 4;
    if (block < 4) block = 4;
    const char* w = static_cast<const char*>(t.w);
    for (int64_t n0 = 0; n0 < t.num_w; n0 += block) {
        const int64_t n1 = n0 + block < t.num_w ? n0 + block : t.num_w;
        const char* ahead = n1 < t.num_w ? w + n1 * row_bytes : static_cast<const char*>(t.next);
        Prefetch prefetch{ahead, ahead ? ahead + block * row_bytes : ahead, groups >= 4 ? 1 : groups >= 2 ? 2 : 4};
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = t.rows * g / groups;
            const int rows = int(t.rows * (g + 1) / groups - row);
            int64_t n = n0;
            for (; n + 4 <= n1; n += 4) dot_rows<W, Out, 4, I::kMaxRows>(t, row, rows, n, prefetch);
            for (; n < n1; n++) dot_rows<W, Out, 1, I::kMaxRows>(t, row, rows, n, prefetch);
        }
    }
}

#include "sums.inl"
#include "softmax.inl"
#include "delta.inl"
#include "unpack.inl"
#include "unpack_ahead.inl"
#include "dynamic.inl"

template <class I>
static IsaTable make_table(const char* name) {
    return IsaTable{name,
                    dot_tile<I, float, float>,
                    dot_tile<I, bf16, bf16>,
                    dot_tile<I, bf16, float>,
                    sum_tile<I, float, float>,
                    sum_tile<I, bf16, bf16>,
                    sum_tile<I, bf16, float>,
                    softmax_row<I>,
                    scale_row<I>,
                    store_row<I, float>,
                    store_row<I, bf16>,
                    {{unpack_rows<ByteWeights<I, float, kInt8>>, unpack_rows<ByteWeights<I, bf16, kInt8>>},
                     {unpack_rows<ByteWeights<I, float, kInt8Zero>>, unpack_rows<ByteWeights<I, bf16, kInt8Zero>>},
                     {unpack_rows<ByteWeights<I, float, kFp8>>, unpack_rows<ByteWeights<I, bf16, kFp8>>},
                     {unpack_rows<NibbleWeights<I, float>>, unpack_rows<NibbleWeights<I, bf16>>}},
                    {{packed<ByteWeights<I, float, kInt8>>(), packed<ByteWeights<I, bf16, kInt8>>()},
                     {PackedDot{}, PackedDot{}},
                     {packed<ByteWeights<I, float, kFp8>>(), packed<ByteWeights<I, bf16, kFp8>>()},
                     {packed<NibbleWeights<I, float>>(), packed<NibbleWeights<I, bf16>>()}},
                    {many<ByteWeights<I, bf16, kInt8>>(), many<ByteWeights<I, bf16, kInt8Zero>>(),
                     many<ByteWeights<I, bf16, kFp8>>(), many<NibbleWeights<I, bf16>>()},
                    {4, 4},
                    quantise_row<I, float>,
                    quantise_row<I, bf16>,
                    I::kDynamicRows,
                    INT64_MAX,
                    INT64_MAX,
                    dynamic_tile<I, float, false>,
                    dynamic_tile<I, bf16, false>,
                    dynamic_tile<I, float, true>,
                    dynamic_tile<I, bf16, true>,
                    delta_mix<I>,
                    delta_tokens<I>};
}
