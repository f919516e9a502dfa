// Dense and expert-grouped linear layers: rows grouped by weight matrix, each matrix read once.
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "tiles.h"

namespace {

// Rows [begin, end) of the pointer lists share one weight matrix.
struct Segment {
    int64_t begin, end;
    const char* weight;
    const char* bias;
};

struct Task {
    const Segment* segment;
    int64_t row, rows, n, num;
};

constexpr int64_t kRowsPerTask = 512;

std::vector<Task> cut(const std::vector<Segment>& segments, int64_t num_out, int64_t row_bytes, int threads) {
    const int64_t total = int64_t(segments.size()) * num_out * row_bytes;
    const int64_t task_bytes = std::clamp<int64_t>(total / (threads * 4), 32 << 10, 1 << 20);
    const int64_t step = std::max<int64_t>(4, task_bytes / std::max<int64_t>(1, row_bytes) / 4 * 4);
    std::vector<Task> tasks;
    for (const Segment& segment : segments)
        for (int64_t n = 0; n < num_out; n += step)
            for (int64_t row = segment.begin; row < segment.end; row += kRowsPerTask)
                tasks.push_back({&segment, row, std::min(kRowsPerTask, segment.end - row), n,
                                 std::min(step, num_out - n)});
    return tasks;
}

void run_segments(int32_t dtype, int threads, const std::vector<Segment>& segments,
                  const std::vector<const void*>& x, const std::vector<void*>& out, int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype), row_bytes = width * size;
    threads = useful_threads(threads, int64_t(segments.size()) * num_out * row_bytes);
    const std::vector<Task> tasks = cut(segments, num_out, row_bytes, threads);
    const auto dot = dtype == kF32 ? isa().dot_f32 : isa().dot_bf16;
    const auto weight_of = [&](const Task& t) { return t.segment->weight + t.n * row_bytes; };
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t following) {
        const Task& t = tasks[i];
        const char* bias = t.segment->bias ? t.segment->bias + t.n * size : nullptr;
        const char* next = following < 0 ? nullptr : weight_of(tasks[following]);
        dot({&x[t.row], weight_of(t), bias, &out[t.row], t.rows, t.num, width, t.n, next});
    });
}

}  // namespace

int32_t moe_lora_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, const void* weight,
                        const void* bias, void* out, int64_t rows, int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype);
    std::vector<const void*> x_rows(rows);
    std::vector<void*> out_rows(rows);
    for (int64_t i = 0; i < rows; i++) {
        x_rows[i] = static_cast<const char*>(x) + i * x_stride * size;
        out_rows[i] = static_cast<char*>(out) + i * num_out * size;
    }
    const std::vector<Segment> segments{{0, rows, static_cast<const char*>(weight), static_cast<const char*>(bias)}};
    run_segments(dtype, threads, segments, x_rows, out_rows, num_out, width);
    return 0;
}

int32_t moe_lora_expert_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, int64_t x_rows,
                               const void* weight, const void* bias, const int32_t* ids, int64_t tokens,
                               int64_t top_k, int64_t num_experts, void* out, int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype), rows = tokens * top_k, per_x = x_rows == rows ? 1 : top_k;
    std::vector<int64_t> start(num_experts + 1, 0);
    for (int64_t i = 0; i < rows; i++) {
        if (ids[i] < -1 || ids[i] >= num_experts) return kBadExpert;
        if (ids[i] >= 0) start[ids[i] + 1]++;
    }
    std::vector<Segment> segments;
    for (int64_t e = 0; e < num_experts; e++) {
        start[e + 1] += start[e];
        const char* expert_bias = bias ? static_cast<const char*>(bias) + e * num_out * size : nullptr;
        if (start[e + 1] > start[e])
            segments.push_back({start[e], start[e + 1],
                                static_cast<const char*>(weight) + e * num_out * width * size, expert_bias});
    }
    std::vector<const void*> x_list(start[num_experts]);
    std::vector<void*> out_list(start[num_experts]);
    for (int64_t i = 0; i < rows; i++) {
        char* out_row = static_cast<char*>(out) + i * num_out * size;
        if (ids[i] < 0) {
            memset(out_row, 0, num_out * size);
            continue;
        }
        const int64_t place = start[ids[i]]++;
        x_list[place] = static_cast<const char*>(x) + i / per_x * x_stride * size;
        out_list[place] = out_row;
    }
    run_segments(dtype, threads, segments, x_list, out_list, num_out, width);
    return 0;
}
