// SPDX-License-Identifier: Apache-2.0
// Attention over paged keys and values: writes this step's K and V, then each task attends a block of rows and
// all heads of one group over its sequence, with an online softmax over chunks of pages.
#include <cmath>
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "tiles.h"

namespace {

constexpr int64_t kQueriesPerTask = 24, kChunkTokens = 128;

struct Attention {
    const char *q, *k, *v;
    char *arena, *out;
    const float* sinks;
    const int32_t *query_start, *seq_lens, *block_tables;
    int64_t q_stride, k_stride, v_stride, window, layer, num_seqs, table_stride, arena_bytes, rows, num_heads;
    KvPages pages;
    int32_t dtype;
    float scale;

    int64_t size() const { return item_size(dtype); }
    int64_t group() const { return num_heads / pages.num_kv_heads; }
    int64_t head_bytes() const { return pages.head_dim * size(); }
    bool is_padding(int64_t seq) const { return seq_lens[seq] == 0 || query_start[seq] == query_start[seq + 1]; }
    int64_t first_position(int64_t seq) const {
        return seq_lens[seq] - (query_start[seq + 1] - query_start[seq]);
    }
    // Keys of one head in the page of `position`, from that token on; values follow after value_bytes, which may be 0.
    char* keys(int64_t seq, int64_t kv_head, int64_t position) const {
        const int64_t page = block_tables[seq * table_stride + position / pages.block_size];
        const int64_t token = kv_head * pages.block_size + position % pages.block_size;
        return arena + page * pages.page_bytes + layer * pages.layer_bytes + token * head_bytes();
    }
};

// Rows [row, row + num_rows) of a sequence, all heads of one group.
struct Task {
    int64_t seq, kv_head, row, num_rows;
};

struct Scratch {
    std::vector<float> logits, sums;
    std::vector<const void*> q;
    std::vector<void*> logit_rows, sum_rows;
    std::vector<SoftmaxState> state;
};

int32_t check(const Attention& a) {
    const int64_t num_pages = a.arena_bytes / a.pages.page_bytes;
    for (int64_t seq = 0; seq < a.num_seqs; seq++) {
        const int64_t begin = a.query_start[seq], end = a.query_start[seq + 1];
        if (begin < 0 || end < begin || end > a.rows) return kBadSequence;
        if (a.is_padding(seq)) continue;
        const int64_t blocks = (a.seq_lens[seq] + a.pages.block_size - 1) / a.pages.block_size;
        if (a.first_position(seq) < 0 || blocks > a.table_stride) return kBadSequence;
        const int64_t low = a.window > 0 ? std::max<int64_t>(0, a.first_position(seq) - a.window + 1) : 0;
        for (int64_t b = low / a.pages.block_size; b < blocks; b++) {
            const int64_t page = a.block_tables[seq * a.table_stride + b];
            if (page < 0 || page >= num_pages) return kBadPage;
        }
    }
    return 0;
}

void write_pages(const Attention& a, int64_t seq) {
    const int64_t bytes = a.head_bytes();
    for (int64_t row = a.query_start[seq]; row < a.query_start[seq + 1]; row++) {
        const int64_t position = a.first_position(seq) + row - a.query_start[seq];
        for (int64_t head = 0; head < a.pages.num_kv_heads; head++) {
            char* keys = a.keys(seq, head, position);
            memcpy(keys, a.k + row * a.k_stride * a.size() + head * bytes, bytes);
            memcpy(keys + a.pages.value_bytes, a.v + row * a.v_stride * a.size() + head * bytes, bytes);
        }
    }
}

void prepare(const Attention& a, const Task& t, int64_t chunk, Scratch& s) {
    const int64_t group = a.group(), queries = t.num_rows * group, dim = a.pages.head_dim;
    s.logits.resize(queries * chunk);
    s.sums.assign(queries * dim, 0.0f);
    s.q.resize(queries), s.logit_rows.resize(queries), s.sum_rows.resize(queries), s.state.resize(queries);
    for (int64_t i = 0; i < queries; i++) {
        const int64_t row = a.query_start[t.seq] + t.row + i / group, head = t.kv_head * group + i % group;
        s.q[i] = a.q + (row * a.q_stride + head * dim) * a.size();
        s.logit_rows[i] = &s.logits[i * chunk];
        s.sum_rows[i] = &s.sums[i * dim];
        s.state[i] = a.sinks ? SoftmaxState{a.sinks[head], 1.0f, 1.0f} : SoftmaxState{-INFINITY, 0.0f, 1.0f};
    }
}

// Tokens [begin, end) of the sequence, begin being the start of a page; pages before token `low` are not read.
void attend_chunk(const Attention& a, const Task& t, int64_t low, int64_t begin, int64_t end, int64_t chunk,
                  Scratch& s) {
    const int64_t queries = int64_t(s.q.size()), dim = a.pages.head_dim, block = a.pages.block_size;
    const auto dot = a.dtype == kF32 ? isa().dot_f32 : isa().dot_bf16_to_f32;
    const auto sum = a.dtype == kF32 ? isa().sum_f32 : isa().sum_bf16_to_f32;
    const int64_t first_page = std::max(begin, low / block * block);
    for (int64_t at = first_page; at < end; at += block) {
        const char* keys = a.keys(t.seq, t.kv_head, at);
        const char* next = keys + a.pages.value_bytes;
        dot({s.q.data(), keys, nullptr, s.logit_rows.data(), queries, std::min(block, end - at), dim, at - begin, next});
    }
    const int64_t padded = round_up(end - begin, 16);
    for (int64_t i = 0; i < queries; i++) {
        const int64_t position = a.first_position(t.seq) + t.row + i / a.group();
        const int64_t row_low = a.window > 0 ? position - a.window + 1 : 0;
        const auto clip = [&](int64_t token) { return std::clamp<int64_t>(token - begin, 0, end - begin); };
        isa().softmax_row(&s.logits[i * chunk], padded, clip(row_low), clip(position + 1), a.scale, s.state[i]);
        if (s.state[i].rescale != 1.0f) isa().scale_row(&s.sums[i * dim], dim, s.state[i].rescale);
    }
    for (int64_t at = first_page; at < end; at += block) {
        const char* values = a.keys(t.seq, t.kv_head, at) + a.pages.value_bytes;
        sum({&s.logits[at - begin], values, s.sum_rows.data(), queries, std::min(block, end - at), dim, chunk, dim, 1.0f,
             nullptr, 0});
    }
}

void attend(const Attention& a, const Task& t) {
    static thread_local Scratch s;
    const int64_t block = a.pages.block_size, span = block * std::max<int64_t>(1, kChunkTokens / block);
    const int64_t chunk = round_up(span, 16), first = a.first_position(t.seq) + t.row, end = first + t.num_rows;
    prepare(a, t, chunk, s);
    const int64_t low = a.window > 0 ? std::max<int64_t>(0, first - a.window + 1) : 0;
    // Chunks start at multiples of `span`: a row's sums do not depend on further rows.
    for (int64_t begin = low / span * span; begin < end; begin += span)
        attend_chunk(a, t, low, begin, std::min(begin + span, end), chunk, s);
    const auto store = a.dtype == kF32 ? isa().store_f32 : isa().store_bf16;
    const int64_t group = a.group(), dim = a.pages.head_dim;
    for (int64_t i = 0; i < int64_t(s.q.size()); i++) {
        const int64_t row = a.query_start[t.seq] + t.row + i / group, head = t.kv_head * group + i % group;
        store(&s.sums[i * dim], dim, 1.0f / s.state[i].sum, a.out + (row * a.num_heads + head) * a.head_bytes());
    }
}

// Tasks of all sequences, and the bytes of keys and values read.
std::vector<Task> cut(const Attention& a, int64_t& key_bytes) {
    std::vector<Task> tasks;
    const int64_t block_rows = std::max<int64_t>(1, kQueriesPerTask / a.group());
    for (int64_t seq = 0; seq < a.num_seqs; seq++) {
        if (a.is_padding(seq)) continue;
        const int64_t query_len = a.query_start[seq + 1] - a.query_start[seq];
        for (int64_t row = query_len; row > 0; row -= block_rows)  // the longest rows first
            for (int64_t head = 0; head < a.pages.num_kv_heads; head++) {
                const int64_t first = std::max<int64_t>(0, row - block_rows);
                tasks.push_back({seq, head, first, row - first});
                key_bytes += a.seq_lens[seq] * a.head_bytes() * 2;
            }
    }
    return tasks;
}

}  // namespace

