// SPDX-License-Identifier: Apache-2.0
// Unpacks a few rows of quantised weights to bf16 by permutations of bytes (AVX512-VBMI), with the bits of unpack.inl.
// Included after tiles.inl.
//
// Codes of 8 bits are a sign and a size: a table of 128 values in four registers per scale. Rows with a scale of their
// own keep their tables until their last chunk, and rows with common scales share them. Of int8 the table has -128
// in the place of 0.

// 32 values times `by`, in order.
static MOE_LORA_INLINE __m512i scaled_words(const float* values, __m512 by) {
    return (__m512i)_mm512_cvtne2ps_pbh(_mm512_mul_ps(_mm512_loadu_ps(values + 16), by),
                                        _mm512_mul_ps(_mm512_loadu_ps(values), by));
}

// The low bytes of 64 words.
static MOE_LORA_INLINE __m512i low_bytes(__m512i first, __m512i second) {
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm512_cvtepi16_epi8(first)), _mm512_cvtepi16_epi8(second), 1);
}

struct SizeTable {
    __m512i low[2], high[2];  // bytes of the values
    float scale = 0;
    bool filled = false;

    MOE_LORA_INLINE bool is_for(float by) const { return filled && !memcmp(&scale, &by, sizeof(by)); }
    inline void fill(const float* sizes, float by) {
        scale = by, filled = true;
        for (int i = 0; i < 2; i++) {
            const __m512i first = scaled_words(sizes + 64 * i, _mm512_set1_ps(by));
            const __m512i second = scaled_words(sizes + 64 * i + 32, _mm512_set1_ps(by));
            low[i] = low_bytes(first, second);
            high[i] = low_bytes(_mm512_srli_epi16(first, 8), _mm512_srli_epi16(second, 8));
        }
    }
};

struct Int8Sizes {
    float of[128];
    constexpr Int8Sizes() : of() {
        for (int i = 0; i < 128; i++) of[i] = i ? float(i) : 128;
    }
};
constexpr Int8Sizes kInt8Sizes;

// 64 codes.
template <Codes kCodes>
static MOE_LORA_INLINE void look_up_bytes(const uint8_t* codes, const SizeTable& table, bf16* out) {
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(char(128));
    const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(codes));
    __m512i size = code;  // permutations read the low 7 bits
    __mmask64 is_some = ~__mmask64(0);
    if (kCodes == kInt8) size = _mm512_abs_epi8(code), is_some = _mm512_test_epi8_mask(code, code);
    const __m512i low = _mm512_maskz_permutex2var_epi8(is_some, table.low[0], size, table.low[1]);
    const __m512i high = _mm512_maskz_permutex2var_epi8(is_some, table.high[0], size, table.high[1]);
    const __m512i with_sign = _mm512_ternarylogic_epi32(high, code, sign, 0x78);  // high ^ (code & sign)
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, with_sign));
    _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi8(low, with_sign));
}

// False if a row needs the plain way; nothing of `to` counts then.
template <Codes kCodes>
static inline bool unpack_bytes(const PackedTile& t, bf16* to) {
    constexpr uint64_t kTables = 64;
    static thread_local SizeTable own[kTables];
    SizeTable* const tables = own;  // a thread's address is found once
    const int64_t span = t.groups == 1 ? t.width : t.group;
    if (t.width % 64 || span % 64) return false;
    const uint8_t* const first = static_cast<const uint8_t*>(t.w);
    const char* ahead = static_cast<const char*>(t.next);
    for (int64_t n = 0; n < t.num_w; n++)
        for (int64_t k = 0; k < t.width; k += span, ahead += span) {
            const int64_t count = t.width - k < span ? t.width - k : span;
            const float* const scale = t.scale + n * t.groups + k / span;
            // Any slot is right. This one is the row's own, or the group's.
            const uint64_t place = uint64_t(scale) / sizeof(float);
            SizeTable& table = tables[(t.groups == 1 ? place : place % uint64_t(t.groups)) % kTables];
            if (!table.is_for(*scale)) {
                // A table costs more than it saves where a group has a scale per row.
                if (t.groups > 1 && (n + 1 == t.num_w || scale[t.groups] != *scale)) return false;
                table.fill(kCodes == kFp8 ? kFp8Values.of : kInt8Sizes.of, *scale);
            }
            const SizeTable held = table;  // in registers
            for (int64_t i = 0; i < count; i += 64) {
                __builtin_prefetch(ahead + i, 0, 2);
                look_up_bytes<kCodes>(first + n * t.row_bytes + k + i, held, to + n * t.width + k + i);
            }
        }
    return true;
}

// The 16 values of a group.
static inline __m512i nibble_values(const PackedTile& t, const float* scale) {
    __m512 v = _mm512_loadu_ps(t.values);
    if (t.zero) v = _mm512_sub_ps(v, _mm512_set1_ps(scale[t.zero]));
    v = _mm512_mul_ps(v, _mm512_set1_ps(*scale));
    return (__m512i)_mm512_cvtne2ps_pbh(v, v);
}

// False for groups that no whole 64 codes, or two to them, make.
static inline bool unpack_nibbles(const PackedTile& t, bf16* to) {
    if (t.width % 64 || (t.groups > 1 && t.group != 32 && t.group % 64)) return false;
    const bool halves = t.groups > 1 && t.group == 32;
    const int64_t span = t.groups == 1 ? t.width : halves ? 64 : t.group;
    const char* ahead = static_cast<const char*>(t.next);
    for (int64_t n = 0; n < t.num_w; n++) {
        const uint8_t* codes = static_cast<const uint8_t*>(t.w) + n * t.row_bytes;
        const float* scale = t.scale + n * t.groups;
        bf16* out = to + n * t.width;
        for (const bf16* const end = out + t.width; out < end;) {
            const __m512i low = nibble_values(t, scale);
            const __m512i high = halves ? nibble_values(t, ++scale) : low;
            const bf16* const last = end - out < span ? end : out + span;
            for (scale++; out < last; out += 64, codes += 32, ahead += 32) {
                if (uint64_t(ahead) & 32) __builtin_prefetch(ahead, 0, 2);
                const __m512i wide = _mm512_cvtepu8_epi16(_mm256_loadu_si256((const __m256i*)codes));
                _mm512_storeu_si512(out, _mm512_permutexvar_epi16(wide, low));
                _mm512_storeu_si512(out + 32, _mm512_permutexvar_epi16(_mm512_srli_epi16(wide, 4), high));
            }
        }
    }
    return true;
}

template <Codes kCodes>
static inline bool unpack_quickly(const PackedTile& t, bf16* to) {
    if constexpr (kCodes == kNibbles)
        return unpack_nibbles(t, to);
    else if constexpr (kCodes == kInt8Zero)
        return false;
    else
        return unpack_bytes<kCodes>(t, to);
}
