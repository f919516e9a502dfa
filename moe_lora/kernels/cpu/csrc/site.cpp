// SPDX-License-Identifier: Apache-2.0
// A LoRA site of a step in one call, to save time between kernels.
#include <vector>

#include "kernels.h"

namespace {

int32_t multiply(int32_t threads, const SiteWeights& w, const void* x, int64_t x_stride, int64_t x_rows,
                 const int32_t* ids, int64_t tokens, int64_t top_k, void* out) {
    const int64_t experts = ids ? w.num_experts : 1;
    const PackedWeights& p = w.packed;
    if (w.kind == 1)
        return moe_lora_packed_linear(w.dtype, threads, x, x_stride, x_rows, &p, w.bias, ids, tokens, top_k, experts,
                                      out, w.num_out, w.width);
    if (w.kind == 2)
        return moe_lora_dynamic_linear(w.dynamic_bits, w.dtype, threads, x, x_stride, x_rows, p.data, p.scale, p.group,
                                       w.bias, ids, tokens, top_k, experts, out, w.num_out, w.width);
    return moe_lora_expert_linear(w.dtype, threads, x, x_stride, x_rows, p.data, w.bias, ids, tokens, top_k, experts,
                                  out, w.num_out, w.width);
}

}  // namespace

int32_t moe_lora_site_linear(int32_t threads, const SiteWeights* weights, const SiteRows* rows, int64_t layer,
                             const void* x, int64_t x_stride, int64_t x_rows, const int32_t* ids, int64_t tokens,
                             int64_t top_k, void* out) {
    LoraShrunk* shrunk = nullptr;
    if (rows->token_slots) {
        const int64_t made =
            moe_lora_shrink(rows->kernel, weights->dtype, threads, x, x_stride, x_rows, ids, tokens, top_k, rows->site, layer,
                            rows->token_slots, rows->slots, rows->arena, rows->arena_bytes);
        if (made < 0) return int32_t(made);
        shrunk = reinterpret_cast<LoraShrunk*>(made);
    }
    const int32_t* held = ids;
    std::vector<int32_t> numbers;
    if (ids && weights->first_expert) {
        numbers.assign(ids, ids + tokens * top_k);
        for (int32_t& id : numbers) id = id < 0 ? id : id - int32_t(weights->first_expert);
        held = numbers.data();
    }
    const int32_t refusal = multiply(threads, *weights, x, x_stride, x_rows, held, tokens, top_k, out);
    if (refusal) {
        if (shrunk) moe_lora_release(shrunk);
        return refusal;
    }
    if (shrunk) moe_lora_expand(threads, shrunk, weights->dtype, 1.0f, out, weights->num_out);
    return 0;
}
