// SPDX-License-Identifier: Apache-2.0
// Vector operations of AVX2 with FMA and conversions of fp16 (8 fp32 lanes).

struct Avx2 {
    using V = __m256;
    static constexpr int kLanes = 8, kMaxRows = 3, kTallRows = 3;
    static constexpr bool kPairs = true;

    static inline V zero() { return _mm256_setzero_ps(); }
    static inline V set1(float value) { return _mm256_set1_ps(value); }
    static inline V add(V a, V b) { return _mm256_add_ps(a, b); }
    static inline V sub(V a, V b) { return _mm256_sub_ps(a, b); }
    static inline V mul(V a, V b) { return _mm256_mul_ps(a, b); }
    static inline V fma(V a, V b, V c) { return _mm256_fmadd_ps(a, b, c); }
    static inline V max(V a, V b) { return _mm256_max_ps(a, b); }
    static inline V round(V a) { return _mm256_round_ps(a, 0); }
    static inline V power_of_two(V n) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23));
    }
    static inline V zero_below(V x, float limit, V value) {
        return _mm256_and_ps(_mm256_cmp_ps(x, _mm256_set1_ps(limit), _CMP_NLT_UQ), value);
    }

    static inline V from_half(__m128i half) {
        return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
    static inline __m128i to_half(V value) {
        const __m256i bits = _mm256_castps_si256(value);
        const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        __m256i up = _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
        up = _mm256_srli_epi32(up, 16);
        const __m256i is_nan = _mm256_castps_si256(_mm256_cmp_ps(value, value, _CMP_UNORD_Q));
        up = _mm256_blendv_epi8(up, _mm256_set1_epi32(0x7fc0), is_nan);
        const __m256i packed = _mm256_packus_epi32(up, up);
        return _mm_unpacklo_epi64(_mm256_castsi256_si128(packed), _mm256_extracti128_si256(packed, 1));
    }
    static inline V round_bf16(V value) { return from_half(to_half(value)); }
    template <class T>
    static inline V load_part_of(const T* p, int count) {
        T padded[kLanes] = {};
        memcpy(padded, p, count * sizeof(T));
        return load(padded);
    }
    template <class T>
    static inline void store_part_of(T* p, V value, int count) {
        T padded[kLanes];
        store(padded, value);
        memcpy(p, padded, count * sizeof(T));
    }
    using Int = __m256i;
    static constexpr int kDynamicRows = 4, kDynamicBlocks = 1;
    static inline Int int_zero() { return _mm256_setzero_si256(); }
    static inline Int int_set1(int32_t value) { return _mm256_set1_epi32(value); }
    static inline Int load_bytes(const void* p) { return _mm256_loadu_si256((const __m256i*)p); }
    static inline Int load_nibbles(const void* p, int half) {
        const Int bytes = _mm256_srli_epi16(load_bytes(p), half ? 4 : 0);
        return _mm256_sub_epi8(_mm256_and_si256(bytes, _mm256_set1_epi8(15)), _mm256_set1_epi8(8));
    }
    static inline Int four_bytes(const uint8_t* p) {
        int32_t value;
        memcpy(&value, p, 4);
        return _mm256_set1_epi32(value);
    }
    // Four unsigned bytes of x by four signed bytes of w, in 16 bits: the sums of `maddubs` would saturate.
    static inline Int dot_bytes(Int x, Int w, Int acc) {
        const Int even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(255)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(w, 8), 8));
        const Int odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(w, 8));
        return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
    }
    static inline Int sum_bytes(Int w, Int acc) { return dot_bytes(_mm256_set1_epi8(1), w, acc); }
    static inline Int int_sub_product(Int a, Int b, Int c) { return _mm256_sub_epi32(a, _mm256_mullo_epi32(b, c)); }
    static inline V to_float(Int value) { return _mm256_cvtepi32_ps(value); }
    static inline V load_int8(const int8_t* p) {
        return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
    }
    static inline void store_bytes(uint8_t* to, V value, int count) {
        float lanes[kLanes];
        store(lanes, value);
        store_bytes_plainly(to, lanes, count);
    }
    // By way of fp16: its exponent has four spare bits and is larger by 8.
    static inline V load_fp8(const uint8_t* p) {
        const __m128i codes = _mm_cvtepi8_epi16(_mm_loadl_epi64((const __m128i*)p));
        const __m128i size = _mm_and_si128(codes, _mm_set1_epi16(127));
        const __m128i is_nan = _mm_cmpeq_epi16(size, _mm_set1_epi16(127));
        const __m128i half = _mm_and_si128(_mm_slli_epi16(codes, 7), _mm_set1_epi16(short(0xbfff)));
        return _mm256_cvtph_ps(_mm_or_si128(half, _mm_and_si128(is_nan, _mm_set1_epi16(0x7e00))));
    }
    // Constants beside many sums. They stay in memory: the compiler would keep them in registers, and sums in memory.
    struct Kept {
        alignas(32) uint32_t power[8], odd[8];
        float by[8];
        uint8_t even_tops[32], odd_tops[32];
        constexpr Kept() : power(), odd(), by(), even_tops(), odd_tops() {
            for (int i = 0; i < 8; i++) {
                power[i] = 0xff800000u, odd[i] = 0xffff0000u, by[i] = 98304;
                for (int b = 0; b < 4; b++) {
                    even_tops[4 * i + b] = b == 3 ? uint8_t(2 * i) : 128;
                    odd_tops[4 * i + b] = b == 3 ? uint8_t(2 * i + 1) : 128;
                }
            }
        }
    };
    static inline const Kept* kept() {
        static constexpr Kept constants;
        const Kept* p = &constants;
        asm volatile("" : "+r"(p));
        return p;
    }
    // Parts of a loop over many sums, in assembler and in this order: GCC 12 would load a weight once per product.
    static inline V load_in_order(const float* p) {
        V value;
        asm volatile("vmovups %1, %0" : "=x"(value) : "m"(*(const __m256_u*)p));
        return value;
    }
    static inline V even_in_order(const bf16* p) {
        V value;
        asm volatile("vmovups %1, %0\n\tvpslld $16, %0, %0" : "=x"(value) : "m"(*(const __m256_u*)p));
        return value;
    }
    static inline V odd_in_order(const bf16* p) {
        V value;
        asm volatile("vmovups %1, %0\n\tvandps %2, %0, %0" : "=x"(value)
                     : "m"(*(const __m256_u*)p), "m"(*(const V*)kept()->odd));
        return value;
    }
    static inline void add_product_in_order(V& sum, V a, V b) {
        asm volatile("vfmadd231ps %2, %1, %0" : "+x"(sum) : "x"(a), "x"(b));
    }
    // 16 elements of bf16 in fp32, as the dots take them.
    struct Pairs {
        V even, odd;
    };
    // Times 2^24.
    static inline Pairs load_int8_pairs(const uint8_t* p) {
        const __m256i codes = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)p));
        const Kept* const by = kept();
        const __m256i even = _mm256_shuffle_epi8(codes, *(const __m256i*)by->even_tops);
        const __m256i odd = _mm256_shuffle_epi8(codes, *(const __m256i*)by->odd_tops);
        return {_mm256_cvtepi32_ps(even), _mm256_cvtepi32_ps(odd)};
    }
    static inline V load(const float* p) { return _mm256_loadu_ps(p); }
    static inline V load(const bf16* p) { return from_half(_mm_loadu_si128((const __m128i*)p)); }
    static inline V load_part(const float* p, int count) { return load_part_of(p, count); }
    static inline V load_part(const bf16* p, int count) { return load_part_of(p, count); }
    static inline void store(float* p, V value) { _mm256_storeu_ps(p, value); }
    static inline void store(bf16* p, V value) { _mm_storeu_si128((__m128i*)p, to_half(value)); }
    static inline void store_part(float* p, V value, int count) { store_part_of(p, value, count); }
    static inline void store_part(bf16* p, V value, int count) { store_part_of(p, value, count); }

    static inline Quad sum4(V a, V b, V c, V d) {
        const V all = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
        return (Quad)_mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1));
    }

    template <class T, class Unused = void>
    struct Dot {
        using Raw = __m256;
        using Unpacked = Raw;
        static constexpr int kStep = 8;
        static inline Unpacked unpacked(Raw raw) { return raw; }
        static inline Raw load(const float* p) { return _mm256_loadu_ps(p); }
        static inline Raw load_part(const float* p, int count) { return load_part_of(p, count); }
        static inline void store(float* p, Raw raw) { _mm256_storeu_ps(p, raw); }
        static inline Raw pack(const V* v) { return v[0]; }
        struct Table {
            V low, high;  // of codes below 8, and the others
        };
        static inline void fill(Table& table, const V* v) { table = {v[0], v[1]}; }
        static inline Raw look_up(const uint8_t* bytes, int shift, const Table& table) {
            const __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)bytes));
            const __m256i code = _mm256_srli_epi32(wide, shift);  // permutations read three bits
            const V is_high = _mm256_castsi256_ps(_mm256_slli_epi32(code, 28));
            return _mm256_blendv_ps(_mm256_permutevar8x32_ps(table.low, code),
                                    _mm256_permutevar8x32_ps(table.high, code), is_high);
        }
        static inline V dot(Raw x, Raw w, V acc) { return _mm256_fmadd_ps(x, w, acc); }
    };
    template <class Unused>
    struct Dot<bf16, Unused> {
        using Raw = __m256i;
        using Unpacked = Pairs;
        static constexpr int kStep = 16;
        static inline Raw load(const bf16* p) { return _mm256_loadu_si256((const __m256i*)p); }
        static inline Raw load_part(const bf16* p, int count) {
            bf16 padded[kStep] = {};
            memcpy(padded, p, count * sizeof(bf16));
            return load(padded);
        }
        static inline void store(bf16* p, Raw raw) { _mm256_storeu_si256((__m256i*)p, raw); }
        // To nearest, ties to even. Scales are finite, and E4M3's NaN has a low half of zero.
        static inline __m256i rounded(V value) {
            const __m256i bits = _mm256_castps_si256(value);
            const __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
            return _mm256_srli_epi32(_mm256_add_epi32(_mm256_add_epi32(bits, _mm256_set1_epi32(0x7fff)), odd), 16);
        }
        // The same in fp32, within the limits of scales: beside 1.5 * 2^16 times its own power of two, a value has the
        // last bit of bf16.
        static inline Unpacked rounded(Unpacked value) {
            const Kept* const constants = kept();
            const V mask = *(const V*)constants->power, by = *(const V*)constants->by;
            const V even = _mm256_and_ps(value.even, mask), odd = _mm256_and_ps(value.odd, mask);
            return {_mm256_fnmadd_ps(even, by, _mm256_fmadd_ps(even, by, value.even)),
                    _mm256_fnmadd_ps(odd, by, _mm256_fmadd_ps(odd, by, value.odd))};
        }
        static inline Raw pack(const V* v) {
            return _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded(v[0]), rounded(v[1])), 0xd8);
        }
        struct Table {
            __m128i low, high;  // bytes of the 16 values
        };
        static inline void fill(Table& table, const V* v) {
            const Raw all = pack(v);
            const __m128i a = _mm256_castsi256_si128(all), b = _mm256_extracti128_si256(all, 1);
            const __m128i byte = _mm_set1_epi16(255);
            table.low = _mm_packus_epi16(_mm_and_si128(a, byte), _mm_and_si128(b, byte));
            table.high = _mm_packus_epi16(_mm_srli_epi16(a, 8), _mm_srli_epi16(b, 8));
        }
        static inline Raw look_up(const uint8_t* bytes, int shift, const Table& table) {
            const __m128i both = _mm_srli_epi16(_mm_loadu_si128((const __m128i*)bytes), shift);
            const __m128i code = _mm_and_si128(both, _mm_set1_epi8(15));
            const __m128i low = _mm_shuffle_epi8(table.low, code), high = _mm_shuffle_epi8(table.high, code);
            return _mm256_setr_m128i(_mm_unpacklo_epi8(low, high), _mm_unpackhi_epi8(low, high));
        }
        static inline Unpacked unpacked(Raw raw) {
            asm("" : "+x"(raw));  // loaded once
            return {even(raw), odd(raw)};
        }
        static inline void store(bf16* p, Unpacked w) {
            const __m256i even = _mm256_srli_epi32(_mm256_castps_si256(w.even), 16);
            store(p, _mm256_or_si256(even, _mm256_castps_si256(w.odd)));
        }
        static inline V even(Raw a) { return _mm256_castsi256_ps(_mm256_slli_epi32(a, 16)); }
        static inline V odd(Raw a) {
            return _mm256_castsi256_ps(_mm256_and_si256(a, _mm256_set1_epi32(int(0xffff0000u))));
        }
        static inline V dot(Raw x, Raw w, V acc) {
            return _mm256_fmadd_ps(odd(x), odd(w), _mm256_fmadd_ps(even(x), even(w), acc));
        }
        static inline V dot(Unpacked x, Unpacked w, V acc) {
            return _mm256_fmadd_ps(x.odd, w.odd, _mm256_fmadd_ps(x.even, w.even, acc));
        }
    };
};
