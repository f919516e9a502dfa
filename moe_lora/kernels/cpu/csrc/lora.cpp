// SPDX-License-Identifier: Apache-2.0
// LoRA shrink and expand over a plan: shrink's result and plan wait for expand.
#include <mutex>

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

// Growing memory, never cleared.
class Floats {
  public:
    float* at_least(int64_t count) {
        if (count > count_) data_.reset(new float[count_ = count]);
        return data_.get();
    }

  private:
    std::unique_ptr<float[]> data_;
    int64_t count_ = 0;
};

}  // namespace

struct LoraShrunk {
    LoraPlan plan;
    int32_t dtype = kF32;
    Floats workspace;
    float* h = nullptr;
    std::vector<Task> tasks;
    std::vector<const void*> x_list;
    std::vector<void*> h_list;
};

namespace {

// Consumed shrunk objects, for the next shrink: their memory is warm.
class Pool {
  public:
    LoraShrunk* take() {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.empty()) return new LoraShrunk;
        LoraShrunk* taken = idle_.back();
        idle_.pop_back();
        return taken;
    }
    void put(LoraShrunk* shrunk) {
        const std::lock_guard<std::mutex> lock(mutex_);
        if (idle_.size() < kIdle)
            idle_.push_back(shrunk);
        else
            delete shrunk;
    }

  private:
    static constexpr size_t kIdle = 4;
    std::mutex mutex_;
    std::vector<LoraShrunk*> idle_;
};

Pool& pool() {
    static Pool* const all = new Pool;  // outlives every thread that may still give one back
    return *all;
}

// Cuts the extent of each matrix (`unit_bytes` of memory per unit) in pieces of about equal work.
template <class Extent, class UnitBytes>
void cut(LoraShrunk& shrunk, int& threads, int64_t multiple, const Extent& extent, const UnitBytes& unit_bytes) {
    const LoraPlan& plan = shrunk.plan;
    int64_t work = 0;
    const auto weight = [](int64_t rows) { return 1 + rows / 8; };
    for (const LoraSegment& s : plan.segments)
        for (int64_t m = s.first_matrix; m < s.end_matrix; m++)
            work += extent(plan.matrices[m]) * unit_bytes(plan.matrices[m]) * weight(s.end - s.begin);
    threads = useful_threads(threads, work);
    const int64_t task_work = std::clamp<int64_t>(work / (threads * 8), 8 << 10, 1 << 20);
    shrunk.tasks.clear();
    for (const LoraSegment& s : plan.segments)
        for (int64_t m = s.first_matrix; m < s.end_matrix; m++) {
            const LoraMatrix& matrix = plan.matrices[m];
            for (int64_t row = s.begin; row < s.end; row += kRowsPerTask) {
                const int64_t rows = std::min(kRowsPerTask, s.end - row);
                const int64_t units = task_work / (unit_bytes(matrix) * weight(rows));
                const int64_t step = std::max(multiple, units / multiple * multiple);
                for (int64_t at = 0; at < extent(matrix); at += step)
                    shrunk.tasks.push_back({&s, &matrix, row, rows, at, std::min(step, extent(matrix) - at)});
            }
        }
}

void list_rows(LoraShrunk& shrunk, const char* x, int64_t row_stride_bytes, int64_t per_x) {
    const std::vector<int32_t>& rows = shrunk.plan.rows->rows;
    shrunk.x_list.resize(rows.size());
    shrunk.h_list.resize(rows.size());
    for (const LoraSegment& s : shrunk.plan.segments)
        for (int64_t i = s.begin; i < s.end; i++) {
            shrunk.x_list[i] = x + rows[i] / per_x * row_stride_bytes;
            shrunk.h_list[i] = shrunk.h + s.workspace + (i - s.begin) * s.stride;
        }
}

// Target of surplus rows' products, discarded.
void** scratch_rows(int64_t columns) {
    static thread_local Floats scratch;
    static thread_local void* rows[kRowsPerTask];
    char* const row = reinterpret_cast<char*>(scratch.at_least(columns));
    std::fill(rows, rows + kRowsPerTask, row);
    return rows;
}

}  // namespace

int64_t moe_lora_shrink(int32_t kernel, int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                        int64_t x_rows, const int32_t* ids, int64_t tokens, int64_t top_k, const LoraSite* site,
                        int64_t layer, const int32_t* token_slots, const LoraSlots* slots, const void* arena,
                        int64_t arena_bytes) {
    LoraShrunk* const shrunk = pool().take();
    shrunk->dtype = dtype;
    const int32_t refusal = plan_lora(LoraKernel(kernel), dtype, {ids, token_slots, tokens, top_k}, *site, layer, *slots,
                                      {static_cast<const char*>(arena), arena_bytes}, shrunk->plan);
    if (refusal) {
        pool().put(shrunk);
        return refusal;
    }
    const int64_t size = item_size(dtype), width = site->in_features, row_bytes = width * size;
    shrunk->h = shrunk->workspace.at_least(shrunk->plan.workspace_floats);
    list_rows(*shrunk, static_cast<const char*>(x), x_stride * size, x_rows == tokens * top_k ? 1 : top_k);
    cut(*shrunk, threads, 4, [](const LoraMatrix& m) { return m.a ? m.lora_rank : 0; },
        [&](const LoraMatrix&) { return row_bytes; });
    const std::vector<Task>& tasks = shrunk->tasks;
    const auto dot = dtype == kF32 ? isa().dot_f32 : isa().dot_bf16_to_f32;
    const auto a_of = [&](const Task& t) { return t.matrix->a + t.at * row_bytes; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const Task& t = tasks[i];
        const char* next = following < 0 ? nullptr : a_of(tasks[following]);
        dot({&shrunk->x_list[t.row], a_of(t), nullptr, &shrunk->h_list[t.row], t.rows, t.num, width,
             t.matrix->h + t.at, next});
    });
    return reinterpret_cast<int64_t>(shrunk);
}

void moe_lora_expand(int32_t threads, LoraShrunk* shrunk, int32_t y_dtype, float sign, void* y, int64_t y_stride) {
    const LoraPlan& plan = shrunk->plan;
    const int64_t size = item_size(shrunk->dtype), y_size = item_size(y_dtype);
    cut(*shrunk, threads, 64, [](const LoraMatrix& m) { return m.out_features; },
        [&](const LoraMatrix& m) { return m.lora_rank * size; });
    const std::vector<Task>& tasks = shrunk->tasks;
    const auto sum = shrunk->dtype == kF32 ? isa().sum_f32 : y_dtype == kF32 ? isa().sum_bf16_to_f32 : isa().sum_bf16;
    const auto b_of = [&](const Task& t) { return t.matrix->b + t.at * size; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const Task& t = tasks[i];
        const Task& after = tasks[following < 0 ? i : following];
        const LoraMatrix& matrix = *t.matrix;
        const LoraSegment& s = *t.segment;
        void* y_list[kRowsPerTask];
        for (int64_t r = 0; r < t.rows; r++)
            y_list[r] = static_cast<char*>(y) + (plan.rows->rows[t.row + r] * y_stride + matrix.column + t.at) * y_size;
        const float* h = shrunk->h + s.workspace + (t.row - s.begin) * s.stride + matrix.h;
        sum({h, b_of(t), matrix.surplus ? scratch_rows(t.num) : y_list, t.rows, matrix.lora_rank, t.num, s.stride,
             matrix.out_features, sign * matrix.scale, following < 0 ? nullptr : b_of(after), after.matrix->out_features});
    });
    pool().put(shrunk);
}

void moe_lora_release(LoraShrunk* shrunk) { pool().put(shrunk); }
