// SPDX-License-Identifier: Apache-2.0
// AVX-512 with dot products of bf16 and of bytes.
// Nothing of the standard library may be used below: the linker could hand its copy to other sources.
#include "tiles.h"

#ifdef MOE_LORA_X86
#include "target.h"
MOE_LORA_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")

namespace {
#include "tiles.inl"
#include "vec_avx512_bf16.h"
}  // namespace

const IsaTable* avx512_bf16_table() {
    static const IsaTable table = make_table<Avx512Bf16>("avx512_bf16");
    return &table;
}
MOE_LORA_TARGET_END
#endif
