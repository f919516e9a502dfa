// SPDX-License-Identifier: Apache-2.0
// AMX tile registers for the dots of bf16, over plain and quantised weights, and of bytes; the rest is avx512_bf16's.
// The unit and the vector ports do not work at once, so what unpacks weights beside it is short (unpack_vbmi.inl).
// Nothing of the C++ standard library may be used below: the linker could hand its copy to other sources.
#include <cstdlib>

#include "tiles.h"

#ifdef MOE_LORA_AMX
#include "target.h"
MOE_LORA_TARGET("amx-tile,amx-bf16,amx-int8,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma")

namespace {
#include "tiles.inl"
#include "vec_avx512_bf16.h"
#include "amx.inl"
#include "amx_dynamic.inl"
#include "unpack_vbmi.inl"

// In assembler: the compiler's intrinsics are macros with literal register numbers only.
struct AmxTiles {
    using Vectors = Avx512Bf16;
    static inline const IsaTable& base() { return *avx512_bf16_table(); }
    template <Codes kCodes>
    static inline void unpack(const PackedTile& t, bf16* to) {
        if (!unpack_quickly<kCodes>(t, to)) base().unpack[kCodes][kBf16](t, to);
    }
    // `depth` elements of up to 16 rows from k on, by pairs: word [pair][row], `apart` to a pair, padded with zeros.
    static inline void pack(const void* const* rows, int64_t count, int64_t k, int64_t depth, uint32_t* to,
                            int64_t apart) {
        __m512i a[16], b[16];
        const __mmask32 elements = depth >= 32 ? ~__mmask32(0) : (__mmask32(1) << depth) - 1;
        MOE_LORA_UNROLL
        for (int i = 0; i < 16; i++)
            a[i] = i < count ? _mm512_maskz_loadu_epi16(elements, static_cast<const bf16*>(rows[i]) + k)
                             : _mm512_setzero_si512();
        MOE_LORA_UNROLL
        for (int i = 0; i < 16; i += 2)
            b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]), b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
        MOE_LORA_UNROLL
        for (int i = 0; i < 16; i += 4) {  // pair 4 q + p of rows i to i + 3, at a[i + p], lane q
            a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]), a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
            a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]), a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
        }
        MOE_LORA_UNROLL
        for (int p = 0; p < 4; p++) {
            const __m512i even0 = _mm512_shuffle_i32x4(a[p], a[4 + p], 0x88);
            const __m512i even1 = _mm512_shuffle_i32x4(a[8 + p], a[12 + p], 0x88);
            const __m512i odd0 = _mm512_shuffle_i32x4(a[p], a[4 + p], 0xdd);
            const __m512i odd1 = _mm512_shuffle_i32x4(a[8 + p], a[12 + p], 0xdd);
            b[p] = _mm512_shuffle_i32x4(even0, even1, 0x88), b[8 + p] = _mm512_shuffle_i32x4(even0, even1, 0xdd);
            b[4 + p] = _mm512_shuffle_i32x4(odd0, odd1, 0x88), b[12 + p] = _mm512_shuffle_i32x4(odd0, odd1, 0xdd);
        }
        const __mmask16 held = __mmask16((1u << apart) - 1);
        MOE_LORA_UNROLL
        for (int i = 0; i < 16; i++) _mm512_mask_storeu_epi32(to + i * apart, held, b[i]);
    }
    // x and sums have that many columns of 32 bits, 1 to 16.
    static inline void begin(int64_t columns) {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16];
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } config;
        for (int i = 0; i < 16; i++) config.row_bytes[i] = i == 4 || i == 5 ? 64 : i < 8 ? uint16_t(4 * columns) : 0;
        asm volatile("ldtilecfg %0" ::"m"(config));
    }
    static inline void end() { asm volatile("tilerelease"); }
    template <int R>
    static inline void zero() {
        asm volatile("tilezero %%tmm%c0" ::"i"(R));
    }
    template <int R>
    static inline void load(const void* p, int64_t stride) {
        asm volatile("tileloadd (%0,%1,1), %%tmm%c2" ::"r"(p), "r"(stride), "i"(R) : "memory");
    }
    template <int R>
    static inline void store(void* p, int64_t stride) {
        asm volatile("tilestored %%tmm%c2, (%0,%1,1)" ::"r"(p), "r"(stride), "i"(R) : "memory");
    }
    template <int C, int A, int B>
    static inline void dot() {
        asm volatile("tdpbf16ps %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
    template <int C, int A, int B>
    static inline void dot_bytes() {
        asm volatile("tdpbssd %%tmm%c2, %%tmm%c1, %%tmm%c0" ::"i"(C), "i"(A), "i"(B));
    }
};
}  // namespace

const IsaTable* amx_bf16_table() {
    static const IsaTable table = with_dynamic_tiles<AmxTiles>(with_tile_dots<AmxTiles>("amx_bf16"));
    return &table;
}
MOE_LORA_TARGET_END
#endif
