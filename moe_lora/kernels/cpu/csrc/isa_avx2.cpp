// SPDX-License-Identifier: Apache-2.0
// Built for the instruction set of its name; used only if isa.cpp finds the set.
// Nothing of the standard library may be used below: the linker could hand its copy to other sources.
#include "tiles.h"

#ifdef MOE_LORA_X86
#include "target.h"
MOE_LORA_TARGET("avx2,fma,f16c")

namespace {
#include "tiles.inl"
#include "vec_avx2.h"
#include "unpack_avx2.inl"
}  // namespace

const IsaTable* avx2_table() {
    static const IsaTable table = [] {
        IsaTable table = make_table<Avx2>("avx2");
        table.dot_many[kFp8] = {cached_tile<Fp8Codes>, 1, INT64_MAX, kManyColumns};
        table.dot_many[kNibbles] = {nibbles_tile, 1, INT64_MAX, kManyColumns};
        return table;
    }();
    return &table;
}
MOE_LORA_TARGET_END
#endif
