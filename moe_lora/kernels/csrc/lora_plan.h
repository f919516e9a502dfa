// Which rows share which adapter matrices at one site in one step.
#pragma once
#include <cstdint>
#include <vector>

#include "kernels.h"

// One step's adapter choice at one site.
struct LoraRows {
    const int32_t* ids;
    const int32_t* row_slot;
    int64_t tokens, top_k;
};

// One module of one adapter (and expert): `h` is its first column in the rows of the segment's workspace.
struct LoraMatrix {
    const char* a;  // null if h is that of an earlier module with the same A
    const char* b;
    int64_t lora_rank, h, column, out_features;
    float scale;
};

// Rows [begin, end) of the plan's row list; their h rows are `stride` floats each, the first at `workspace`.
struct LoraSegment {
    int64_t begin, end, workspace, stride;
    int64_t first_matrix, end_matrix;
};

struct LoraPlan {
    std::vector<int64_t> rows;
    std::vector<LoraMatrix> matrices;
    std::vector<LoraSegment> segments;
    int64_t workspace_floats = 0;
};

// Fills `plan`; the same input gives the same plan, so shrink and expand agree on the workspace.
int32_t plan_lora(const LoraRows& rows, const LoraSite& site, int64_t layer, const LoraSlots& slots,
                  const char* arena, LoraPlan& plan);