int32_t moe_lora_paged_attention(int32_t dtype, int32_t threads, const void* q, int64_t q_stride, const void* k,
                                 int64_t k_stride, const void* v, int64_t v_stride, const float* sinks, float scale,
                                 int64_t window, int64_t layer, const int32_t* query_start, const int32_t* seq_lens,
                                 const int32_t* block_tables, int64_t num_seqs, int64_t table_stride,
                                 const KvPages* pages, void* arena, int64_t arena_bytes, int64_t rows,
                                 int64_t num_heads, void* out) {
    const Attention a{static_cast<const char*>(q), static_cast<const char*>(k), static_cast<const char*>(v),
                      static_cast<char*>(arena), static_cast<char*>(out), sinks, query_start, seq_lens, block_tables,
                      q_stride, k_stride, v_stride, window, layer, num_seqs, table_stride, arena_bytes, rows,
                      num_heads, *pages, dtype, scale};
    const int32_t refusal = check(a);
    if (refusal) return refusal;
    const int64_t row_bytes = num_heads * a.head_bytes();
    memset(a.out, 0, rows * row_bytes);
    int64_t key_bytes = 0;
    const std::vector<Task> tasks = cut(a, key_bytes);
    threads = useful_threads(threads, key_bytes);
    run_tasks(num_seqs, rows * row_bytes > (256 << 10) ? threads : 1, [&](int64_t seq, int64_t) {
        if (!a.is_padding(seq)) write_pages(a, seq);
    });
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) { attend(a, tasks[i]); });
    return 0;
}
