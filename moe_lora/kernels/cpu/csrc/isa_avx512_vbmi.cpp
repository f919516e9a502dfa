// SPDX-License-Identifier: Apache-2.0
// avx512_bf16 with permutations of bytes: codes of 8 bits beside many rows of x are unpacked by tables.
// Nothing of the C++ standard library may be used below: the linker could hand its copy to other sources.
#include <cstdlib>

#include "tiles.h"

#ifdef MOE_LORA_X86
#include "target.h"
MOE_LORA_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx512vbmi,avx2,fma")

namespace {
#include "tiles.inl"
#include "vec_avx512_bf16.h"
#include "unpack_amx.inl"

// As ByteWeights, 64 codes at a time.
template <Codes kCodes>
struct TabledBytes {
    using I = Avx512Bf16;
    using T = bf16;
    using D = I::Dot<bf16>;
    static constexpr int kSpan = 64, kBits = 8, kTables = 64;

    template <int R>
    struct Rows : PackedRows<TabledBytes, R> {
        const SizeTable* table;  // of the first row's group
        int64_t apart;           // tables from row to row
        __mmask64 lost = 0;

        MOE_LORA_INLINE Rows(const PackedTile& t, int64_t n) : PackedRows<TabledBytes, R>(t, n), apart(t.groups) {
            static thread_local SizeTable tables[kTables];
            SizeTable* const own = tables;
            for (int64_t i = 0; i < R * t.groups; i++)
                if (!own[i].is_for(this->scale[i]))
                    own[i].fill(kCodes == kFp8 ? kFp8Values.of : kInt8Sizes.of, this->scale[i]);
            table = own;
            this->next = this->group;
        }
        bool has_failed() const { return lost != 0; }
        MOE_LORA_INLINE void open(int64_t k) {
            if (k < this->next) return;
            table++;
            this->next += this->group;
        }
        template <int Step>
        MOE_LORA_INLINE void put(int j, int64_t k, T* out) {
            if (Step == 1) return;
            const SizeTable& of = table[j * apart];
            const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), sign = _mm512_set1_epi8(char(128));
            const __m512i code = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(this->w + j * this->row_bytes + k));
            __m512i size = code;
            if (kCodes == kInt8) {
                size = _mm512_abs_epi8(code);
                lost |= _mm512_movepi8_mask(size);
            }
            const __m512i low = _mm512_permutex2var_epi8(of.low[0], size, of.low[1]);
            const __m512i high = _mm512_permutex2var_epi8(of.high[0], size, of.high[1]);
            const __m512i with_sign = _mm512_ternarylogic_epi32(high, code, sign, 0x78);
            _mm512_storeu_si512(out, _mm512_unpacklo_epi8(low, with_sign));
            _mm512_storeu_si512(out + 32, _mm512_unpackhi_epi8(low, with_sign));
        }
    };
};

template <Codes kCodes>
void tabled_tile(const PackedTile& t) {
    using Plain = ByteWeights<Avx512Bf16, bf16, kCodes>;
    // A table costs more than it saves where a group has a scale per row.
    const bool shared = t.num_w > 1 && t.group % 64 == 0 && t.scale[t.groups] == t.scale[0];
    if (t.groups == 1 || (shared && 4 * t.groups <= TabledBytes<kCodes>::kTables))
        many_tile<TabledBytes<kCodes>, Plain>(t);
    else
        many_tile<Plain>(t);
}
}  // namespace

const IsaTable* avx512_vbmi_table() {
    static const IsaTable table = [] {
        IsaTable table = *avx512_bf16_table();
        table.dot_many[kInt8].run = tabled_tile<kInt8>;
        table.dot_many[kFp8].run = tabled_tile<kFp8>;
        return table;
    }();
    return &table;
}
MOE_LORA_TARGET_END
#endif
