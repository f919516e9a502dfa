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
#include "unpack_vbmi.inl"

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

        MOE_LORA_INLINE Rows(const PackedTile& t, int64_t n) : PackedRows<TabledBytes, R>(t, n), apart(t.groups) {
            static thread_local SizeTable tables[kTables];
            SizeTable* const own = tables;
            for (int64_t i = 0; i < R * t.groups; i++)
                if (!own[i].is_for(this->scale[i]))
                    own[i].fill(kCodes == kFp8 ? kFp8Values.of : kInt8Sizes.of, this->scale[i]);
            table = own;
            this->next = this->group;
        }
        MOE_LORA_INLINE void open(int64_t k) {
            if (k < this->next) return;
            table++;
            this->next += this->group;
        }
        template <int Step>
        MOE_LORA_INLINE void put(int j, int64_t k, T* out) const {
            if (Step == 0) look_up_bytes<kCodes>(this->w + j * this->row_bytes + k, table[j * apart], out);
        }
    };
};

template <Codes kCodes>
void tabled_tile(const PackedTile& t) {
    // A table costs more than it saves where a group has a scale per row.
    const bool shared = t.num_w > 1 && t.group % 64 == 0 && t.scale[t.groups] == t.scale[0];
    if (t.groups == 1 || (shared && 4 * t.groups <= TabledBytes<kCodes>::kTables))
        many_tile<TabledBytes<kCodes>>(t);
    else
        many_tile<ByteWeights<Avx512Bf16, bf16, kCodes>>(t);
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
