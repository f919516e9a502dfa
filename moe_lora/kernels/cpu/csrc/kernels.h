// SPDX-License-Identifier: Apache-2.0
// The C interface of the CPU kernels, as called by moe_lora/kernels/cpu/cpu.py; semantics in reference.py.
//
// Strides and widths are in elements unless named otherwise. `dtype`: 0 fp32, 1 bf16. `threads`: upper limit.
// Functions that return int32_t: 0 = done, negative = refused (codes below), nothing written.
#pragma once
#include <cstdint>

#define MOE_LORA_API extern "C" __attribute__((visibility("default")))

enum Refusal : int32_t { kBadExpert = -2, kBadSlot = -3, kBadOffset = -4, kBadPage = -5, kBadSequence = -6 };

// Order of a step's LoRA rows: see kernels/cpu/cpu.py.
enum LoraKernel : int32_t { kSgmv = 0, kBgmv = 1, kMbgmv = 2 };

constexpr int kMaxModules = 8;

// Constants of a LoRA site.
struct LoraSite {
    int64_t num_modules, num_experts, entry_base, in_features;
    int64_t column[kMaxModules], out_features[kMaxModules];
};

// The slot table (all [slots, layers, entries]) and its arena.
struct LoraSlots {
    const int64_t* a_offset;
    const int64_t* b_offset;
    const int32_t* lora_rank;
    const float* scale;
    int64_t num_slots, num_layers, num_entries;
};

// Constants of the KV pages.
struct KvPages {
    int64_t num_kv_heads, head_dim, block_size, page_bytes, layer_bytes, value_bytes;
};

MOE_LORA_API const char* moe_lora_isa();
MOE_LORA_API int32_t moe_lora_set_isa(const char* name);

MOE_LORA_API int32_t moe_lora_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                     const void* weight, const void* bias, void* out, int64_t rows, int64_t num_out,
                                     int64_t width);

// x has `x_rows` rows: one per token or one per output. ids: [tokens, top_k]; null: one matrix for all rows.
MOE_LORA_API int32_t moe_lora_expert_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                            int64_t x_rows, const void* weight, const void* bias, const int32_t* ids,
                                            int64_t tokens, int64_t top_k, int64_t num_experts, void* out,
                                            int64_t num_out, int64_t width);

// Weights of 8 or 4 bits; layouts: unpack.inl.
struct PackedWeights {
    const void* data;
    const void* scale;  // [experts][num_out / row_group][width / group], both rounded up
    const void* zero;   // int8 [experts][num_out][width / group], or null
    int64_t group, row_group;  // inputs, and outputs, that share a scale; group 0: all inputs
    int32_t format;            // 0 int8, 1 fp8, 2 int4, 3 mxfp4, whose scales are exponents in bytes
    int32_t scale_dtype;       // 0 fp32, 1 bf16
};

// As moe_lora_expert_linear (ids null: a dense layer).
MOE_LORA_API int32_t moe_lora_packed_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                            int64_t x_rows, const PackedWeights* weights, const void* bias,
                                            const int32_t* ids, int64_t tokens, int64_t top_k, int64_t num_experts,
                                            void* out, int64_t num_out, int64_t width);

// The same over int8 or int4 with x in bytes, quantised row by row, and integer sums; layouts: dynamic.inl. int8: group is unused.
MOE_LORA_API int32_t moe_lora_dynamic_linear(int32_t bits, int32_t dtype, int32_t threads, const void* x,
                                             int64_t x_stride, int64_t x_rows, const void* data, const void* scale,
                                             int64_t group, const void* bias, const int32_t* ids, int64_t tokens,
                                             int64_t top_k, int64_t num_experts, void* out, int64_t num_out,
                                             int64_t width);

struct LoraShrunk;

// h = x A^T of every row with an adapter. Returns the address of a LoraShrunk with h and the plan, for exactly one
// call of expand or release; or a refusal.
MOE_LORA_API int64_t moe_lora_shrink(int32_t kernel, int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                     int64_t x_rows, const int32_t* ids, int64_t tokens, int64_t top_k,
                                     const LoraSite* site, int64_t layer, const int32_t* token_slots,
                                     const LoraSlots* slots, const void* arena, int64_t arena_bytes);

