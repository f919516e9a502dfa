// LoRA shrink and expand: each adapter matrix is read once per step, by all rows that share it.
#include "kernels.h"
#include "lora_plan.h"
#include "schedule.h"
#include "tiles.h"

namespace {

// Weight rows (shrink) or columns (expand) [at, at + num) of a matrix against `rows` rows of a segment.
struct Task {
    const LoraSegment* segment;
    const LoraMatrix* matrix;
    int64_t row, rows, at, num;
};

constexpr int64_t kRowsPerTask = 96;

// Cuts the extent of each matrix (`unit_bytes` of memory per unit) in pieces of about equal work.
template <class Extent, class UnitBytes>
std::vector<Task> cut(const LoraPlan& plan, int& threads, int64_t multiple, const Extent& extent,
                      const UnitBytes& unit_bytes) {
    int64_t work = 0;
    const auto weight = [](int64_t rows) { return 1 + rows / 8; };
    for (const LoraSegment& s : plan.segments)
        for (int64_t m = s.first_matrix; m < s.end_matrix; m++)
            work += extent(plan.matrices[m]) * unit_bytes(plan.matrices[m]) * weight(s.end - s.begin);
    threads = useful_threads(threads, work);
    const int64_t task_work = std::clamp<int64_t>(work / (threads * 8), 8 << 10, 1 << 20);
    std::vector<Task> tasks;
    for (const LoraSegment& s : plan.segments)
        for (int64_t m = s.first_matrix; m < s.end_matrix; m++) {
            const LoraMatrix& matrix = plan.matrices[m];
            for (int64_t row = s.begin; row < s.end; row += kRowsPerTask) {
                const int64_t rows = std::min(kRowsPerTask, s.end - row);
                const int64_t units = task_work / (unit_bytes(matrix) * weight(rows));
                const int64_t step = std::max(multiple, units / multiple * multiple);
                for (int64_t at = 0; at < extent(matrix); at += step)
                    tasks.push_back({&s, &matrix, row, rows, at, std::min(step, extent(matrix) - at)});
            }
        }
    return tasks;
}

}  // namespace

int32_t moe_lora_shrink(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, int64_t x_rows,
                        const int32_t* ids, int64_t tokens, int64_t top_k, const LoraSite* site, int64_t layer,
                        const int32_t* row_slot, const LoraSlots* slots, const void* arena, float* workspace,
                        int64_t workspace_floats) {
    LoraPlan plan;
    const int32_t refusal =
        plan_lora({ids, row_slot, tokens, top_k}, *site, layer, *slots, static_cast<const char*>(arena), plan);
    if (refusal) return refusal;
    if (plan.workspace_floats > workspace_floats) return kWorkspaceTooSmall;
    const int64_t size = item_size(dtype), width = site->in_features, row_bytes = width * size;
    const int64_t per_x = x_rows == tokens * top_k ? 1 : top_k;
    std::vector<const void*> x_list(plan.rows.size());
    std::vector<void*> h_list(plan.rows.size());
    for (const LoraSegment& s : plan.segments)
        for (int64_t i = s.begin; i < s.end; i++) {
            x_list[i] = static_cast<const char*>(x) + plan.rows[i] / per_x * x_stride * size;
            h_list[i] = workspace + s.workspace + (i - s.begin) * s.stride;
        }
    const std::vector<Task> tasks =
        cut(plan, threads, 4, [](const LoraMatrix& m) { return m.a ? m.lora_rank : 0; },
            [&](const LoraMatrix&) { return row_bytes; });
    const auto dot = dtype == kF32 ? isa().dot_f32 : isa().dot_bf16_to_f32;
    const auto a_of = [&](const Task& t) { return t.matrix->a + t.at * row_bytes; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const Task& t = tasks[i];
        const char* next = following < 0 ? nullptr : a_of(tasks[following]);
        dot({&x_list[t.row], a_of(t), nullptr, &h_list[t.row], t.rows, t.num, width, t.matrix->h + t.at, next});
    });
    return 0;
}

int32_t moe_lora_expand(int32_t dtype, int32_t threads, const float* workspace, int64_t workspace_floats,
                        const int32_t* ids, int64_t tokens, int64_t top_k, const LoraSite* site, int64_t layer,
                        const int32_t* row_slot, const LoraSlots* slots, const void* arena, void* y,
                        int64_t y_stride) {
    LoraPlan plan;
    const int32_t refusal =
        plan_lora({ids, row_slot, tokens, top_k}, *site, layer, *slots, static_cast<const char*>(arena), plan);
    if (refusal) return refusal;
    if (plan.workspace_floats > workspace_floats) return kWorkspaceTooSmall;
    const int64_t size = item_size(dtype);
    const std::vector<Task> tasks = cut(plan, threads, 64, [](const LoraMatrix& m) { return m.out_features; },
                                        [&](const LoraMatrix& m) { return m.lora_rank * size; });
    const auto sum = dtype == kF32 ? isa().sum_f32 : isa().sum_bf16;
    const auto b_of = [&](const Task& t) { return t.matrix->b + t.at * size; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const Task& t = tasks[i];
        const Task& after = tasks[following < 0 ? i : following];
        const LoraMatrix& matrix = *t.matrix;
        const LoraSegment& s = *t.segment;
        void* y_list[kRowsPerTask];
        for (int64_t r = 0; r < t.rows; r++)
            y_list[r] = static_cast<char*>(y) + (plan.rows[t.row + r] * y_stride + matrix.column + t.at) * size;
        const float* h = workspace + s.workspace + (t.row - s.begin) * s.stride + matrix.h;
        sum({h, b_of(t), y_list, t.rows, matrix.lora_rank, t.num, s.stride, matrix.out_features, matrix.scale,
             following < 0 ? nullptr : b_of(after), after.matrix->out_features});
    });
    return 0;
}
