// SPDX-License-Identifier: Apache-2.0
// Choice of the instruction set at run time.
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <initializer_list>
#include <vector>

#include "kernels.h"
#include "tiles.h"

#ifdef MOE_LORA_X86
#include <cpuid.h>
#endif
#ifdef MOE_LORA_AMX
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#ifdef MOE_LORA_X86
bool has_avx512() {
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("avx512f") &&
           __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
           __builtin_cpu_supports("avx512dq");
}

// Older compilers don't know f16c by name.
bool has_avx2() {
    unsigned a, b, c, d;
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __get_cpuid(1, &a, &b, &c, &d) &&
           (c & bit_F16C);
}

bool has_avx512_dots() { return __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"); }
#endif

bf16 sample(int64_t i) {
    const float value = float((i * 37) % 61 - 30) / 16;
    uint32_t bits;
    memcpy(&bits, &value, 4);
    return {uint16_t(bits >> 16)};  // exact: few bits
}

float widened(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

// True if the table's dots of bf16 agree with a plain loop, for whole and for partial tiles.
bool passes_self_test(const IsaTable& table, int64_t rows, int64_t num_w, int64_t width) {
    std::vector<bf16> x(rows * width), w(num_w * width);
    for (size_t i = 0; i < x.size(); i++) x[i] = sample(int64_t(i));
    for (size_t i = 0; i < w.size(); i++) w[i] = sample(int64_t(i) * 7 + 3);
    std::vector<float> out(rows * num_w);
    std::vector<const void*> x_rows(rows);
    std::vector<void*> out_rows(rows);
    for (int64_t i = 0; i < rows; i++) x_rows[i] = &x[i * width], out_rows[i] = &out[i * num_w];
    table.dot_bf16_to_f32({x_rows.data(), w.data(), nullptr, out_rows.data(), rows, num_w, width, 0, nullptr});
    for (int64_t i = 0; i < rows; i++)
        for (int64_t n = 0; n < num_w; n++) {
            double exact = 0, size = 0;
            for (int64_t k = 0; k < width; k++) {
                const double product = double(widened(x[i * width + k])) * widened(w[n * width + k]);
                exact += product, size += std::fabs(product);
            }
            if (!(std::fabs(out[i * num_w + n] - exact) <= 1e-5 * size)) return false;
        }
    return true;
}

bool passes_self_test(const IsaTable& table) {
    return passes_self_test(table, 37, 53, 130) && passes_self_test(table, 1, 32, 64);
}

// True if the table's dots over packed weights have the bits of its dots over the unpacked weights.
bool packed_dots_pass(const IsaTable& table, Codes codes, int64_t rows) {
    constexpr int64_t kWidth = 640, kGroups = 10, kNumW = 53;
    const int64_t row_bytes = codes == kNibbles ? kWidth / 2 : kWidth;
    std::vector<uint8_t> data(kNumW * row_bytes);
    for (size_t i = 0; i < data.size(); i++) data[i] = uint8_t(i * 37 % 120);
    std::vector<float> scale(2 * kNumW * kGroups), values(16);
    for (size_t i = 0; i < scale.size(); i++) scale[i] = float(1 + i % 7) / 8;
    for (int i = 0; i < 16; i++) values[i] = float(i - 8);
    std::vector<bf16> x(rows * kWidth), unpacked(kNumW * kWidth), found(rows * kNumW), expected(rows * kNumW);
    for (size_t i = 0; i < x.size(); i++) x[i] = sample(int64_t(i));
    std::vector<const void*> x_rows(rows);
    std::vector<void*> out(rows), wanted(rows);
    for (int64_t i = 0; i < rows; i++)
        x_rows[i] = &x[i * kWidth], out[i] = &found[i * kNumW], wanted[i] = &expected[i * kNumW];
    const DotTile dot{x_rows.data(), data.data(), nullptr, out.data(), rows, kNumW, kWidth, 0, nullptr};
    const PackedTile packed{dot,           scale.data(),      codes == kInt8Zero ? kNumW * kGroups : 0,
                            values.data(), kWidth / kGroups, kGroups, row_bytes, false};
    table.dot_packed[codes][kBf16].run(packed);
    table.unpack[codes][kBf16](packed, unpacked.data());
    table.dot_bf16({x_rows.data(), unpacked.data(), nullptr, wanted.data(), rows, kNumW, kWidth, 0, nullptr});
    return !memcmp(found.data(), expected.data(), found.size() * sizeof(bf16));
}

// Weights of a byte tile as its table reads them (dynamic.inl), in codes of 8 or 4 bits.
struct ByteWeights {
    bool int4;
    int64_t width, num_w;

    // A number of the range of the code.
    int32_t value(int64_t n, int64_t k) const {
        return int4 ? int32_t((n * 5 + k * 3) % 16) - 8 : int32_t((n * 53 + k * 37) % 255) - 127;
    }
    std::vector<uint8_t> packed() const {
        const int64_t depth = int4 ? 8 : 4, words = (width + depth - 1) / depth, blocks = (num_w + 15) / 16;
        std::vector<uint8_t> data(blocks * words * 64, 0);
        for (int64_t n = 0; n < num_w; n++)
            for (int64_t k = 0; k < width; k++) {
                uint8_t& byte = data[(n / 16 * words + k / depth) * 64 + n % 16 * 4 + k % 4];
                byte |= int4 ? uint8_t(value(n, k) + 8) << (k % 8 < 4 ? 0 : 4) : uint8_t(value(n, k));
            }
        return data;
    }
};

// True if the table's dots of bytes, with whole and partial tiles, are those of a plain loop. All sums are exact.
bool byte_dots_pass(const IsaTable& table, bool int4, int64_t width, int64_t group) {
    constexpr int64_t kRows = 37, kNumW = 40, kPaddedW = 48;
    const int64_t padded = (width + 63) / 64 * 64, groups = width / group;
    const ByteWeights weights{int4, width, kNumW};
    const std::vector<uint8_t> data = weights.packed();
    std::vector<uint8_t> plain(kRows * padded);
    for (size_t i = 0; i < plain.size(); i++) plain[i] = uint8_t(i * 101 % 256);
    std::vector<int64_t> places(kRows);
    std::vector<float> x_scale(kRows, 0.25f), scale(kPaddedW * groups), found(kRows * kNumW);
    std::vector<int32_t> zero(kRows);
    std::vector<void*> out(kRows);
    for (int64_t i = 0; i < kRows; i++)
        places[i] = i, zero[i] = int4 ? int32_t(120 + i) : 128, out[i] = &found[i * kNumW];
    for (size_t i = 0; i < scale.size(); i++) scale[i] = float(1 << i % 3) / 2;
    (int4 ? table.dynamic_int4_f32 : table.dynamic_int8_f32)({places.data(), plain.data(), nullptr, x_scale.data(),
        zero.data(), data.data(), scale.data(), nullptr, out.data(), kRows, kNumW, width, padded, group, 0});
    for (int64_t i = 0; i < kRows; i++)
        for (int64_t n = 0; n < kNumW; n++) {
            double exact = 0;
            for (int64_t k = 0; k < width; k++)
                exact += (plain[i * padded + k] - zero[i]) * weights.value(n, k) *
                         double(scale[(n / 16 * groups + k / group) * 16 + n % 16]);
            if (found[i * kNumW + n] != float(exact / 4)) return false;
        }
    return true;
}

bool tiles_pass_self_test(const IsaTable& table) {
    if (!passes_self_test(table)) return false;
    for (int codes = 0; codes < kNumCodes; codes++)
        for (int64_t rows : {1, 37})
            if (!packed_dots_pass(table, Codes(codes), rows)) return false;
    return byte_dots_pass(table, false, 72, 72) && byte_dots_pass(table, true, 128, 32) &&
           byte_dots_pass(table, true, 128, 128);
}

#ifdef MOE_LORA_AMX
// True if the processor has tiles, the system allows them, and results are right.
bool find_amx() {
    unsigned a, b, c, d;
    const bool in_processor =
        __get_cpuid_count(7, 0, &a, &b, &c, &d) && (d >> 22 & 1) /* amx-bf16 */ && (d >> 24 & 3) == 3 /* amx-tile, amx-int8 */;
    if (!in_processor || !has_avx512() || !has_avx512_dots() || !__builtin_cpu_supports("avx512vbmi")) return false;
    constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XTILEDATA
    if (syscall(SYS_arch_prctl, kRequestPermission, kTileData) != 0) return false;
    return tiles_pass_self_test(*amx_bf16_table());
}
#endif

// The named table; null if unknown or without support by the processor.
const IsaTable* table_of(const char* name) {
#ifdef MOE_LORA_X86
    __builtin_cpu_init();
    const bool avx512 = has_avx512();
#ifdef MOE_LORA_AMX
    static const bool amx = find_amx();
    if (!strcmp(name, "amx_bf16")) return amx ? amx_bf16_table() : nullptr;
#endif
    if (!strcmp(name, "avx512_bf16")) {
        if (!avx512 || !has_avx512_dots()) return nullptr;
        return __builtin_cpu_supports("avx512vbmi") ? avx512_vbmi_table() : avx512_bf16_table();
    }
    if (!strcmp(name, "avx512")) return avx512 ? avx512_table() : nullptr;
    if (!strcmp(name, "avx2")) return has_avx2() ? avx2_table() : nullptr;
#endif
    if (!strcmp(name, "amx_emulated"))
        return tiles_pass_self_test(*amx_emulated_table()) ? amx_emulated_table() : nullptr;
    return !strcmp(name, "portable") ? portable_table() : nullptr;
}

const IsaTable* current = nullptr;

}  // namespace

int32_t moe_lora_set_isa(const char* name) {
    const IsaTable* table = table_of(name);
    if (!table) return -1;
    current = table;
    return 0;
}

const IsaTable& isa() {
    if (!current)
        for (const char* name : {"amx_bf16", "avx512_bf16", "avx512", "avx2", "portable"})
            if (moe_lora_set_isa(name) == 0) break;
    return *current;
}

const char* moe_lora_isa() { return isa().name; }
