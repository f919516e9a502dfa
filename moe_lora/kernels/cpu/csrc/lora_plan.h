// SPDX-License-Identifier: Apache-2.0
// Rows by adapter matrices at one site in one step.
#pragma once
#include <cstdint>
#include <memory>
#include <vector>

#include "kernels.h"

// One step's adapter choice at one site.
struct LoraRows {
    const int32_t* ids;
    const int32_t* token_slots;
    int64_t tokens, top_k;
};

// Rows [begin, end) of RowGroups::rows use the adapter of `slot` (and its `expert`).
struct RowGroup {
    int64_t slot, expert, begin, end;
};

struct RowGroups {
    std::vector<int32_t> rows;
    std::vector<RowGroup> groups;
};

// One module of one adapter (and expert): `h` is its first column in the rows of the segment's workspace.
struct LoraMatrix {
    const char* a;  // null if h is that of an earlier module with the same A
    const char* b;
    int64_t lora_rank, h, column, out_features;
    float scale;
    bool surplus;  // padding of the BGMV baseline: computed, then discarded
};

// Rows [begin, end) of the row list; their h rows are `stride` floats each, the first at `workspace`.
struct LoraSegment {
    int64_t begin, end, workspace, stride;
    int64_t first_matrix, end_matrix;
};

struct LoraPlan {
    std::shared_ptr<const RowGroups> rows;  // shared by the sites of a step that choose adapters alike
    std::vector<LoraMatrix> matrices;
    std::vector<LoraSegment> segments;
    int64_t workspace_floats = 0;
};

struct LoraArena {
    const char* data;
    int64_t bytes;
};

// Fills `plan`. Returns 0 or a refusal.
int32_t plan_lora(LoraKernel kernel, int32_t dtype, const LoraRows& rows, const LoraSite& site, int64_t layer,
                  const LoraSlots& slots, const LoraArena& arena, LoraPlan& plan);
