// SPDX-License-Identifier: Apache-2.0
// Quantised weights as a source for the dots of tiles.inl: round((code's value - zero) * scale) of T, equal to
// torchao's `dequantize`, bit for bit. Included after tiles.inl.
//
// Bytes: [rows][width], int8 or E4M3. Four bits: 64 codes in 32 bytes (byte i: element i low, element 32 + i high;
// where width ends at a half, its bytes' high bits are 0). Scales: per row and group; a group is a multiple of 32.

// Most rows of x with few registers; against pairs of weights, before x pushes itself out of the sets of the
// first-level cache; and at all. Weights per call, which converts their scales to fp32.
constexpr int kPackedFew = 4, kPackedPairs = 8, kPackedRows = 12;
constexpr int64_t kPackedColumns = 48;

// Bytes of codes in flight from memory, at least, and at most for the first-level cache: rows of 4 KiB
// would push each other out of its sets.
constexpr int64_t kFetchAhead = 4 << 10, kFetchFirst = 8 << 10;

// Up to `count` rows of a tile from n on, at most none.
static inline PackedTile rows_of(const PackedTile& t, int64_t n, int64_t count) {
    PackedTile found = t;
    found.num_w = t.num_w - n < count ? t.num_w - n : count;
    found.w = static_cast<const char*>(t.w) + n * t.row_bytes;
    found.next = static_cast<const char*>(found.w) + found.num_w * t.row_bytes;
    found.bias = t.bias ? static_cast<const char*>(t.bias) + n * int64_t(sizeof(bf16)) : nullptr;
    found.scale += n * t.groups, found.column += n;
    return found;
}

// N rows of a tile from n on; common to both kinds of codes.
template <class W, int N>
struct PackedRows {
    const uint8_t* w;
    const int64_t row_bytes, group, groups, zero;
    const float* scale;
    int64_t next = 0;

    MOE_LORA_INLINE PackedRows(const PackedTile& t, int64_t n)
        : w(static_cast<const uint8_t*>(t.w) + n * t.row_bytes),
          row_bytes(t.row_bytes),
          group(t.group),
          groups(t.groups),
          zero(t.zero),
          scale(t.scale + n * t.groups) {}
    // The bytes of a step of N rows, to the first-level cache if `first`, else to the second; lines that two steps
    // share are fetched twice.
    static MOE_LORA_INLINE const char* fetch(const char* ahead, int first) {
        constexpr int kBytes = N * W::D::kStep * W::kBits / 8;
        MOE_LORA_UNROLL
        for (int b = 0; b < kBytes; b += 64)
            if (first)
                __builtin_prefetch(ahead + b, 0, 3);
            else
                __builtin_prefetch(ahead + b, 0, 2);
        return ahead + kBytes;
    }
};

template <class I_, class T_, Codes kCodes>
struct ByteWeights {
    using I = I_;
    using T = T_;
    using D = typename I::template Dot<T>;
    using Weights = typename D::Unpacked;
    static MOE_LORA_INLINE Weights input(typename D::Raw x) { return D::unpacked(x); }
    using Tile = PackedTile;
    static constexpr int kSpan = D::kStep, kBits = 8;
    static constexpr bool kPairs = I::kPairs && sizeof(T) == 2 && kCodes != kFp8;
    static constexpr float kUnit = kPairs ? 1 << 24 : 1;  // of codes as load_int8_pairs has them

    template <int N>
    struct Rows : PackedRows<ByteWeights, N> {
        typename I::V by[N], less[N];

        MOE_LORA_INLINE Rows(const PackedTile& t, int64_t n) : PackedRows<ByteWeights, N>(t, n) { open(0); }
        MOE_LORA_INLINE void open(int64_t k) {
            if (k < this->next) return;
            MOE_LORA_UNROLL
            for (int j = 0; j < N; j++) {
                by[j] = I::set1(this->scale[j * this->groups] / kUnit);
                if (kCodes == kInt8Zero) less[j] = I::set1(this->scale[j * this->groups + this->zero] * kUnit);
            }
            this->scale++;
            this->next += this->group;
        }
        MOE_LORA_INLINE Weights values(const uint8_t* codes, int j) const {
            if constexpr (kPairs) {
                typename I::Pairs v = I::load_int8_pairs(codes);
                if (kCodes == kInt8Zero) v = {I::sub(v.even, less[j]), I::sub(v.odd, less[j])};
                return D::rounded({I::mul(v.even, by[j]), I::mul(v.odd, by[j])});
            } else {
                return D::unpacked(plain_values(codes, j));
            }
        }
        MOE_LORA_INLINE typename D::Raw plain_values(const uint8_t* codes, int j) const {
            typename I::V v[D::kStep / I::kLanes];
            MOE_LORA_UNROLL
            for (int i = 0; i < D::kStep / I::kLanes; i++) {
                const uint8_t* const p = codes + i * I::kLanes;
                v[i] = kCodes == kFp8 ? I::load_fp8(p) : I::load_int8(reinterpret_cast<const int8_t*>(p));
                if (kCodes == kInt8Zero) v[i] = I::sub(v[i], less[j]);
                v[i] = I::mul(v[i], by[j]);
            }
            return D::pack(v);
        }
        template <int Step>
        MOE_LORA_INLINE Weights load(int j, int64_t k) const {
            return values(this->w + j * this->row_bytes + k, j);
        }
        template <int Step>
        MOE_LORA_INLINE void put(int j, int64_t k, T* out) const {
            D::store(out, load<Step>(j, k));
        }
        MOE_LORA_INLINE Weights load_part(int j, int64_t k, int count) const {
            uint8_t padded[D::kStep] = {};
            memcpy(padded, this->w + j * this->row_bytes + k, count);
            return values(padded, j);  // what lies behind the row meets an x of zero
        }
    };
};

