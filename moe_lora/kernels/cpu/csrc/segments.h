// SPDX-License-Identifier: Apache-2.0
// Rows of a linear layer in the order of their weight matrices.
#pragma once
#include <algorithm>
#include <cstring>
#include <vector>

#include "kernels.h"

// Places [begin, end) of the row lists meet one weight matrix.
struct Segment {
    int64_t begin, end, expert;
};

struct GroupedRows {
    std::vector<Segment> segments;
    std::vector<int64_t> x;   // row of x at each place
    std::vector<void*> out;   // row of out at each place
};

// `ids` null: a dense layer, all rows of one segment. Rows of no expert (-1) become zero. Returns a refusal or 0.
inline int32_t group_rows(const int32_t* ids, int64_t tokens, int64_t top_k, int64_t x_rows, int64_t num_experts,
                          void* out, int64_t out_row_bytes, GroupedRows& grouped) {
    const int64_t rows = tokens * top_k, per_x = x_rows == rows ? 1 : top_k;
    const auto out_row = [&](int64_t i) { return static_cast<char*>(out) + i * out_row_bytes; };
    if (!ids) {
        grouped.x.resize(rows);
        grouped.out.resize(rows);
        for (int64_t i = 0; i < rows; i++) grouped.x[i] = i, grouped.out[i] = out_row(i);
        grouped.segments = {{0, rows, 0}};
        return 0;
    }
    std::vector<int64_t> start(num_experts + 1, 0);
    for (int64_t i = 0; i < rows; i++) {
        if (ids[i] < -1 || ids[i] >= num_experts) return kBadExpert;
        if (ids[i] >= 0) start[ids[i] + 1]++;
    }
    for (int64_t e = 0; e < num_experts; e++) {
        start[e + 1] += start[e];
        if (start[e + 1] > start[e]) grouped.segments.push_back({start[e], start[e + 1], e});
    }
    grouped.x.resize(start[num_experts]);
    grouped.out.resize(start[num_experts]);
    for (int64_t i = 0; i < rows; i++) {
        if (ids[i] < 0) {
            memset(out_row(i), 0, out_row_bytes);
            continue;
        }
        const int64_t place = start[ids[i]]++;
        grouped.x[place] = i / per_x;
        grouped.out[place] = out_row(i);
    }
    return 0;
}

// Weight rows [n, n + num) of a segment's matrix against the rows at [row, row + rows).
struct LinearTask {
    const Segment* segment;
    int64_t row, rows, n, num;
};

constexpr int64_t kLinearRowsPerTask = 512;

// Cuts each segment in pieces of about equal traffic; pieces of weight rows are whole multiples of `multiple`.
inline std::vector<LinearTask> cut_segments(const std::vector<Segment>& segments, int64_t num_out, int64_t row_bytes,
                                            int threads, int64_t multiple) {
    const int64_t total = int64_t(segments.size()) * num_out * row_bytes;
    const int64_t task_bytes = std::clamp<int64_t>(total / (threads * 4), 32 << 10, 1 << 20);
    const int64_t units = task_bytes / std::max<int64_t>(1, row_bytes) / multiple * multiple;
    const int64_t step = std::max(multiple, units);
    std::vector<LinearTask> tasks;
    for (const Segment& segment : segments)
        for (int64_t n = 0; n < num_out; n += step)
            for (int64_t row = segment.begin; row < segment.end; row += kLinearRowsPerTask)
                tasks.push_back({&segment, row, std::min(kLinearRowsPerTask, segment.end - row), n,
                                 std::min(step, num_out - n)});
    return tasks;
}
