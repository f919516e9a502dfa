// SPDX-License-Identifier: Apache-2.0
// Dots of bf16 over quantised weights on AVX2: four weights at a time become bf16 in the first-level cache, for all
// rows of x. Beside the sums no register is left for what unpacks them. Included after tiles.inl.
//
// In place of products there are tables: 32 codes of 4 bits are looked up together, and E4M3 is two such codes.

// Weights together; rows of x whose sums with two of them fit the registers; elements of a weight that stay in the
// first-level cache; from row to row of weights and of x: at distances of 2 KiB they would meet in a bank of the
// cache; tables of a thread.
constexpr int kCachedColumns = 4, kCachedRows = 5, kCachedPart = 1024, kWeightStride = kCachedPart + 16,
              kInputStride = kCachedPart + 64, kFp8Tables = 64;

// In memory: in a register, it would push a sum out.
struct OddMask {
    alignas(32) uint32_t of[8];
    constexpr OddMask() : of() {
        for (int i = 0; i < 8; i++) of[i] = 0xffff0000u;
    }
};
constexpr OddMask kOddMask;

// Parts of a loop over many sums, in assembler and in this order: GCC 12 would keep some of the sums in memory.
static MOE_LORA_INLINE void load_pairs(const bf16* p, __m256& even, __m256& odd) {
    asm volatile("vmovups %2, %1\n\tvpslld $16, %1, %0\n\tvandps %3, %1, %1"
                 : "=&x"(even), "=&x"(odd)
                 : "m"(*(const __m256_u*)p), "m"(*(const __m256*)kOddMask.of));
}
static MOE_LORA_INLINE void add_product(__m256& sum, __m256 a, __m256 b) {
    asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
}

// Of 32 codes, 8 to 15 and 16 to 23 change places, for `store_bytes`.
static MOE_LORA_INLINE __m256i load_codes(const uint8_t* p) {
    return _mm256_permute4x64_epi64(_mm256_loadu_si256((const __m256i*)p), 0xd8);
}
static MOE_LORA_INLINE void store_bytes(bf16* out, __m256i low, __m256i high) {
    _mm256_store_si256((__m256i*)out, _mm256_unpacklo_epi8(low, high));
    _mm256_store_si256((__m256i*)(out + 16), _mm256_unpackhi_epi8(low, high));
}

// Bytes of 16 values of bf16, twice.
struct NibbleTable {
    __m256i low, high;

    // less: or null. exact: products are numbers of bf16.
    MOE_LORA_INLINE void fill(const float* values, const float* less, float by, bool exact) {
        const __m256i order =
            _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 2, 4, 6, 8, 10, 12, 14, 1, 3, 5, 7, 9, 11, 13, 15));
        __m256 value[2] = {_mm256_loadu_ps(values), _mm256_loadu_ps(values + 8)};
        if (less) value[0] = Avx2::sub(value[0], Avx2::set1(*less)), value[1] = Avx2::sub(value[1], Avx2::set1(*less));
        __m256i half[2];
        MOE_LORA_UNROLL
        for (int i = 0; i < 2; i++) {
            value[i] = _mm256_mul_ps(value[i], _mm256_set1_ps(by));
            half[i] = exact ? _mm256_srli_epi32(_mm256_castps_si256(value[i]), 16)
                            : Avx2::Dot<bf16>::rounded(value[i]);
        }
        const __m256i bytes = _mm256_shuffle_epi8(_mm256_packus_epi32(half[0], half[1]), order);
        low = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 0, 4, 1, 5));
        high = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(2, 6, 3, 7, 2, 6, 3, 7));
    }
};

// Values of E4M3 by their low 4 bits: below 16, and from 16 to 31. Further sizes have a larger high byte: by 1 in each
// 16, a factor of 4.
struct Fp8Table {
    NibbleTable least, others;
    __m256i tops;  // by the high 4 bits: the sign, and what is added
    float scale = 0;
    bool filled = false;

    MOE_LORA_INLINE void fill(float by) {
        scale = by, filled = true;
        least.fill(kFp8Values.of, nullptr, by, false), others.fill(kFp8Values.of + 16, nullptr, by, false);
        tops = _mm256_broadcastsi128_si256(
            _mm_setr_epi8(0, 0, 1, 2, 3, 4, 5, 6, -128, -128, -127, -126, -125, -124, -123, -122));
        if (by == 0) tops = _mm256_and_si256(tops, _mm256_set1_epi8(-128));
    }
};

