// SPDX-License-Identifier: Apache-2.0
// The gated delta rule over states in pages: a task has one value head of one sequence, token by token. Its memory
// stays in the caches of a core; channels are laid out as k, q and v, each padded with zeros.
#include <cmath>
#include <vector>

#include "kernels.h"
#include "schedule.h"
#include "tiles.h"

namespace {

constexpr int64_t kBlockTokens = 32;

struct DeltaRule {
    const void *qkv, *conv;
    const float *log_decay, *beta;
    const int64_t *spans, *marks, *pages;
    const char* arena;
    float* states;
    char* out;
    DeltaSizes sizes;
    int64_t qkv_stride, num_seqs, num_marks, pages_stride, page_bytes, arena_bytes, rows, state_stride;
    int32_t dtype;

    int64_t channels() const { return 2 * sizes.num_k_heads * sizes.k_dim + sizes.num_v_heads * sizes.v_dim; }
    int64_t first_row(int64_t seq) const { return spans[3 * seq]; }
    int64_t end_row(int64_t seq) const { return spans[3 * seq + 1]; }
    bool is_new(int64_t seq) const { return spans[3 * seq + 2] != 0; }
    int64_t history() const { return (sizes.conv_width - 1) * channels(); }
    int64_t floats() const { return history() + sizes.num_v_heads * sizes.k_dim * sizes.v_dim; }
    // Numbers of the state before the step; zeros for a new sequence.
    void read(int64_t seq, int64_t at, int64_t count, float* to) const {
        if (is_new(seq)) return void(memset(to, 0, count * 4));
        for (const int64_t in_page = page_bytes / 4; count > 0;) {
            const int64_t first = at % in_page, num = std::min(count, in_page - first);
            memcpy(to, arena + pages[seq * pages_stride + at / in_page] * page_bytes + first * 4, num * 4);
            at += num, to += num, count -= num;
        }
    }
};

// Channels of a head: where in q, k and v, how many, and where in the scratch.
struct Part {
    int64_t from, size, to;
};

// Numbers from the start of a cache line on.
class Floats {
public:
    void resize(int64_t count) { lines.resize(size_t(count + 15) / 16); }
    void clear(int64_t count) { lines.assign(size_t(count + 15) / 16, Line{}); }
    float* at(int64_t i) { return lines[0].of + i; }

private:
    struct alignas(64) Line {
        float of[16];
    };
    std::vector<Line> lines;
};

struct Scratch {
    Floats x, mixed, conv, memory, out;
    float decay[kBlockTokens], beta[kBlockTokens];
};

int32_t check(const DeltaRule& a) {
    const int64_t num_pages = a.arena_bytes / a.page_bytes, last = (4 * a.floats() + a.page_bytes - 1) / a.page_bytes;
    for (int64_t seq = 0; seq < a.num_seqs; seq++) {
        if (a.first_row(seq) < 0 || a.end_row(seq) < a.first_row(seq) || a.end_row(seq) > a.rows) return kBadSequence;
        for (int64_t i = 0; i < last; i++) {
            const int64_t page = a.pages[seq * a.pages_stride + i];
            if (page < 0 || page >= num_pages) return kBadPage;
        }
    }
    for (int64_t i = 0; i < a.num_marks; i++) {
        const int64_t seq = a.marks[2 * i], row = a.marks[2 * i + 1];
        if (seq < 0 || seq >= a.num_seqs || row <= a.first_row(seq) || row > a.end_row(seq)) return kBadSequence;
    }
    return 0;
}

float widen(float value) { return value; }
float widen(bf16 value) {
    const uint32_t bits = uint32_t(value.bits) << 16;
    float result;
    memcpy(&result, &bits, 4);
    return result;
}

template <class T>
void load_row(const void* from, int64_t at, int64_t count, float* to) {
    const T* values = static_cast<const T*>(from) + at;
    for (int64_t i = 0; i < count; i++) to[i] = widen(values[i]);
}

// Column `at` of rows `stride` apart.
template <class T>
void load_column(const void* from, int64_t at, int64_t count, int64_t stride, float* to) {
    const T* values = static_cast<const T*>(from) + at;
    for (int64_t i = 0; i < count; i++) to[i] = widen(values[i * stride]);
}

void run_head(const DeltaRule& a, int64_t seq, int64_t head) {
    static thread_local Scratch s;
    const auto load = a.dtype == kF32 ? load_row<float> : load_row<bf16>;
    const auto load_weights = a.dtype == kF32 ? load_column<float> : load_column<bf16>;
    const auto store = a.dtype == kF32 ? isa().store_f32 : isa().store_bf16;
    const DeltaSizes& z = a.sizes;
    const int64_t k_padded = round_up(z.k_dim, 16), tiles = round_up(z.v_dim, kDeltaColumns) / kDeltaColumns;
    const int64_t channels = 2 * k_padded + tiles * kDeltaColumns, before = z.conv_width - 1;
    const int64_t share = z.num_v_heads / z.num_k_heads, k_head = head / share, k_size = z.num_k_heads * z.k_dim;
    const Part parts[] = {{k_size + k_head * z.k_dim, z.k_dim, 0},
                          {k_head * z.k_dim, z.k_dim, k_padded},
                          {2 * k_size + head * z.v_dim, z.v_dim, 2 * k_padded}};
    const int64_t tile_floats = k_padded * kDeltaColumns, matrix = a.history() + head * z.k_dim * z.v_dim;
    s.x.clear((before + kBlockTokens) * channels);
    s.conv.clear(z.conv_width * channels);
    s.memory.clear(tiles * tile_floats);
    s.mixed.resize(kBlockTokens * channels), s.out.resize(kBlockTokens * kDeltaColumns);
    for (const Part& part : parts)
        for (int64_t w = 0; w <= before; w++) {
            load_weights(a.conv, part.from * z.conv_width + w, part.size, z.conv_width, s.conv.at(w * channels + part.to));
            if (w < before) a.read(seq, w * a.channels() + part.from, part.size, s.x.at(w * channels + part.to));
        }
    const auto each_run = [&](const auto& run) {  // of neighbouring numbers: in the state, how many, in the scratch
        for (int64_t row = 0; row < z.k_dim; row++)
            for (int64_t tile = 0; tile < tiles; tile++)
                run(matrix + row * z.v_dim + tile * kDeltaColumns, std::min(kDeltaColumns, z.v_dim - tile * kDeltaColumns),
                    s.memory.at(tile * tile_floats + row * kDeltaColumns));
    };
    each_run([&](int64_t at, int64_t count, float* to) { a.read(seq, at, count, to); });
    const auto write = [&](float* state) {
        for (const Part& part : parts)
            for (int64_t w = 0; (part.to == 2 * k_padded || head % share == 0) && w < before; w++)
                memcpy(state + w * a.channels() + part.from, s.x.at(w * channels + part.to), part.size * 4);
        each_run([&](int64_t at, int64_t count, const float* from) { memcpy(state + at, from, count * 4); });
    };
    for (int64_t row = a.first_row(seq), tokens; row < a.end_row(seq); row += tokens) {
        tokens = std::min(kBlockTokens, a.end_row(seq) - row);
        for (int64_t i = 0; i < a.num_marks; i++)
            if (a.marks[2 * i] == seq && a.marks[2 * i + 1] > row) tokens = std::min(tokens, a.marks[2 * i + 1] - row);
        for (int64_t i = 0; i < tokens; i++) {
            for (const Part& part : parts)
                load(a.qkv, (row + i) * a.qkv_stride + part.from, part.size, s.x.at((before + i) * channels + part.to));
            s.decay[i] = std::exp(a.log_decay[(row + i) * z.num_v_heads + head]);
            s.beta[i] = a.beta[(row + i) * z.num_v_heads + head];
        }
        isa().delta_mix({s.x.at(0), s.conv.at(0), s.mixed.at(0), tokens, channels, z.conv_width, k_padded, z.k_dim});
        for (int64_t tile = 0; tile < tiles; tile++) {
            const int64_t column = tile * kDeltaColumns, count = std::min(kDeltaColumns, z.v_dim - column);
            isa().delta_tokens({s.mixed.at(0), s.mixed.at(2 * k_padded + column), s.decay, s.beta,
                                s.memory.at(tile * tile_floats), s.out.at(0), tokens, channels, k_padded});
            for (int64_t i = 0; i < tokens; i++)
                store(s.out.at(i * kDeltaColumns), count, 1.0f,
                      a.out + (((row + i) * z.num_v_heads + head) * z.v_dim + column) * item_size(a.dtype));
        }
        memmove(s.x.at(0), s.x.at(tokens * channels), before * channels * 4);
        for (int64_t i = 0; i < a.num_marks; i++)
            if (a.marks[2 * i] == seq && a.marks[2 * i + 1] == row + tokens) write(a.states + (a.num_seqs + i) * a.state_stride);
    }
    write(a.states + seq * a.state_stride);
}

}  // namespace

int32_t moe_lora_delta_rule(int32_t dtype, int32_t threads, const void* qkv, int64_t qkv_stride, const void* conv,
                            const float* log_decay, const float* beta, const DeltaSizes* sizes, const int64_t* spans,
                            int64_t num_seqs, const int64_t* marks, int64_t num_marks, const int64_t* pages,
                            int64_t pages_stride, const void* arena,
                            int64_t page_bytes, int64_t arena_bytes, int64_t rows, float* states,
                            int64_t state_stride, void* out) {
    const DeltaRule a{qkv, conv, log_decay, beta, spans, marks, pages, static_cast<const char*>(arena), states,
                      static_cast<char*>(out), *sizes, qkv_stride, num_seqs, num_marks, pages_stride, page_bytes, arena_bytes,
                      rows, state_stride, dtype};
    const int32_t refusal = check(a);
    if (refusal) return refusal;
    const int64_t heads = sizes->num_v_heads, matrix_bytes = sizes->k_dim * sizes->v_dim * 4;
    threads = useful_threads(threads, (rows + 2 * num_seqs) * heads * matrix_bytes);
    run_tasks(num_seqs * heads, threads, [&](int64_t i, int64_t) { run_head(a, i / heads, i % heads); });
    return 0;
}
