// SPDX-License-Identifier: Apache-2.0
#include "lora_plan.h"

#include <algorithm>
#include <cstring>

#include "tiles.h"

namespace {

struct Chosen {
    int32_t slot, expert, row;
};

int32_t choose(const LoraRows& rows, int64_t num_slots, int64_t experts, std::vector<Chosen>& chosen) {
    int32_t row = 0;
    for (int64_t t = 0; t < rows.tokens; t++) {
        const int32_t slot = rows.token_slots[t];
        if (slot < -1 || slot >= num_slots) return kBadSlot;
        for (int64_t k = 0; k < rows.top_k; k++, row++) {
            const int32_t expert = rows.ids ? rows.ids[row] : 0;
            if (expert < -1 || expert >= experts) return kBadExpert;
            if (slot >= 0 && expert >= 0) chosen.push_back({slot, expert, row});
        }
    }
    return 0;
}

// Stable counting sort by `key`, with values below `limit`.
template <class Key>
void sort_by(std::vector<Chosen>& chosen, int64_t limit, const Key& key) {
    std::vector<int32_t> start(limit + 1, 0);
    for (const Chosen& c : chosen) start[key(c) + 1]++;
    for (int64_t i = 0; i < limit; i++) start[i + 1] += start[i];
    std::vector<Chosen> sorted(chosen.size());
    for (const Chosen& c : chosen) sorted[start[key(c)]++] = c;
    chosen.swap(sorted);
}

std::shared_ptr<const RowGroups> group_rows(std::vector<Chosen>& chosen, int64_t num_slots, int64_t experts,
                                            bool one_row_each) {
    if (!one_row_each && experts > 1) sort_by(chosen, experts, [](const Chosen& c) { return c.expert; });
    if (!one_row_each) sort_by(chosen, num_slots, [](const Chosen& c) { return c.slot; });
    auto made = std::make_shared<RowGroups>();
    made->rows.reserve(chosen.size());
    for (const Chosen& c : chosen) {
        const int64_t at = int64_t(made->rows.size());
        const bool joins = !one_row_each && at && made->groups.back().slot == c.slot &&
                           made->groups.back().expert == c.expert;
        if (!joins) made->groups.push_back({c.slot, c.expert, at, at});
        made->groups.back().end = at + 1;
        made->rows.push_back(c.row);
    }
    return made;
}

// The sites of a step share the same rows: the last grouping is kept with a copy of
// its input.
class LastGroups {
  public:
    int32_t find(const LoraRows& rows, int64_t num_slots, int64_t experts, bool one_row_each,
                 std::shared_ptr<const RowGroups>& found) {
        const int64_t shape[] = {rows.tokens, rows.top_k, num_slots, experts, one_row_each};
        const size_t id_bytes = rows.ids ? rows.tokens * rows.top_k * sizeof(int32_t) : 0;
        const size_t slot_bytes = rows.tokens * sizeof(int32_t);
        if (!groups_ || memcmp(shape, shape_, sizeof(shape)) || memcmp(slots_.data(), rows.token_slots, slot_bytes) ||
            (id_bytes && memcmp(ids_.data(), rows.ids, id_bytes))) {
            groups_ = nullptr;
            std::vector<Chosen> chosen;
            const int32_t refusal = choose(rows, num_slots, experts, chosen);
            if (refusal) return refusal;
            memcpy(shape_, shape, sizeof(shape));
            slots_.assign(rows.token_slots, rows.token_slots + rows.tokens);
            ids_.assign(rows.ids, rows.ids + id_bytes / sizeof(int32_t));
            groups_ = group_rows(chosen, num_slots, experts, one_row_each);
        }
        found = groups_;
        return 0;
    }

  private:
    int64_t shape_[5] = {};
    std::vector<int32_t> slots_, ids_;
    std::shared_ptr<const RowGroups> groups_;
};

thread_local LastGroups last_dense, last_expert;

struct Planner {
    const LoraSite& site;
    const LoraSlots& slots;
    const LoraArena& arena;
    int64_t layer, item;
    LoraPlan& plan;

