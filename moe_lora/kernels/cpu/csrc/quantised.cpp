// SPDX-License-Identifier: Apache-2.0
// Linear layers over quantised weights.
//
// Weights only: a dot over packed weights runs if the instruction set has one for that many rows of x. Otherwise
// a block of weight rows is unpacked into the cache, for the dots of linear.cpp. Either way a
// result has the bits of the same layer over the dequantised weights. Dynamic: x is quantised too.
#include <cmath>
#include <cstdlib>
#include <memory>

#include "kernels.h"
#include "schedule.h"
#include "segments.h"
#include "tiles.h"

namespace {

// Most rows of x that count as few; unpacked weight rows beside few rows of x, and beside many: shares of the first
// and of the second level cache.
constexpr int64_t kFewRows = 12, kFewRowsBytes = 24 << 10, kManyRowsBytes = 128 << 10;

// Growing memory of one thread, aligned to cache lines.
char* thread_buffer(int64_t bytes) {
    struct Free {
        void operator()(char* p) const { free(p); }
    };
    static thread_local std::unique_ptr<char, Free> buffer;
    static thread_local int64_t held = 0;
    if (bytes > held) {
        buffer.reset(static_cast<char*>(aligned_alloc(64, round_up(bytes, 64))));
        if (!buffer) abort();
        held = bytes;
    }
    return buffer.get();
}

enum Format : int32_t { kFormatInt8 = 0, kFormatFp8 = 1, kFormatInt4 = 2, kFormatMxfp4 = 3 };

// Values of the codes of 4 bits; of mxfp4 (E2M1) doubled, beside half the scale, as in `quantised.unpack`.
constexpr float kInt4Values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
constexpr float kMxfp4Values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};

float from_bits(uint32_t bits) {
    float value;
    memcpy(&value, &bits, 4);
    return value;
}

// 2 ** (exponent - 128), the lowest two of which are denormal.
float half_power(uint8_t exponent) {
    const int32_t normal = (exponent - 1) * (1 << 23), denormal = exponent ? 0x400000 : 0x200000;
    return from_bits(uint32_t(std::max(normal, denormal)));
}

// Matrices of quantised weights, with rows as a PackedTile.
class PackedReader {
   public:
    PackedReader(const PackedWeights& weights, int64_t num_out, int64_t width)
        : weights_(weights), num_out_(num_out), width_(width), group_(weights.group ? weights.group : width) {
        groups_ = weights.group ? (width + group_ - 1) / group_ : 1;
        bytes_ = weights.format <= kFormatFp8 ? width : (width + 63) / 64 * 32;
    }
    int64_t row_bytes() const { return bytes_; }
    int64_t num_scales() const { return weights_.zero ? 2 * groups_ : groups_; }
    Codes codes() const {
        if (weights_.format == kFormatFp8) return kFp8;
        return weights_.format != kFormatInt8 ? kNibbles : weights_.zero ? kInt8Zero : kInt8;
    }
    bool fits_vectors() const { return groups_ == 1 || group_ % 32 == 0; }
    // The scales of these rows are such that vectors round as the dequantised weights are rounded.
    bool scales_fit(const PackedTile& tile) const {
        if (weights_.format > kFormatFp8) return true;
        uint32_t outside = 0;  // without a branch: the compiler makes vectors of it
        for (int64_t i = 0; i < tile.num_w * groups_; i++) {
            uint32_t size;
            memcpy(&size, tile.scale + i, 4);
            size &= 0x7fffffff;
            outside |= uint32_t(size != 0) & uint32_t(size - kLeastScaleBits > kMostScaleBits - kLeastScaleBits);
        }
        return !outside;
    }

    // Rows [n, n + num) of an expert's matrix; scales: num * num_scales().
    PackedTile rows(int64_t expert, int64_t n, int64_t num, float* scales) const {
        const int64_t held = (num_out_ + weights_.row_group - 1) / weights_.row_group, row = expert * num_out_ + n;
        const int64_t count = num * groups_, scale_row = expert * held;
        float* const zeros = weights_.zero ? scales + count : nullptr;
        if (weights_.row_group == 1)
            widen((scale_row + n) * groups_, count, scales);
        else
            for (int64_t i = 0; i < num; i++)
                widen((scale_row + (n + i) / weights_.row_group) * groups_, groups_, scales + i * groups_);
        const int8_t* const zero = static_cast<const int8_t*>(weights_.zero) + row * groups_;
        for (int64_t i = 0; zeros && i < count; i++) zeros[i] = zero[i];
        const float* const values = weights_.format == kFormatInt4 ? kInt4Values : kMxfp4Values;
        const char* const w = static_cast<const char*>(weights_.data) + row * bytes_;
        const DotTile tile{nullptr, w, nullptr, nullptr, 0, num, width_, 0, w + num * bytes_};
        const bool exact = weights_.format == kFormatMxfp4 && !zeros;
        return {tile, scales, zeros ? count : 0, values, group_, groups_, bytes_, exact};
    }