template <class I_, class T_>
struct NibbleWeights {
    using I = I_;
    using T = T_;
    using D = typename I::template Dot<T>;
    using Weights = typename D::Unpacked;
    static MOE_LORA_INLINE Weights input(typename D::Raw x) { return D::unpacked(x); }
    using Tile = PackedTile;
    static constexpr int kSpan = D::kStep == 32 ? 64 : D::kStep, kBits = 4;
    static constexpr bool kPairs = false;

    template <int N>
    struct Rows : PackedRows<NibbleWeights, N> {
        const float* values;
        typename D::Table table[N];  // what the 16 codes mean

        MOE_LORA_INLINE Rows(const PackedTile& t, int64_t n) : PackedRows<NibbleWeights, N>(t, n), values(t.values) {
            open(0);
        }
        MOE_LORA_INLINE void open(int64_t k) {
            if (k < this->next) return;
            MOE_LORA_UNROLL
            for (int j = 0; j < N; j++) {
                const float* const at = this->scale + j * this->groups;
                typename I::V v[16 / I::kLanes];
                MOE_LORA_UNROLL
                for (int i = 0; i < 16 / I::kLanes; i++) {
                    v[i] = I::load(values + i * I::kLanes);
                    if (this->zero) v[i] = I::sub(v[i], I::set1(at[this->zero]));
                    v[i] = I::mul(v[i], I::set1(*at));
                }
                D::fill(table[j], v);
            }
            this->scale++;
            this->next += this->group;
        }
        template <int Step>
        MOE_LORA_INLINE Weights load(int j, int64_t k) const {
            const uint8_t* const row = this->w + j * this->row_bytes;
            if constexpr (kSpan == 64) return D::unpacked(D::look_up(row + (k - 32 * Step) / 2, 4 * Step, table[j]));
            return load_part(j, k, 0);
        }
        template <int Step>
        MOE_LORA_INLINE void put(int j, int64_t k, T* out) const {
            D::store(out, load<Step>(j, k));
        }
        // The end of a row of one group, with bytes up to the next 64 codes.
        MOE_LORA_INLINE Weights load_part(int j, int64_t k, int) const {
            const uint8_t* const row = this->w + j * this->row_bytes;
            return D::unpacked(D::look_up(row + k / 64 * 32 + k % 32, k % 64 < 32 ? 0 : 4, table[j]));
        }
    };
};

template <class W>
static void unpack_rows(const PackedTile& t, void* to) {
    using T = typename W::T;
    for (int64_t n = 0; n < t.num_w; n++) {
        T* const out = static_cast<T*>(to) + n * t.width;
        typename W::template Rows<1> w(t, n);
        const char* const ahead = static_cast<const char*>(t.next) + n * t.width * W::kBits / 8;
        const auto step = [&](int64_t k, auto number) __attribute__((always_inline)) {
            w.open(k);
            if (t.next && k % 64 == 0) __builtin_prefetch(ahead + k * W::kBits / 8, 0, 2);
            W::D::store(out + k, w.template load<decltype(number)::value>(0, k));
        };
        const int64_t k = for_each_step<W>(t.width, step);
        if (k == t.width) continue;
        w.open(k);
        T part[W::D::kStep];
        W::D::store(part, w.load_part(0, k, int(t.width - k)));
        memcpy(out + k, part, (t.width - k) * sizeof(T));
    }
}

// N weights at a time against balanced groups of up to M rows of x.
template <class W, int N, int M>
static void packed_columns(const PackedTile& t) {
    const int64_t groups = (t.rows + M - 1) / M;
    const int64_t distance = N * t.row_bytes < kFetchAhead ? kFetchAhead : N * t.row_bytes;
    const char* const from = static_cast<const char*>(t.w) + distance;
    Prefetch prefetch{from, from + t.num_w * t.row_bytes, distance <= kFetchFirst};
    for (int64_t n = 0; n < t.num_w;) {
        const bool whole = n + N <= t.num_w;
        const char* const ahead = prefetch.at;
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = t.rows * g / groups;
            const int rows = int(t.rows * (g + 1) / groups - row);
            prefetch.at = ahead;
            if (whole)
                dot_rows<W, typename W::T, N, M>(t, row, rows, n, prefetch);
            else
                dot_rows<W, typename W::T, 1, M>(t, row, rows, n, prefetch);
        }
        n += whole ? N : 1;
    }
}

// A few rows of x: weights are unpacked in registers, once if all sums fit there too.
template <class W>
static void packed_tile(const PackedTile& t) {
    using I = typename W::I;
    if constexpr (I::kTallRows == I::kMaxRows)
        packed_columns<W, 2, kPackedFew>(t);
    else if (t.rows > I::kMaxRows && t.rows <= kPackedPairs)
        packed_columns<W, 2, kPackedPairs>(t);
    else
        packed_columns<W, 4, I::kMaxRows>(t);
}

// Beside dots of bf16, a second unpacking of bytes takes longer than their way through the cache.
template <class W>
constexpr PackedDot packed() {
    using I = typename W::I;
    constexpr bool is_dear = W::kBits == 8 && sizeof(typename W::T) == 2;
    if constexpr (I::kTallRows > I::kMaxRows)
        return {packed_tile<W>, 1, is_dear ? kPackedPairs : kPackedRows, kPackedColumns};
    else if constexpr (I::kMaxRows > 2)
        return {packed_tile<W>, 1, kPackedFew, kPackedColumns};
    else
        return {};
}
