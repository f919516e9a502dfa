// SPDX-License-Identifier: Apache-2.0
// Draws next tokens as kernels/triton/sampling.py does, and masks logits.
//
// Plain loops over a row, compiled for several instruction sets; no operation changes its bits with the set.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "kernels.h"
#include "schedule.h"

#if defined(__x86_64__) && defined(__gnu_linux__)
#define FOR_EACH_ISA __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define FOR_EACH_ISA
#endif

namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();
constexpr int kLanes = 64, kBucketShift = 16, kNumBuckets = (0x3F800000 >> kBucketShift) + 1;

int32_t bits_of(float value) {
    int32_t bits;
    memcpy(&bits, &value, 4);
    return bits;
}

// Tokens above a value, and those of this value up to an index.
struct Cut {
    int32_t value = -1;
    int64_t index = 0;
    bool keeps(int32_t bits, int64_t at) const { return bits > value || (bits == value && at <= index); }
};

FOR_EACH_ISA
float highest_of(const float* row, int64_t vocab) {
    float lanes[kLanes];
    std::fill_n(lanes, kLanes, kLowest);
    int64_t i = 0;
    for (; i + kLanes <= vocab; i += kLanes)
        for (int lane = 0; lane < kLanes; lane++) lanes[lane] = std::max(lanes[lane], row[i + lane]);
    float highest = *std::max_element(lanes, lanes + kLanes);
    for (; i < vocab; i++) highest = std::max(highest, row[i]);
    return highest;
}

// The first token of the highest logit; NaN before it counts as highest.
FOR_EACH_ISA
int64_t likeliest(const float* row, int64_t vocab, float highest) {
    int64_t first = 0;
    for (; first + kLanes <= vocab; first += kLanes) {
        int num = 0;
        for (int lane = 0; lane < kLanes; lane++) num += !(row[first + lane] < highest);
        if (num) break;
    }
    for (int64_t i = first; i < vocab; i++)
        if (!(row[i] < highest)) return i;
    return 0;
}

// row = exp(row / temperature - peak), at most 1; 0 for NaN and below the smallest normal number.
FOR_EACH_ISA
void make_relative(float* row, int64_t vocab, float temperature, float peak) {
    for (int64_t i = 0; i < vocab; i++) {
        const float x = row[i] / temperature - peak;
        const float shift = 12582912.f;  // 1.5 * 2^23 rounds to whole numbers
        const float whole = (x * 1.44269504f + shift) - shift;
        const float r = (x - whole * 0.693359375f) + whole * 2.12194440e-4f;
        float p = 1.9875691500e-4f;
        p = p * r + 1.3981999507e-3f;
        p = p * r + 8.3334519073e-3f;
        p = p * r + 4.1665795894e-2f;
        p = p * r + 1.6666665459e-1f;
        p = p * r + 5.0000001201e-1f;
        p = (p * r * r + r) + 1.f;
        const bool inside = x >= -87.f && x <= 0.f;
        const int32_t power = (int32_t(inside ? whole : 0.f) + 127) << 23;
        float scale;
        memcpy(&scale, &power, 4);
        row[i] = inside ? std::min(p * scale, 1.f) : 0.f;
    }
}

double mass_of(const float* e, int64_t vocab, Cut cut) {
    double mass = 0;
    for (int64_t i = 0; i < vocab; i++)
        if (cut.keeps(bits_of(e[i]), i)) mass += e[i];
    return mass;
}

// A cut to the likeliest kept tokens whose number, or mass, is at least `bound`.
Cut cut_at(const float* e, int64_t vocab, double bound, bool by_number, Cut cut) {
    struct Bucket {
        double mass;
        int64_t number;
    };
    thread_local std::vector<Bucket> buckets;
    buckets.assign(kNumBuckets, {0, 0});
    for (int64_t i = 0; i < vocab; i++) {
        const int32_t bits = bits_of(e[i]);
        if (bits == 0 || !cut.keeps(bits, i)) continue;
        Bucket& bucket = buckets[bits >> kBucketShift];
        bucket.mass += e[i], bucket.number++;
    }
    double sum = 0;
    int64_t at = kNumBuckets;
    while (--at >= 0) {
        const double more = by_number ? double(buckets[at].number) : buckets[at].mass;
        if (sum + more >= bound) break;
        sum += more;
    }
    if (at < 0) return cut;  // all tokens together have less
    std::vector<std::pair<int32_t, int64_t>> inside;
    inside.reserve(buckets[at].number);
    for (int64_t i = 0; i < vocab; i++) {
        const int32_t bits = bits_of(e[i]);
        if (bits >> kBucketShift == at && bits && cut.keeps(bits, i)) inside.emplace_back(-bits, i);
    }
    std::sort(inside.begin(), inside.end());
    for (const auto& [negative, index] : inside) {
        cut = {-negative, index};
        sum += by_number ? 1 : double(e[index]);
        if (sum >= bound) break;
    }
    return cut;
}

