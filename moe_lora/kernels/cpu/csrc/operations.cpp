// SPDX-License-Identifier: Apache-2.0
// Operations of a decode step for torch's dispatcher, without Python, over the kernels of the library.
//
// They compute the local part of the step's tables (see kernels/cpu/site_linear.py). The rest, and operands that
// don't fit, go to the operation in Python, stack untouched; its exceptions come back through here.
// The only file with torch's headers: a separate library for one version of torch.
#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "kernels.h"

namespace {

using c10::IValue;
using torch::jit::Stack;

// A site of a layer, after its weights were seen; weights null: not yet.
struct SeenSite {
    const SiteWeights* weights;
    const void* data;  // where the weights' first tensor lies, by which others are told
    int64_t max_rows;  // more are left to Python
};

// The rows of the step at a site of every layer; rows null: left to Python.
struct StepRows {
    const SiteRows* rows;
    int64_t num_rows, num_layers;  // of a step with deltas, and of its slot table
};

// Attention of the step; pages null: left to Python.
struct StepAttention {
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t num_seqs, table_stride;
    const KvPages* pages;
    void* arena;
    int64_t arena_bytes;
    int32_t dtype;
};

struct StepCalls {
    int64_t num_sites;
    const SeenSite* sites;  // [layers][sites]
    const StepRows* rows;   // [sites]
    StepAttention attention;
};

decltype(&moe_lora_site_linear) site_linear;
decltype(&moe_lora_paged_attention) attend;

// A channel is [handle, layer, address of StepCalls or 0].
const StepCalls* calls_behind(const at::Tensor& channel, int64_t* layer) {
    if (channel.numel() != 3) return nullptr;
    const int64_t* numbers = channel.const_data_ptr<int64_t>();
    *layer = numbers[1];
    return reinterpret_cast<const StepCalls*>(numbers[2]);
}

at::ScalarType dtype_of(int32_t code) { return code ? at::kBFloat16 : at::kFloat; }

// The rows match x's number of rows and the site's sizes.
bool fits(const StepRows& step, const SiteWeights& weights, int64_t layer, int64_t tokens) {
    if (!step.rows->token_slots) return true;
    const LoraSite& site = *step.rows->site;
    const int64_t last = site.num_modules - 1;
    return step.num_rows == tokens && layer < step.num_layers && site.in_features == weights.width &&
           site.column[last] + site.out_features[last] <= weights.num_out &&
           (site.num_experts > 0) == (weights.num_experts > 0);
}

void give(Stack& stack, size_t num_operands, at::Tensor out) {
    torch::jit::drop(stack, num_operands);
    stack.emplace_back(std::move(out));
}

// Operands of lora_linear.
enum { kChannel = 0, kX = 1, kWeight = 2, kIds = 6, kSite = 7, kNumLinearOperands = 11 };

bool linear_here(Stack& stack) {
    const IValue* given = stack.data() + stack.size() - kNumLinearOperands;
    int64_t layer;
    const StepCalls* calls = calls_behind(given[kChannel].toTensor(), &layer);
    const int64_t number = given[kSite].toInt();
    if (!calls || number >= calls->num_sites) return false;
    const SeenSite& seen = calls->sites[layer * calls->num_sites + number];
    const StepRows& step = calls->rows[number];
    if (!seen.weights || !step.rows || given[kWeight].toTensor().const_data_ptr() != seen.data) return false;
    const SiteWeights& weights = *seen.weights;
    const at::Tensor& x = given[kX].toTensor();
    if (x.dim() != 2 || x.scalar_type() != dtype_of(weights.dtype) || x.size(1) != weights.width || x.stride(1) != 1 ||
        x.size(0) > seen.max_rows || given[kIds].isNone() != (weights.num_experts == 0))
        return false;
    const int64_t x_rows = x.size(0);
    int64_t tokens = x_rows, top_k = 1;
    const int32_t* ids = nullptr;
    if (weights.num_experts) {
        const at::Tensor& chosen = given[kIds].toTensor();
        if (chosen.dim() != 2 || chosen.scalar_type() != at::kInt || !chosen.is_contiguous()) return false;
        tokens = chosen.size(0), top_k = chosen.size(1);
        if (x_rows != tokens && x_rows != tokens * top_k) return false;
        ids = chosen.const_data_ptr<int32_t>();
    }
    if (!fits(step, weights, layer, tokens)) return false;
    at::Tensor out = at::empty({tokens * top_k, weights.num_out}, x.scalar_type());
    if (site_linear(at::get_num_threads(), &weights, step.rows, layer, x.const_data_ptr(), x.stride(0), x_rows, ids,
                    tokens, top_k, out.mutable_data_ptr()))
        return false;
    give(stack, kNumLinearOperands, std::move(out));
    return true;
}

bool rows_are_contiguous(const at::Tensor& x) {
    return x.stride(2) == 1 && (x.size(1) == 1 || x.stride(1) == x.size(2));
}

bool is_kv(const at::Tensor& x, const at::Tensor& q, const KvPages& pages) {
    return x.dim() == 3 && x.scalar_type() == q.scalar_type() && x.size(0) == q.size(0) &&
           x.size(1) == pages.num_kv_heads && x.size(2) == pages.head_dim && rows_are_contiguous(x);
}

constexpr size_t kNumAttentionOperands = 7;

bool attention_here(Stack& stack) {
    const IValue* given = stack.data() + stack.size() - kNumAttentionOperands;
    int64_t layer;
    const StepCalls* calls = calls_behind(given[0].toTensor(), &layer);
    if (!calls || !calls->attention.pages) return false;
    const StepAttention& step = calls->attention;
    const KvPages& pages = *step.pages;
    const at::Tensor &q = given[1].toTensor(), &k = given[2].toTensor(), &v = given[3].toTensor();
    const double scale = given[5].toDouble();
    if (q.dim() != 3 || q.scalar_type() != dtype_of(step.dtype) || q.size(2) != pages.head_dim ||
        q.size(1) % pages.num_kv_heads || !rows_are_contiguous(q) || !is_kv(k, q, pages) || !is_kv(v, q, pages) ||
        !(scale > 0))
        return false;
    at::Tensor sinks;
    if (!given[4].isNone()) {
        sinks = given[4].toTensor().to(at::kFloat);
        if (sinks.numel() != q.size(1) || !sinks.is_contiguous()) return false;
    }
    at::Tensor out = at::empty(q.sizes(), q.scalar_type());
    if (attend(step.dtype, at::get_num_threads(), q.const_data_ptr(), q.stride(0), k.const_data_ptr(), k.stride(0),
               v.const_data_ptr(), v.stride(0), sinks.defined() ? sinks.const_data_ptr<float>() : nullptr, float(scale),
               given[6].toInt(), layer, step.query_start, step.seq_lens, step.block_tables, step.num_seqs,
               step.table_stride, &pages, step.arena, step.arena_bytes, q.size(0), q.size(1), out.mutable_data_ptr()))
        return false;
    give(stack, kNumAttentionOperands, std::move(out));
    return true;
}

// The entry without a key is the kernel for every device: the operation in Python.
template <bool (*computed_here)(Stack&)>
void here_or_in_python(const c10::OperatorHandle& operation, c10::DispatchKeySet, Stack* stack) {
    if (!computed_here(*stack)) operation.redispatchBoxed(c10::DispatchKeySet(), stack);
}

}  // namespace

MOE_LORA_API const char* moe_lora_torch_version() { return MOE_LORA_TORCH_VERSION; }

// Sizes of the tables, to detect a library built for another site_linear.py.
MOE_LORA_API void moe_lora_table_bytes(int64_t* bytes) {
    bytes[0] = sizeof(SeenSite), bytes[1] = sizeof(StepRows), bytes[2] = sizeof(StepAttention), bytes[3] = sizeof(StepCalls);
}

// Registers the operations before those in Python, once. Given: functions of the kernels' library.
MOE_LORA_API void moe_lora_register_operations(decltype(site_linear) of_site, decltype(attend) of_attention) {
    site_linear = of_site, attend = of_attention;
    static torch::Library library(torch::Library::IMPL, "moe_lora", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("lora_linear", torch::CppFunction::makeFromBoxedFunction<&here_or_in_python<&linear_here>>());
    library.impl("paged_attention", torch::CppFunction::makeFromBoxedFunction<&here_or_in_python<&attention_here>>());
}
