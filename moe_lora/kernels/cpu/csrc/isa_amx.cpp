// SPDX-License-Identifier: Apache-2.0
// AMX tile registers for the dots of bf16, over plain and quantised weights; the rest is avx512_bf16's.
// Written without an AMX processor: tests use the emulation, and these instructions run first in the self-test of
// isa.cpp, against a plain loop. Nothing here was timed.
// Nothing of the C++ standard library may be used below: the linker could hand its copy to other sources.
#include <cstdlib>

#include "tiles.h"

#ifdef MOE_LORA_AMX
#include "target.h"
MOE_LORA_TARGET("amx-tile,amx-bf16,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16,avx512vnni,avx2,fma")

namespace {
#include "tiles.inl"
#include "amx.inl"

// In assembler: the compiler's intrinsics are macros with literal register numbers only.
struct AmxTiles {
    static inline const IsaTable& base() { return *avx512_bf16_table(); }
    static inline void begin() {
        struct alignas(64) {
            uint8_t palette = 1, start_row = 0, reserved[14] = {};
            uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
            uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
        } const config;
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
};
}  // namespace

const IsaTable* amx_bf16_table() {
    static const IsaTable table = with_tile_dots<AmxTiles>("amx_bf16");
    return &table;
}
MOE_LORA_TARGET_END
#endif