// Words 4 * group ... + 3 of numpy's Philox(key=seed, counter=position << 192).
// Source: Philox4x64-10, Salmon et al., SC 2011; numpy counts up before it draws.
void philox(uint64_t group, uint64_t position, uint64_t seed, uint64_t c[4]) {
    c[0] = group + 1, c[1] = 0, c[2] = 0, c[3] = position;
    uint64_t k0 = seed, k1 = 0;
    for (int round = 0; round < 10; round++) {
        const auto first = (unsigned __int128)c[0] * 0xD2E7470EE14C6C93u;
        const auto second = (unsigned __int128)c[2] * 0xCA5A826395121157u;
        c[0] = uint64_t(second >> 64) ^ c[1] ^ k0, c[1] = uint64_t(second);
        c[2] = uint64_t(first >> 64) ^ c[3] ^ k1, c[3] = uint64_t(first);
        k0 += 0x9E3779B97F4A7C15u, k1 += 0xBB67AE8584CAA73Bu;
    }
}

// The kept token of highest e / noise; one is kept.
FOR_EACH_ISA
int64_t race(const float* e, int64_t vocab, float min_p, uint64_t seed, uint64_t position, Cut cut) {
    // The least noise is above 2^-34.
    const float lowest = std::max(min_p, std::numeric_limits<float>::min());
    float best = 0, least = lowest;
    int64_t found = 0;
    for (int64_t first = 0; first < vocab; first += 8) {
        const int64_t num = std::min<int64_t>(8, vocab - first);
        float kept[8] = {};
        memcpy(kept, e + first, num * 4);
        float most = 0;
        for (int i = 0; i < 8; i++) {
            kept[i] = cut.keeps(bits_of(kept[i]), first + i) ? kept[i] : 0.f;
            most = std::max(most, kept[i]);
        }
        if (most < least) continue;
        uint64_t words[4];
        philox(uint64_t(first / 8), position, seed, words);
        uint32_t x[8];
        memcpy(x, words, 32);
        // u = (x + 1/2) / 2^32.  -log(u) is above 1 - u: most tokens need no logarithm.
        int num_near = 0;
        for (int i = 0; i < 8; i++) num_near += kept[i] >= best * (float(int32_t(~x[i] >> 1)) * 0x1p-31f) * 0.999f;
        if (!num_near) continue;
        for (int i = 0; i < num; i++) {
            if (!(kept[i] >= lowest)) continue;
            const float score = kept[i] / float(-std::log((double(x[i]) + 0.5) * 0x1p-32));
            if (score > best) best = score, found = first + i;
        }
        least = std::max(lowest, best * 0x1p-34f);
    }
    return found;
}

int64_t draw_row(float* row, int64_t vocab, const float* settings, const int64_t* numbers) {
    const float temperature = settings[0], top_p = settings[1], min_p = settings[2];
    const float highest = highest_of(row, vocab);
    if (!(temperature > 0) || !std::isfinite(highest / temperature)) return likeliest(row, vocab, highest);
    make_relative(row, vocab, temperature, highest / temperature);
    Cut cut;
    if (numbers[0] > 0 && numbers[0] < vocab) cut = cut_at(row, vocab, double(numbers[0]), true, cut);
    if (top_p < 1) cut = cut_at(row, vocab, mass_of(row, vocab, cut) * top_p, false, cut);
    return race(row, vocab, min_p, uint64_t(numbers[1]), uint64_t(numbers[2]), cut);
}

FOR_EACH_ISA
void mask_row(float* row, const uint32_t* words, int64_t vocab) {
    const int64_t whole = vocab / 32;
    for (int64_t word = 0; word < whole; word++) {
        const uint32_t bits = words[word];
        if (bits == ~0u) continue;
        float* at = row + 32 * word;
        for (int i = 0; i < 32; i++) at[i] = bits & (1u << i) ? at[i] : kLowest;
    }
    for (int64_t i = 32 * whole; i < vocab; i++)
        if (!(words[whole] >> (i % 32) & 1)) row[i] = kLowest;
}

}  // namespace

void moe_lora_draw(int32_t threads, float* logits, int64_t rows, int64_t vocab, const float* settings,
                   const int64_t* numbers, int64_t* tokens) {
    run_tasks(rows, useful_threads(threads, rows * vocab * 4), [&](int64_t row, int64_t) {
        tokens[row] = draw_row(logits + row * vocab, vocab, settings + 3 * row, numbers + 3 * row);
    });
}

void moe_lora_mask(int32_t threads, float* logits, int64_t vocab, const int64_t* rows, int64_t num_rows,
                   const uint32_t* words, int64_t words_stride) {
    run_tasks(num_rows, useful_threads(threads, num_rows * vocab * 4), [&](int64_t i, int64_t) {
        mask_row(logits + rows[i] * vocab, words + i * words_stride, vocab);
    });
}
