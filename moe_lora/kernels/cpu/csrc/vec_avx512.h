// SPDX-License-Identifier: Apache-2.0
// Vector operations of AVX-512 (16 fp32 lanes). bf16 products: two fp32 multiply-adds, on even and odd elements.

struct Avx512 {
    using V = __m512;
    static constexpr int kLanes = 16, kMaxRows = 6, kTallRows = 12;
    static constexpr bool kPairs = false;

    static inline V zero() { return _mm512_setzero_ps(); }
    static inline V set1(float value) { return _mm512_set1_ps(value); }
    static inline V add(V a, V b) { return _mm512_add_ps(a, b); }
    static inline V sub(V a, V b) { return _mm512_sub_ps(a, b); }
    static inline V mul(V a, V b) { return _mm512_mul_ps(a, b); }
    static inline V fma(V a, V b, V c) { return _mm512_fmadd_ps(a, b, c); }
    static inline V max(V a, V b) { return _mm512_max_ps(a, b); }
    static inline V round(V a) { return _mm512_roundscale_ps(a, 0); }
    static inline V power_of_two(V n) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(_mm512_cvtps_epi32(n), _mm512_set1_epi32(127)), 23));
    }
    static inline V zero_below(V x, float limit, V value) {
        return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, _mm512_set1_ps(limit), _CMP_NLT_UQ), value);
    }

    static inline __mmask16 mask(int count) { return __mmask16((1u << count) - 1); }
    static inline V from_half(__m256i half) {
        return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
    static inline __m256i to_half(V value) {
        const __m512i bits = _mm512_castps_si512(value);
        const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
        const __m512i up = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
        const __mmask16 is_nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        return _mm512_cvtepi32_epi16(
            _mm512_mask_mov_epi32(_mm512_srli_epi32(up, 16), is_nan, _mm512_set1_epi32(0x7fc0)));
    }
    static inline V round_bf16(V value) { return from_half(to_half(value)); }
    using Int = __m512i;
    static constexpr int kDynamicRows = 8, kDynamicBlocks = 2;
    static inline Int int_zero() { return _mm512_setzero_si512(); }
    static inline Int int_set1(int32_t value) { return _mm512_set1_epi32(value); }
    static inline Int load_bytes(const void* p) { return _mm512_loadu_si512(p); }
    static inline Int load_nibbles(const void* p, int half) {
        const Int bytes = _mm512_srli_epi16(load_bytes(p), half ? 4 : 0);
        return _mm512_sub_epi8(_mm512_and_si512(bytes, _mm512_set1_epi8(15)), _mm512_set1_epi8(8));
    }
    static inline Int four_bytes(const uint8_t* p) {
        int32_t value;
        memcpy(&value, p, 4);
        return _mm512_set1_epi32(value);
    }
    // Four unsigned bytes of x by four signed bytes of w, in 16 bits: the sums of `maddubs` would saturate.
    static inline Int dot_bytes(Int x, Int w, Int acc) {
        const Int even = _mm512_madd_epi16(_mm512_and_si512(x, _mm512_set1_epi16(255)),
                                           _mm512_srai_epi16(_mm512_slli_epi16(w, 8), 8));
        const Int odd = _mm512_madd_epi16(_mm512_srli_epi16(x, 8), _mm512_srai_epi16(w, 8));
        return _mm512_add_epi32(acc, _mm512_add_epi32(even, odd));
    }
    static inline Int sum_bytes(Int w, Int acc) { return dot_bytes(_mm512_set1_epi8(1), w, acc); }
    static inline Int int_sub_product(Int a, Int b, Int c) { return _mm512_sub_epi32(a, _mm512_mullo_epi32(b, c)); }
    static inline V to_float(Int value) { return _mm512_cvtepi32_ps(value); }
    static inline V load_int8(const int8_t* p) {
        return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
    }
    static inline void store_bytes(uint8_t* to, V value, int count) {
        const Int positive = _mm512_max_epi32(_mm512_cvtps_epi32(value), _mm512_setzero_si512());
        _mm512_mask_cvtusepi32_storeu_epi8(to, mask(count), positive);
    }
    // By way of fp16: its exponent has four spare bits and is larger by 8.
    static inline V load_fp8(const uint8_t* p) {
        const __m128i codes = _mm_loadu_si128((const __m128i*)p);
        const __m256i wide = _mm256_slli_epi16(_mm256_cvtepi8_epi16(codes), 7);
        const __m256i half = _mm256_and_si256(wide, _mm256_set1_epi16(short(0xbfff)));
        const __m128i size = _mm_and_si128(codes, _mm_set1_epi8(127));
        const __mmask16 is_nan = _mm_cmpeq_epi8_mask(size, _mm_set1_epi8(127));
        return _mm512_cvtph_ps(_mm256_mask_mov_epi16(half, is_nan, _mm256_set1_epi16(0x7e00)));
    }
    static inline V load(const float* p) { return _mm512_loadu_ps(p); }
    static inline V load(const bf16* p) { return from_half(_mm256_loadu_si256((const __m256i*)p)); }
    static inline V load_part(const float* p, int count) { return _mm512_maskz_loadu_ps(mask(count), p); }
    static inline V load_part(const bf16* p, int count) { return from_half(_mm256_maskz_loadu_epi16(mask(count), p)); }
    static inline void store(float* p, V value) { _mm512_storeu_ps(p, value); }
    static inline void store(bf16* p, V value) { _mm256_storeu_si256((__m256i*)p, to_half(value)); }
    static inline void store_part(float* p, V value, int count) { _mm512_mask_storeu_ps(p, mask(count), value); }
    static inline void store_part(bf16* p, V value, int count) { _mm256_mask_storeu_epi16(p, mask(count), to_half(value)); }

    static inline Quad sum4(V a, V b, V c, V d) {
        const V ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
        const V cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
        const __m512d low = _mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const __m512d high = _mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd));
        const V all = _mm512_add_ps(_mm512_castpd_ps(low), _mm512_castpd_ps(high));
        const __m256 upper = _mm256_castpd_ps(_mm512_extractf64x4_pd(_mm512_castps_pd(all), 1));
        const __m256 half = _mm256_add_ps(_mm512_castps512_ps256(all), upper);
        return (Quad)_mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1));
    }

    template <class T, class Unused = void>
    struct Dot {
        using Raw = __m512;
        using Unpacked = Raw;
        static inline Unpacked unpacked(Raw raw) { return raw; }
        static constexpr int kStep = 16;
        static inline Raw load(const float* p) { return _mm512_loadu_ps(p); }
        static inline Raw load_part(const float* p, int count) { return _mm512_maskz_loadu_ps(mask(count), p); }
        static inline void store(float* p, Raw raw) { _mm512_storeu_ps(p, raw); }
        static inline Raw pack(const V* v) { return v[0]; }
        // Permutations read the low bits of an index only, so the other nibble may stay.
        using Table = V;
        static inline void fill(Table& table, const V* v) { table = v[0]; }
        static inline Raw look_up(const uint8_t* bytes, int shift, Table table) {
            const __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)bytes));
            return _mm512_permutexvar_ps(_mm512_srli_epi32(wide, shift), table);
        }
        static inline V dot(Raw x, Raw w, V acc) { return _mm512_fmadd_ps(x, w, acc); }
    };
    template <class Unused>
    struct Dot<bf16, Unused> {
        using Raw = __m512i;
        using Unpacked = Raw;
        static inline Unpacked unpacked(Raw raw) { return raw; }
        static constexpr int kStep = 32;
        static inline Raw load(const bf16* p) { return _mm512_loadu_si512(p); }
        static inline Raw load_part(const bf16* p, int count) {
            return _mm512_maskz_loadu_epi16(__mmask32((1ull << count) - 1), p);
        }
        static inline void store(bf16* p, Raw raw) { _mm512_storeu_si512(p, raw); }
        static inline Raw pack(const V* v) {
            return _mm512_inserti64x4(_mm512_castsi256_si512(to_half(v[0])), to_half(v[1]), 1);
        }
        using Table = __m512i;  // 16 values, twice
        static inline void fill(Table& table, const V* v) { table = _mm512_broadcast_i64x4(to_half(v[0])); }
        static inline Raw look_up(const uint8_t* bytes, int shift, Table table) {
            const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)bytes));
            return _mm512_permutexvar_epi16(_mm512_srli_epi16(wide, shift), table);
        }
        static inline V even(Raw a) { return _mm512_castsi512_ps(_mm512_slli_epi32(a, 16)); }
        static inline V odd(Raw a) {
            return _mm512_castsi512_ps(_mm512_and_si512(a, _mm512_set1_epi32(int(0xffff0000u))));
        }
        static inline V dot(Raw x, Raw w, V acc) {
            return _mm512_fmadd_ps(odd(x), odd(w), _mm512_fmadd_ps(even(x), even(w), acc));
        }
    };
};
