// SPDX-License-Identifier: Apache-2.0
// Built for the instruction set of its name; used only if isa.cpp finds the set.
// Nothing of the standard library may be used below: the linker could hand its copy to other sources.
#include "tiles.h"

#ifdef MOE_LORA_X86
#include "target.h"
MOE_LORA_TARGET("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")

namespace {
#include "tiles.inl"
#include "vec_avx512.h"
}  // namespace

const IsaTable* avx512_table() {
    static const IsaTable table = make_table<Avx512>("avx512");
    return &table;
}
MOE_LORA_TARGET_END
#endif