    int64_t entry_of(const RowGroup& g) const {
        return (g.slot * slots.num_layers + layer) * slots.num_entries + site.entry_base +
               g.expert * site.num_modules;
    }
    bool outside(int64_t offset, int64_t lora_rank, int64_t width) const {
        return offset < 0 || offset % item || offset > arena.bytes - lora_rank * width * item;
    }
    int64_t max_lora_rank() const {
        int64_t largest = 0;
        for (const RowGroup& g : plan.rows->groups)
            for (int64_t m = 0; m < site.num_modules; m++)
                largest = std::max<int64_t>(largest, slots.lora_rank[entry_of(g) + m]);
        return largest;
    }
    int32_t add_matrices(int64_t entry, LoraSegment& segment) const;
    void add_surplus(int64_t max_rank, LoraSegment& segment) const;
    const char* surplus_rows(const char* end, int64_t num, int64_t width) const;
};

int32_t Planner::add_matrices(int64_t entry, LoraSegment& segment) const {
    const int64_t* a_offset = slots.a_offset + entry;
    const int64_t* b_offset = slots.b_offset + entry;
    int64_t h[kMaxModules];
    for (int64_t m = 0; m < site.num_modules; m++) {
        const int64_t lora_rank = slots.lora_rank[entry + m];
        if (lora_rank <= 0) continue;
        if (outside(a_offset[m], lora_rank, site.in_features)) return kBadOffset;
        if (outside(b_offset[m], lora_rank, site.out_features[m])) return kBadOffset;
        const char* a = arena.data + a_offset[m];
        h[m] = segment.stride;
        for (int64_t earlier = 0; earlier < m; earlier++)
            if (slots.lora_rank[entry + earlier] == lora_rank && a_offset[earlier] == a_offset[m]) {
                a = nullptr;
                h[m] = h[earlier];
                break;
            }
        if (a) segment.stride += lora_rank;
        plan.matrices.push_back({a, arena.data + b_offset[m], lora_rank, h[m], site.column[m], site.out_features[m],
                                 slots.scale[entry + m], false});
    }
    segment.end_matrix = int64_t(plan.matrices.size());
    return 0;
}

// `num` rows after a matrix that ends at `end`, moved back to stay in the arena.
const char* Planner::surplus_rows(const char* end, int64_t num, int64_t width) const {
    const int64_t last = std::max<int64_t>(0, arena.bytes / item - num * width) * item;
    return arena.data + std::min<int64_t>(end - arena.data, last);
}

void Planner::add_surplus(int64_t max_rank, LoraSegment& segment) const {
    for (int64_t m = segment.first_matrix, end = segment.end_matrix; m < end; m++) {
        const LoraMatrix real = plan.matrices[m];
        const int64_t widest = std::max(site.in_features, real.out_features);
        const int64_t num = std::min(max_rank - real.lora_rank, arena.bytes / (widest * item));
        if (num <= 0) continue;
        const char* a_end = real.a ? real.a + real.lora_rank * site.in_features * item : arena.data;
        const char* b_end = real.b + real.lora_rank * real.out_features * item;
        plan.matrices.push_back({surplus_rows(a_end, num, site.in_features),
                                 surplus_rows(b_end, num, real.out_features), num, segment.stride, real.column,
                                 real.out_features, real.scale, true});
        segment.stride += num;
    }
    segment.end_matrix = int64_t(plan.matrices.size());
}

}  // namespace

int32_t plan_lora(LoraKernel kernel, int32_t dtype, const LoraRows& rows, const LoraSite& site, int64_t layer,
                  const LoraSlots& slots, const LoraArena& arena, LoraPlan& plan) {
    const int64_t experts = std::max<int64_t>(1, site.num_experts);
    LastGroups& last = rows.ids ? last_expert : last_dense;
    const int32_t refusal = last.find(rows, slots.num_slots, experts, kernel != kSgmv, plan.rows);
    plan.matrices.clear();
    plan.segments.clear();
    plan.workspace_floats = 0;
    if (refusal) return refusal;
    const Planner planner{site, slots, arena, layer, item_size(dtype), plan};
    const int64_t max_rank = kernel == kBgmv ? planner.max_lora_rank() : 0;
    for (const RowGroup& g : plan.rows->groups) {
        LoraSegment segment{g.begin, g.end, plan.workspace_floats, 0, int64_t(plan.matrices.size()), 0};
        const int32_t bad_offset = planner.add_matrices(planner.entry_of(g), segment);
        if (bad_offset) return bad_offset;
        if (segment.end_matrix == segment.first_matrix) continue;
        planner.add_surplus(max_rank, segment);
        plan.workspace_floats += (segment.end - segment.begin) * segment.stride;
        plan.segments.push_back(segment);
    }
    return 0;
}
