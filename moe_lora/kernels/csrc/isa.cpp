// Choice of the instruction set at run time.
#include <cstdlib>
#include <cstring>
#include <initializer_list>

#include "kernels.h"
#include "tiles.h"

namespace {

bool has_cpu_support(const char* name) {
#ifdef MOE_LORA_X86
    __builtin_cpu_init();
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const bool avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                        __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
    if (!strcmp(name, "avx2")) return avx2;
    if (!strcmp(name, "avx512")) return avx512;
    if (!strcmp(name, "avx512_bf16")) return avx512 && __builtin_cpu_supports("avx512bf16");
#endif
    return !strcmp(name, "portable");
}

const IsaTable* table_of(const char* name) {
#ifdef MOE_LORA_X86
    if (!strcmp(name, "avx512_bf16")) return avx512_bf16_table();
    if (!strcmp(name, "avx512")) return avx512_table();
    if (!strcmp(name, "avx2")) return avx2_table();
#endif
    return portable_table();
}

const IsaTable* current = nullptr;

}  // namespace

int32_t moe_lora_set_isa(const char* name) {
    if (!has_cpu_support(name)) return -1;
    current = table_of(name);
    return 0;
}

const IsaTable& isa() {
    if (!current)
        for (const char* name : {"avx512_bf16", "avx512", "avx2", "portable"})
            if (moe_lora_set_isa(name) == 0) break;
    return *current;
}

const char* moe_lora_isa() { return isa().name; }