// y += sign * round(scale * h B) for the same rows; the arena must be unchanged. y_dtype: of x, or
// fp32, without rounding.
MOE_LORA_API void moe_lora_expand(int32_t threads, LoraShrunk* shrunk, int32_t y_dtype, float sign, void* y,
                                  int64_t y_stride);
MOE_LORA_API void moe_lora_release(LoraShrunk* shrunk);

// A linear layer's weights at a LoRA site, constant over steps.
struct SiteWeights {
    int32_t dtype, kind;       // of x, bias and output; 0 plain, 1 packed, 2 dynamic
    int32_t dynamic_bits;      // 8 or 4
    PackedWeights packed;      // plain: only its data
    const void* bias;          // or null
    int64_t num_experts;       // 0: dense
    int64_t first_expert;      // ids number the whole model's experts
    int64_t num_out, width;
};

// The adapters of a step's rows at a site; the operands of moe_lora_shrink.
struct SiteRows {
    const LoraSite* site;
    const int32_t* token_slots;  // null: no row has a delta
    const LoraSlots* slots;
    const void* arena;
    int64_t arena_bytes;
    int32_t kernel;
};

// out = x W^T + bias + deltas: shrink, linear layer and expand in one call. A refusal is one of shrink.
MOE_LORA_API int32_t moe_lora_site_linear(int32_t threads, const SiteWeights* weights, const SiteRows* rows,
                                          int64_t layer, const void* x, int64_t x_stride, int64_t x_rows,
                                          const int32_t* ids, int64_t tokens, int64_t top_k, void* out);

// out: [rows, num_heads, head_dim] contiguous. sinks: fp32 or null.
MOE_LORA_API int32_t moe_lora_paged_attention(int32_t dtype, int32_t threads, const void* q, int64_t q_stride,
                                              const void* k, int64_t k_stride, const void* v, int64_t v_stride,
                                              const float* sinks, float scale, int64_t window, int64_t layer,
                                              const int32_t* query_start, const int32_t* seq_lens,
                                              const int32_t* block_tables, int64_t num_seqs, int64_t table_stride,
                                              const KvPages* pages, void* arena, int64_t arena_bytes, int64_t rows,
                                              int64_t num_heads, void* out);

// Heads of q, k and v side by side; k_dim, v_dim: of one head.
struct DeltaSizes {
    int64_t num_k_heads, num_v_heads, k_dim, v_dim, conv_width;
};

// qkv, conv [channels, conv_width] and out [rows, num_v_heads, v_dim] have `dtype`. spans: [num_seqs, 3] first row,
// end, and 1 for a sequence without a state. marks: [num_marks, 2] a sequence, and an end of rows whose state is kept
// too. pages: [num_seqs, pages_stride], of the states before the step. states: [num_seqs + num_marks, state_stride],
// those after it, then those at marks: conv_width - 1 rows of qkv, then [k_dim, v_dim] of each value head.
MOE_LORA_API int32_t moe_lora_delta_rule(int32_t dtype, int32_t threads, const void* qkv, int64_t qkv_stride,
                                         const void* conv, const float* log_decay, const float* beta,
                                         const DeltaSizes* sizes, const int64_t* spans, int64_t num_seqs,
                                         const int64_t* marks, int64_t num_marks, const int64_t* pages,
                                         int64_t pages_stride, const void* arena, int64_t page_bytes,
                                         int64_t arena_bytes, int64_t rows, float* states, int64_t state_stride,
                                         void* out);

// tokens[row]: of the logits [rows, vocab], overwritten. settings: [rows, 3] temperature (0: the likeliest token),
// top_p, min_p. numbers: [rows, 3] top_k (0: all), seed, position.
MOE_LORA_API void moe_lora_draw(int32_t threads, float* logits, int64_t rows, int64_t vocab, const float* settings,
                                const int64_t* numbers, int64_t* tokens);

// Logits of these rows become -inf where the bit of the token is 0. words: [num_rows, words_stride].
MOE_LORA_API void moe_lora_mask(int32_t threads, float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows,
                                const uint32_t* words, int64_t words_stride);
