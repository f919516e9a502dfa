// SPDX-License-Identifier: Apache-2.0
// Dense and expert-grouped linear layers: rows grouped by weight matrix, each matrix read once.
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "segments.h"
#include "tiles.h"

int32_t moe_lora_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, const void* weight,
                        const void* bias, void* out, int64_t rows, int64_t num_out, int64_t width) {
    return moe_lora_expert_linear(dtype, threads, x, x_stride, rows, weight, bias, nullptr, rows, 1, 1, out, num_out,
                                  width);
}

int32_t moe_lora_expert_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, int64_t x_rows,
                               const void* weight, const void* bias, const int32_t* ids, int64_t tokens,
                               int64_t top_k, int64_t num_experts, void* out, int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype), row_bytes = width * size;
    GroupedRows grouped;
    const int32_t refusal = group_rows(ids, tokens, top_k, x_rows, num_experts, out, num_out * size, grouped);
    if (refusal) return refusal;
    std::vector<const void*> x_list(grouped.x.size());
    for (size_t i = 0; i < x_list.size(); i++) x_list[i] = static_cast<const char*>(x) + grouped.x[i] * x_stride * size;
    threads = useful_threads(threads, int64_t(grouped.segments.size()) * num_out * row_bytes);
    const std::vector<LinearTask> tasks = cut_segments(grouped.segments, num_out, row_bytes, threads, 4);
    const auto dot = dtype == kF32 ? isa().dot_f32 : isa().dot_bf16;
    const auto first = [&](const LinearTask& t) { return t.segment->expert * num_out + t.n; };
    const auto weight_of = [&](const LinearTask& t) { return static_cast<const char*>(weight) + first(t) * row_bytes; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const LinearTask& t = tasks[i];
        const char* task_bias = bias ? static_cast<const char*>(bias) + first(t) * size : nullptr;
        const char* next = following < 0 ? nullptr : weight_of(tasks[following]);
        dot({&x_list[t.row], weight_of(t), task_bias, &grouped.out[t.row], t.rows, t.num, width, t.n, next});
    });
    return 0;
}