// Codes of a row. open: of a group, by its scale; `held` is a table for it. put: 32 weights, from k on.
template <bool kExact>
struct NibbleCodes {
    static constexpr int kBits = 4;
    NibbleTable table;

    MOE_LORA_INLINE void open(const PackedTile& t, const float* scale, Fp8Table&) {
        table.fill(t.values, t.zero ? scale + t.zero : nullptr, *scale, kExact);
    }
    MOE_LORA_INLINE void put(const uint8_t* row, uint64_t k, bf16* out) const {
        const __m256i both = _mm256_srli_epi16(load_codes(row + k / 64 * 32), int(k / 8 & 4));
        const __m256i codes = _mm256_and_si256(both, _mm256_set1_epi8(15));
        store_bytes(out, _mm256_shuffle_epi8(table.low, codes), _mm256_shuffle_epi8(table.high, codes));
    }
};

struct Fp8Codes {
    static constexpr int kBits = 8;
    Fp8Table table;

    MOE_LORA_INLINE void open(const PackedTile& t, const float* scale, Fp8Table& held) {
        if (t.groups == 1) return table.fill(*scale);
        if (!held.filled || memcmp(&held.scale, scale, sizeof(*scale))) fill(held, *scale);
        table = held;
    }
    static __attribute__((noinline)) void fill(Fp8Table& held, float by) { held.fill(by); }
    MOE_LORA_INLINE __m256i look_up(__m256i NibbleTable::*bytes, __m256i size, __m256i is_least) const {
        const __m256i others = _mm256_shuffle_epi8(table.others.*bytes, size);
        return _mm256_blendv_epi8(others, _mm256_shuffle_epi8(table.least.*bytes, size), is_least);
    }
    MOE_LORA_INLINE void put(const uint8_t* row, uint64_t k, bf16* out) const {
        const __m256i codes = load_codes(row + k), size = _mm256_and_si256(codes, _mm256_set1_epi8(127));
        const __m256i is_least = _mm256_cmpgt_epi8(_mm256_set1_epi8(16), size);
        const __m256i is_nan = _mm256_cmpeq_epi8(size, _mm256_set1_epi8(127));
        const __m256i top = _mm256_and_si256(_mm256_srli_epi16(codes, 4), _mm256_set1_epi8(15));
        const __m256i low = look_up(&NibbleTable::low, size, is_least);
        const __m256i high = look_up(&NibbleTable::high, size, is_least);
        const __m256i with_top = _mm256_add_epi8(high, _mm256_shuffle_epi8(table.tops, top));
        store_bytes(out, _mm256_or_si256(low, is_nan), _mm256_or_si256(with_top, is_nan));
    }
};

// Elements [k, end) of weight n. Weights with common scales share tables.
template <class Codes>
static inline void unpack_part(const PackedTile& t, int64_t n, uint64_t k, uint64_t end, Fp8Table* tables, bf16* out) {
    const uint8_t* const row = static_cast<const uint8_t*>(t.w) + n * t.row_bytes;
    const uint8_t* const ahead = row + kCachedColumns * t.row_bytes;
    const uint64_t group = t.group;
    uint64_t place = k / group;
    const float* scale = t.scale + n * t.groups + place;
    Codes codes;
    for (uint64_t last = (place + 1) * group; k < end; last += group) {
        codes.open(t, scale++, tables[place++ % kFp8Tables]);
        const uint64_t stop = end < last ? end : last;
        for (; k < stop; k += 32, out += 32) {
            __builtin_prefetch(ahead + k * Codes::kBits / 8, 0, 3);
            codes.put(row, k, out);
        }
    }
}

