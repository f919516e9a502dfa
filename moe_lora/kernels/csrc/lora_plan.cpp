#include "lora_plan.h"

#include <algorithm>

namespace {

void add_matrices(const LoraSite& site, const LoraSlots& slots, const char* arena, int64_t entry, LoraPlan& plan,
                  LoraSegment& segment) {
    const int64_t* a_offset = slots.a_offset + entry;
    segment.first_matrix = int64_t(plan.matrices.size());
    int64_t h[kMaxModules];
    for (int64_t m = 0; m < site.num_modules; m++) {
        const int64_t lora_rank = slots.lora_rank[entry + m];
        if (lora_rank <= 0) continue;
        const char* a = arena + a_offset[m];
        h[m] = segment.stride;
        for (int64_t earlier = 0; earlier < m; earlier++)
            if (slots.lora_rank[entry + earlier] == lora_rank && a_offset[earlier] == a_offset[m]) {
                a = nullptr;
                h[m] = h[earlier];
                break;
            }
        if (a) segment.stride += lora_rank;
        plan.matrices.push_back({a, arena + slots.b_offset[entry + m], lora_rank, h[m], site.column[m],
                                 site.out_features[m], slots.scale[entry + m]});
    }
    segment.end_matrix = int64_t(plan.matrices.size());
}

}  // namespace

int32_t plan_lora(const LoraRows& rows, const LoraSite& site, int64_t layer, const LoraSlots& slots,
                  const char* arena, LoraPlan& plan) {
    const int64_t experts = std::max<int64_t>(1, site.num_experts), count = rows.tokens * rows.top_k;
    std::vector<std::pair<int64_t, int64_t>> order;  // (slot and expert, row)
    order.reserve(count);
    for (int64_t i = 0; i < count; i++) {
        const int64_t slot = rows.row_slot[i / rows.top_k], expert = rows.ids ? rows.ids[i] : 0;
        if (slot < -1 || slot >= slots.num_slots) return kBadSlot;
        if (expert < -1 || expert >= experts) return kBadExpert;
        if (slot >= 0 && expert >= 0) order.emplace_back(slot * experts + expert, i);
    }
    std::sort(order.begin(), order.end());
    plan.rows.reserve(order.size());
    for (size_t i = 0; i < order.size();) {
        const int64_t key = order[i].first, begin = int64_t(plan.rows.size());
        const int64_t entry = ((key / experts) * slots.num_layers + layer) * slots.num_entries + site.entry_base +
                              key % experts * site.num_modules;
        LoraSegment segment{begin, begin, plan.workspace_floats, 0, 0, 0};
        add_matrices(site, slots, arena, entry, plan, segment);
        for (; i < order.size() && order[i].first == key; i++)
            if (segment.stride) plan.rows.push_back(order[i].second);
        segment.end = int64_t(plan.rows.size());
        plan.workspace_floats += (segment.end - begin) * segment.stride;
        if (segment.stride) plan.segments.push_back(segment);
    }
    return 0;
}
