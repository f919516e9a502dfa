// SPDX-License-Identifier: Apache-2.0
// The driver of the AMX path over plain loops, for tests on any processor. Never chosen by default.
#include <cstdlib>

#include "tiles.h"

namespace {
#include "tiles.inl"
#include "vec_portable.h"
#include "amx.inl"
#include "amx_dynamic.inl"

struct EmulatedTiles {
    using Vectors = Portable;
    static inline const IsaTable& base() { return *portable_table(); }
    template <Codes kCodes>
    static inline void unpack(const PackedTile& t, bf16* to) {
        base().unpack[kCodes][kBf16](t, to);
    }
    static inline void pack(const void* const* rows, int64_t count, int64_t k, int64_t depth, uint32_t* to,
                            int64_t apart) {
        memset(to, 0, 16 * apart * sizeof(uint32_t));
        for (int64_t i = 0; i < count; i++)
            for (int64_t d = 0; d < depth; d++)
                memcpy(reinterpret_cast<bf16*>(to + d / 2 * apart + i) + d % 2,
                       static_cast<const bf16*>(rows[i]) + k + d, sizeof(bf16));
    }
    static inline char* reg(int number) {
        alignas(64) static thread_local char all[8][1024];
        return all[number];
    }
    static inline float element(const char* tile, int64_t row, int64_t column) {
        bf16 value;
        memcpy(&value, tile + row * 64 + column * 2, 2);
        return widen(value);
    }

    static inline void begin(int64_t) {}
    static inline void end() {}
    template <int R>
    static inline void zero() {
        memset(reg(R), 0, 1024);
    }
    template <int R>
    static inline void load(const void* p, int64_t stride) {
        for (int64_t i = 0; i < 16; i++) memcpy(reg(R) + i * 64, static_cast<const char*>(p) + i * stride, 64);
    }
    template <int R>
    static inline void store(void* p, int64_t stride) {
        for (int64_t i = 0; i < 16; i++) memcpy(static_cast<char*>(p) + i * stride, reg(R) + i * 64, 64);
    }
    template <int C, int A, int B>
    static inline void dot() {
        float c[16][16];
        memcpy(c, reg(C), sizeof(c));
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 16; k++) {
                const float even = element(reg(A), m, 2 * k), odd = element(reg(A), m, 2 * k + 1);
                for (int n = 0; n < 16; n++)
                    c[m][n] += even * element(reg(B), k, 2 * n) + odd * element(reg(B), k, 2 * n + 1);
            }
        memcpy(reg(C), c, sizeof(c));
    }
    template <int C, int A, int B>
    static inline void dot_bytes() {
        int32_t c[16][16];
        memcpy(c, reg(C), sizeof(c));
        const int8_t *const a = reinterpret_cast<int8_t*>(reg(A)), *const b = reinterpret_cast<int8_t*>(reg(B));
        for (int m = 0; m < 16; m++)
            for (int k = 0; k < 64; k++)
                for (int n = 0; n < 16; n++) c[m][n] += a[m * 64 + k] * b[k / 4 * 64 + n * 4 + k % 4];
        memcpy(reg(C), c, sizeof(c));
    }
};
}  // namespace

const IsaTable* amx_emulated_table() {
    static const IsaTable table = with_dynamic_tiles<EmulatedTiles>(with_tile_dots<EmulatedTiles>("amx_emulated"));
    return &table;
}
