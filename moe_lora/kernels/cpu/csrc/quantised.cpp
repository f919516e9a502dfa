// Linear layers over quantised weights.
//
// Weights only: a block of weight rows is unpacked where the cache holds it, and the dots of linear.cpp run over it,
// so that a result has the bits of the same layer over the dequantised weights. Dynamic: x is quantised too.
#include <cstdlib>
#include <memory>

#include "kernels.h"
#include "schedule.h"
#include "segments.h"
#include "tiles.h"

namespace {

// Unpacked weight rows beside few rows of x, and beside many: shares of the first and of the second level cache.
constexpr int64_t kFewRows = 12, kFewRowsBytes = 24 << 10, kManyRowsBytes = 128 << 10;

// Memory of one thread that grows, aligned to cache lines.
void* thread_buffer(int64_t bytes) {
    struct Free {
        void operator()(void* p) const { free(p); }
    };
    static thread_local std::unique_ptr<void, Free> buffer;
    static thread_local int64_t held = 0;
    if (bytes > held) {
        buffer.reset(aligned_alloc(64, round_up(bytes, 64)));
        if (!buffer) abort();
        held = bytes;
    }
    return buffer.get();
}

}  // namespace

int32_t moe_lora_unpacked_linear(int32_t bits, int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                 int64_t x_rows, const void* data, const void* scale, int64_t group, const void* bias,
                                 const int32_t* ids, int64_t tokens, int64_t top_k, int64_t num_experts, void* out,
                                 int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype), row_bytes = width * size;
    const int64_t data_bytes = bits == 8 ? width : (width + 63) / 64 * 32;
    const int64_t scale_bytes = bits == 8 ? int64_t(sizeof(float)) : width / group * size;
    GroupedRows grouped;
    const int32_t refusal = group_rows(ids, tokens, top_k, x_rows, num_experts, out, num_out * size, grouped);
    if (refusal) return refusal;
    std::vector<const void*> x_list(grouped.x.size());
    for (size_t i = 0; i < x_list.size(); i++) x_list[i] = static_cast<const char*>(x) + grouped.x[i] * x_stride * size;
    threads = useful_threads(threads, int64_t(grouped.segments.size()) * num_out * row_bytes);
    const std::vector<LinearTask> tasks = cut_segments(grouped.segments, num_out, data_bytes, threads, 4);
    const bool f32 = dtype == kF32;
    const auto dot = f32 ? isa().dot_f32 : isa().dot_bf16;
    const auto unpack = bits == 8 ? (f32 ? isa().unpack_int8_f32 : isa().unpack_int8_bf16)
                                  : (f32 ? isa().unpack_int4_f32 : isa().unpack_int4_bf16);
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) {
        const LinearTask& t = tasks[i];
        const int64_t bytes = t.rows <= kFewRows ? kFewRowsBytes : kManyRowsBytes;
        const int64_t block = std::max<int64_t>(4, bytes / std::max<int64_t>(1, row_bytes) / 4 * 4);
        void* const unpacked = thread_buffer(block * row_bytes);
        for (int64_t n = t.n; n < t.n + t.num; n += block) {
            const int64_t num = std::min(block, t.n + t.num - n), first = t.segment->expert * num_out + n;
            unpack({static_cast<const char*>(data) + first * data_bytes,
                    static_cast<const char*>(scale) + first * scale_bytes, unpacked, num, width, group,
                    num * data_bytes});
            const char* block_bias = bias ? static_cast<const char*>(bias) + first * size : nullptr;
            dot({&x_list[t.row], unpacked, block_bias, &grouped.out[t.row], t.rows, num, width, n, nullptr});
        }
    });
    return 0;
}

int32_t moe_lora_dynamic_linear(int32_t bits, int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                int64_t x_rows, const void* data, const void* scale, int64_t group, const void* bias,
                                const int32_t* ids, int64_t tokens, int64_t top_k, int64_t num_experts, void* out,
                                int64_t num_out, int64_t width) {
    constexpr int64_t kBlockOut = 16, kXRowsPerTask = 4;
    const int64_t size = item_size(dtype), padded = round_up(width, 64), held_out = round_up(num_out, kBlockOut);
    const int64_t row_bytes = bits == 8 ? round_up(width, 4) : width / 2;
    const int64_t scale_bytes = bits == 8 ? int64_t(sizeof(float)) : width / group * size;
    GroupedRows grouped;
    const int32_t refusal = group_rows(ids, tokens, top_k, x_rows, num_experts, out, num_out * size, grouped);
    if (refusal) return refusal;
    threads = useful_threads(threads, int64_t(grouped.segments.size()) * num_out * row_bytes);
    const bool f32 = dtype == kF32;
    std::unique_ptr<uint8_t[]> u(new uint8_t[x_rows * padded]);  // what lies behind a row meets weights of zero
    std::vector<float> x_scale(x_rows);
    std::vector<int32_t> zero(x_rows);
    const auto quantise = f32 ? isa().quantise_f32 : isa().quantise_bf16;
    run_tasks((x_rows + kXRowsPerTask - 1) / kXRowsPerTask, threads, [&](int64_t i, int64_t) {
        for (int64_t r = i * kXRowsPerTask; r < std::min(x_rows, (i + 1) * kXRowsPerTask); r++)
            quantise(static_cast<const char*>(x) + r * x_stride * size, width, bits == 4, &u[r * padded], &x_scale[r],
                     &zero[r]);
    });
    const std::vector<LinearTask> tasks = cut_segments(grouped.segments, num_out, row_bytes, threads, 2 * kBlockOut);
    const auto dynamic = bits == 8 ? (f32 ? isa().dynamic_int8_f32 : isa().dynamic_int8_bf16)
                                   : (f32 ? isa().dynamic_int4_f32 : isa().dynamic_int4_bf16);
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) {
        const LinearTask& t = tasks[i];
        const int64_t first = t.segment->expert * held_out + t.n;
        const char* task_bias =
            bias ? static_cast<const char*>(bias) + (t.segment->expert * num_out + t.n) * size : nullptr;
        dynamic({&grouped.x[t.row], u.get(), x_scale.data(), zero.data(),
                 static_cast<const char*>(data) + first * row_bytes,
                 static_cast<const char*>(scale) + first * scale_bytes, task_bias, &grouped.out[t.row], t.rows, t.num,
                 width, padded, group, t.n});
    });
    return 0;
}