   private:
    // Scales in fp32.
    void widen(int64_t first, int64_t count, float* to) const {
        if (weights_.format == kFormatMxfp4) {
            const uint8_t* const exponents = static_cast<const uint8_t*>(weights_.scale) + first;
            for (int64_t i = 0; i < count; i++) to[i] = half_power(exponents[i]);
        } else if (weights_.scale_dtype == kBf16) {
            const uint16_t* const halves = static_cast<const uint16_t*>(weights_.scale) + first;
            for (int64_t i = 0; i < count; i++) to[i] = from_bits(uint32_t(halves[i]) << 16);
        } else {
            const float factor = weights_.format == kFormatFp8 ? kFp8Scale : 1;
            for (int64_t i = 0; i < count; i++) to[i] = static_cast<const float*>(weights_.scale)[first + i] * factor;
        }
    }

    const PackedWeights& weights_;
    const int64_t num_out_, width_, group_;
    int64_t groups_, bytes_;
};

// Rows of bytes at the places of a DynamicTile, as it takes them.
void interleave(const uint8_t* u, int64_t padded, const int64_t* x, int64_t rows, uint8_t* to) {
    const int64_t groups = num_row_groups(rows, isa().dynamic_rows);
    for (int64_t g = 0; g < groups; g++) {
        const int64_t first = rows * g / groups, num = rows * (g + 1) / groups - first;
        for (int64_t i = 0; i < num; i++)
            for (int64_t k = 0; k < padded; k += 4)
                memcpy(to + first * padded + k * num + i * 4, u + x[first + i] * padded + k, 4);
    }
}

// As IsaTable::unpack, for groups without a fitting vector.
void unpack_by_group(const PackedTile& t, Codes codes, int32_t dtype, char* out) {
    static constexpr Fp8Values fp8;
    std::vector<float> values(t.group);
    for (int64_t n = 0; n < t.num_w; n++)
        for (int64_t g = 0; g < t.groups; g++) {
            const uint8_t* const row = static_cast<const uint8_t*>(t.w) + n * t.row_bytes;
            const int64_t k0 = g * t.group, count = std::min(t.group, t.width - k0);
            for (int64_t k = k0; k < k0 + count; k++) {
                const uint8_t code = codes == kNibbles ? row[k / 64 * 32 + k % 32] >> (k % 64 < 32 ? 0 : 4) & 15 : row[k];
                values[k - k0] = codes == kNibbles ? t.values[code] : codes == kFp8 ? fp8.of[code] : int8_t(code);
                if (t.zero) values[k - k0] -= t.scale[n * t.groups + g + t.zero];
            }
            const auto store = dtype == kF32 ? isa().store_f32 : isa().store_bf16;
            store(values.data(), count, t.scale[n * t.groups + g], out + (n * t.width + k0) * item_size(dtype));
        }
}

}  // namespace

int32_t moe_lora_packed_linear(int32_t dtype, int32_t threads, const void* x, int64_t x_stride, int64_t x_rows,
                               const PackedWeights* weights, const void* bias, const int32_t* ids, int64_t tokens,
                               int64_t top_k, int64_t num_experts, void* out, int64_t num_out, int64_t width) {
    const int64_t size = item_size(dtype), row_bytes = std::max<int64_t>(1, width * size);
    GroupedRows grouped;
    const int32_t refusal = group_rows(ids, tokens, top_k, x_rows, num_experts, out, num_out * size, grouped);
    if (refusal) return refusal;
    std::vector<const void*> x_list(grouped.x.size());
    for (size_t i = 0; i < x_list.size(); i++) x_list[i] = static_cast<const char*>(x) + grouped.x[i] * x_stride * size;
    const PackedReader reader(*weights, num_out, width);
    threads = useful_threads(threads, int64_t(grouped.segments.size()) * num_out * row_bytes);
    const int64_t columns = isa().dot_columns[dtype];
    const std::vector<LinearTask> tasks = cut_segments(grouped.segments, num_out, reader.row_bytes(), threads, columns);
    const auto dot = dtype == kF32 ? isa().dot_f32 : isa().dot_bf16;
    const Codes codes = reader.codes();
    const auto unpack = isa().unpack[codes][dtype];
    const PackedDot dot_few = reader.fits_vectors() ? isa().dot_packed[codes][dtype] : PackedDot{};
    const bool fits_many = dtype == kBf16 && width > 0 && reader.fits_vectors() && width % kManyStep == 0;
    const PackedDot dot_many = fits_many ? isa().dot_many[codes] : PackedDot{};
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) {
        const LinearTask& t = tasks[i];
        const bool many = dot_many.takes(t.rows), packed = many || dot_few.takes(t.rows);
        const PackedDot& dot_packed = many ? dot_many : dot_few;
        const int64_t bytes = t.rows <= kFewRows ? kFewRowsBytes : kManyRowsBytes;
        const int64_t block =
            packed ? dot_packed.columns : std::max<int64_t>(columns, bytes / row_bytes / columns * columns);
        const int64_t unpacked_bytes = packed ? 0 : round_up(block * row_bytes, 64);
        char* const unpacked = thread_buffer(unpacked_bytes + block * reader.num_scales() * int64_t(sizeof(float)));
        float* const scales = reinterpret_cast<float*>(unpacked + unpacked_bytes);
        for (int64_t n = t.n; n < t.n + t.num; n += block) {
            const int64_t num = std::min(block, t.n + t.num - n);
            PackedTile tile = reader.rows(t.segment->expert, n, num, scales);
            const bool fits = reader.fits_vectors() && reader.scales_fit(tile);
            std::vector<char> unpacked_block(packed && !fits ? num * row_bytes : 0);
            if (!packed || !fits) {
                char* const plain = packed ? unpacked_block.data() : unpacked;
                fits ? unpack(tile, plain) : unpack_by_group(tile, codes, dtype, plain);
                tile.w = plain, tile.next = nullptr;
            }
            tile.x = &x_list[t.row], tile.out = &grouped.out[t.row], tile.rows = t.rows, tile.column = n;
            if (bias) tile.bias = static_cast<const char*>(bias) + (t.segment->expert * num_out + n) * size;
            packed && fits ? dot_packed.run(tile) : dot(tile);
        }
    });
    return 0;
}

