// SPDX-License-Identifier: Apache-2.0
// As vec_avx512.h, with dot products of bf16 (vdpbf16ps: 32 pairs into 16 fp32 lanes) and of bytes (vpdpbusd: 64 into
// 16).
#include "vec_avx512.h"

struct Avx512Bf16 : Avx512 {
    using Avx512::store;
    using Avx512::store_part;
    static inline __m256i to_half(V value) { return (__m256i)_mm512_cvtneps_pbh(value); }
    static inline V round_bf16(V value) { return from_half(to_half(value)); }
    static inline void store(bf16* p, V value) { _mm256_storeu_si256((__m256i*)p, to_half(value)); }
    static inline void store_part(bf16* p, V value, int count) {
        _mm256_mask_storeu_epi16(p, mask(count), to_half(value));
    }

    // In assembler: around the intrinsic GCC 12 copies each sum once per step.
    static inline Int dot_bytes(Int x, Int w, Int acc) {
        asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(x), "v"(w));
        return acc;
    }
    static inline Int sum_bytes(Int w, Int acc) { return dot_bytes(_mm512_set1_epi8(1), w, acc); }

    template <class T, class Unused = void>
    struct Dot : Avx512::Dot<T> {};
    template <class Unused>
    struct Dot<bf16, Unused> : Avx512::Dot<bf16> {
        using Raw = __m512i;
        static inline Raw pack(const V* v) { return (Raw)_mm512_cvtne2ps_pbh(v[1], v[0]); }
        static inline void fill(Raw& table, const V* v) { table = (Raw)_mm512_cvtne2ps_pbh(v[0], v[0]); }
        static inline V dot(Raw x, Raw w, V acc) { return _mm512_dpbf16_ps(acc, (__m512bh)x, (__m512bh)w); }
    };
};