// sums += M rows of x against N weights of `count` elements. The fewer of both stay in registers.
template <int M, int N>
static __attribute__((noinline)) void add_dots(const bf16* x, const bf16* w, int64_t count, __m256 (&sums)[M][N]) {
    constexpr bool holds_w = N <= M;
    constexpr int kHeld = holds_w ? N : M, kOthers = holds_w ? M : N;
    constexpr int kHeldStride = holds_w ? kWeightStride : kInputStride;
    constexpr int kOtherStride = holds_w ? kInputStride : kWeightStride;
    const bf16 *const held = holds_w ? w : x, *const others = holds_w ? x : w;
    __m256 acc[M][N];
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++)
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) acc[i][j] = sums[i][j];
    for (int64_t at = 0; at < count; at += 16) {
        __m256 even[kHeld], odd[kHeld];
        MOE_LORA_UNROLL
        for (int h = 0; h < kHeld; h++) load_pairs(held + h * kHeldStride + at, even[h], odd[h]);
        MOE_LORA_UNROLL
        for (int o = 0; o < kOthers; o++) {
            __m256 other_even, other_odd;
            load_pairs(others + o * kOtherStride + at, other_even, other_odd);
            MOE_LORA_UNROLL
            for (int h = 0; h < kHeld; h++)
                add_product(holds_w ? acc[o][h] : acc[h][o], other_even, even[h]);
            MOE_LORA_UNROLL
            for (int h = 0; h < kHeld; h++)
                add_product(holds_w ? acc[o][h] : acc[h][o], other_odd, odd[h]);
        }
    }
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++)
        MOE_LORA_UNROLL
        for (int j = 0; j < N; j++) sums[i][j] = acc[i][j];
}

// Of a part of the width, `rows` rows of x, up to M, and N weights; the last one stores the sums.
template <int N, int M>
static inline void cached_rows(const PackedTile& t, int64_t row, int rows, int64_t n, int64_t k, int64_t count,
                               const bf16* x, const bf16* w, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return cached_rows<N, M - 1>(t, row, rows, n, k, count, x, w, sums);
    auto& acc = *reinterpret_cast<__m256(*)[M][N]>(sums);
    if (k == 0) memset(&acc, 0, sizeof(acc));
    add_dots<M, N>(x, w, count, acc);
    if (k + count == t.width) store_dots<Avx2, bf16, M, N>(t, row, n, acc);
}

struct CachedBuffers {
    Buffer<bf16> x;
    Buffer<float> sums;
    Fp8Table tables[kFp8Tables];
};

template <class Codes>
static void cached_tile(const PackedTile& t) {
    static thread_local CachedBuffers own;
    CachedBuffers& buffers = own;  // a thread's address is found once
    constexpr int64_t group_sums = kCachedRows * kCachedColumns * Avx2::kLanes;
    const int64_t groups = num_row_groups(t.rows, kCachedRows);
    const int64_t part_inputs = t.rows * kInputStride;
    float* const sums = buffers.sums.of(groups * group_sums);
    bf16* const inputs = buffers.x.of((t.width + kCachedPart - 1) / kCachedPart * part_inputs);
    const auto count_of = [&](int64_t k) { return t.width - k < kCachedPart ? t.width - k : kCachedPart; };
    for (int64_t k = 0; k < t.width; k += kCachedPart)
        for (int64_t row = 0; row < t.rows; row++)
            memcpy(inputs + k / kCachedPart * part_inputs + row * kInputStride, static_cast<const bf16*>(t.x[row]) + k,
                   count_of(k) * sizeof(bf16));
    alignas(32) bf16 w[kCachedColumns * kWeightStride];
    for (int64_t n = 0; n < t.num_w; n += kCachedColumns) {
        const int num = int(t.num_w - n < kCachedColumns ? t.num_w - n : kCachedColumns);
        for (int64_t k = 0; k < t.width; k += kCachedPart) {
            const int64_t count = count_of(k);
            for (int j = 0; j < num; j++)
                unpack_part<Codes>(t, n + j, k, k + count, buffers.tables, w + j * kWeightStride);
            for (int64_t g = 0; g < groups; g++) {
                const int64_t row = t.rows * g / groups;
                const int rows = int(t.rows * (g + 1) / groups - row);
                const bf16* const x = inputs + k / kCachedPart * part_inputs + row * kInputStride;
                float* to = sums + g * group_sums;
                if (num == 4 && rows <= 2) {
                    cached_rows<4, 2>(t, row, rows, n, k, count, x, w, to);
                    continue;
                }
                int j = 0;
                for (; j + 2 <= num; j += 2, to += 2 * rows * Avx2::kLanes)
                    cached_rows<2, kCachedRows>(t, row, rows, n + j, k, count, x, w + j * kWeightStride, to);
                if (j < num) cached_rows<1, kCachedRows>(t, row, rows, n + j, k, count, x, w + j * kWeightStride, to);
            }
        }
    }
}

static void nibbles_tile(const PackedTile& t) {
    t.exact ? cached_tile<NibbleCodes<true>>(t) : cached_tile<NibbleCodes<false>>(t);
}