int32_t moe_lora_dynamic_linear(int32_t bits, int32_t dtype, int32_t threads, const void* x, int64_t x_stride,
                                int64_t x_rows, const void* data, const void* scale, int64_t group, const void* bias,
                                const int32_t* ids, int64_t tokens, int64_t top_k, int64_t num_experts, void* out,
                                int64_t num_out, int64_t width) {
    constexpr int64_t kBlockOut = 16, kXRowsPerTask = 4;
    const int64_t size = item_size(dtype), padded = round_up(width, 64), held_out = round_up(num_out, kBlockOut);
    const int64_t row_bytes = bits == 8 ? round_up(width, 4) : width / 2;
    const int64_t scale_bytes = bits == 8 ? int64_t(sizeof(float)) : width / group * size;
    GroupedRows grouped;
    const int32_t refusal = group_rows(ids, tokens, top_k, x_rows, num_experts, out, num_out * size, grouped);
    if (refusal) return refusal;
    threads = useful_threads(threads, int64_t(grouped.segments.size()) * num_out * row_bytes);
    const bool f32 = dtype == kF32;
    std::unique_ptr<uint8_t[]> u(new uint8_t[x_rows * padded]);  // what lies behind a row meets weights of zero
    std::vector<float> x_scale(x_rows);
    std::vector<int32_t> zero(x_rows);
    const auto quantise = f32 ? isa().quantise_f32 : isa().quantise_bf16;
    run_tasks((x_rows + kXRowsPerTask - 1) / kXRowsPerTask, threads, [&](int64_t i, int64_t) {
        for (int64_t r = i * kXRowsPerTask; r < std::min(x_rows, (i + 1) * kXRowsPerTask); r++)
            quantise(static_cast<const char*>(x) + r * x_stride * size, width, bits == 4, &u[r * padded], &x_scale[r],
                     &zero[r]);
    });
    const std::vector<LinearTask> tasks = cut_segments(grouped.segments, num_out, row_bytes, threads, 2 * kBlockOut);
    const auto dynamic = bits == 8 ? (f32 ? isa().dynamic_int8_f32 : isa().dynamic_int8_bf16)
                                   : (f32 ? isa().dynamic_int4_f32 : isa().dynamic_int4_bf16);
    run_tasks(int64_t(tasks.size()), threads, [&](int64_t i, int64_t) {
        const LinearTask& t = tasks[i];
        const int64_t first = t.segment->expert * held_out + t.n;
        const char* task_bias =
            bias ? static_cast<const char*>(bias) + (t.segment->expert * num_out + t.n) * size : nullptr;
        const bool few = t.rows < (bits == 8 ? isa().tiled_rows_int8 : isa().tiled_rows_int4);
        uint8_t* const rows = few ? reinterpret_cast<uint8_t*>(thread_buffer(t.rows * padded)) : nullptr;
        if (few) interleave(u.get(), padded, &grouped.x[t.row], t.rows, rows);
        dynamic({&grouped.x[t.row], u.get(), rows, x_scale.data(), zero.data(),
                 static_cast<const char*>(data) + first * row_bytes,
                 static_cast<const char*>(scale) + first * scale_bytes, task_bias, &grouped.out[t.row], t.rows, t.num,
                 width, padded, group, t.n});
    });
    return 0;
}
