// SPDX-License-Identifier: Apache-2.0
// Quantised rows of x against quantised weights, in integers: out = x_scale * sum_g scale[g] * sum_{k in g} (u - zero) q.
// Included after tiles.inl. The integer sums are exact, so a result depends on nothing but its row and its weights.
//
// Weights lie in blocks of 16 outputs, the unit of the processor's dots of four bytes: int8 [block][k / 4][16][4];
// int4 [block][k / 8][16][4], q + 8 of k + j in the low and of k + 4 + j in the high bits; scales [block][group][16].
// int8: one fp32 scale per output. int4: scales of T. x lies in groups of rows computed together: [group]
// [k / 4][row][4].

constexpr int64_t kBlockOut = 16;

// The first numbers of a vector, cut to 0 .. 255.
static inline void store_bytes_plainly(uint8_t* to, const float* from, int count) {
    for (int i = 0; i < count; i++) to[i] = from[i] < 0 ? 0 : from[i] > 255 ? 255 : uint8_t(int32_t(from[i]));
}

static inline float rounded(float value, const float*) { return value; }
static inline float rounded(float value, const bf16*) {
    bf16 four[4];
    store_quad(four, Quad{value, 0, 0, 0});
    return widen(four[0]);
}

// One row to bytes u = q + 128 in torchao's arithmetic: symmetric (int8 weights) or, `asymmetric`, with a zero point
// and every step in T (int4 weights). Values that are not finite make the scale, and so the row's results, NaN.
template <class I, class T>
static void quantise_row(const void* from, int64_t width, bool asymmetric, uint8_t* u, float* scale, int32_t* zero) {
    const T* x = static_cast<const T*>(from);
    const T* const type = nullptr;
    typename I::V high = I::zero(), low = I::zero(), bad = I::zero();
    for (int64_t k = 0; k < width; k += I::kLanes) {
        const int count = int(width - k < I::kLanes ? width - k : I::kLanes);
        const typename I::V v = count == I::kLanes ? I::load(x + k) : I::load_part(x + k, count);
        high = I::max(high, v);
        low = I::max(low, I::sub(I::zero(), v));
        bad = I::fma(v, I::zero(), bad);
    }
    float highs[I::kLanes], lows[I::kLanes], bads[I::kLanes], max = 0, min = 0, sum = 0;
    I::store(highs, high), I::store(lows, low), I::store(bads, bad);
    for (int i = 0; i < I::kLanes; i++) {
        max = highs[i] > max ? highs[i] : max;
        min = -lows[i] < min ? -lows[i] : min;
        sum += bads[i];
    }
    float s, inverse, offset = 0;
    if (asymmetric) {
        s = rounded(rounded(max - min, type) / 255.0f, type);
        if (!(s > 1.17549435e-38f)) s = 1.17549435e-38f;
        const float point = -128.0f - __builtin_rintf(rounded(min / s, type));
        offset = point < -128.0f ? -128.0f : point > 127.0f ? 127.0f : point;
        inverse = rounded(1.0f / s, type);
    } else {
        const float size = max > -min ? max : -min;
        s = rounded(size / 127.5f, type);
        if (!(s > 1.1920929e-07f)) s = 1.1920929e-07f;
        inverse = 1.0f / s;
    }
    const bool usable = sum == 0;
    *scale = usable ? s : __builtin_nanf("");
    *zero = 128 + int32_t(offset);
    if (!usable) return void(memset(u, 0, width));
    const typename I::V by = I::set1(inverse);
    for (int64_t k = 0; k < width; k += I::kLanes) {
        const int count = int(width - k < I::kLanes ? width - k : I::kLanes);
        typename I::V v = I::mul(count == I::kLanes ? I::load(x + k) : I::load_part(x + k, count), by);
        if constexpr (sizeof(T) == 2)
            if (asymmetric) v = I::round_bf16(v);
        I::store_bytes(u + k, I::add(I::round(v), I::set1(float(*zero))), count);
    }
}

// M rows against B blocks of 16 outputs: sums[i][b][lane], fp32, without the row's scale (int8: also without the
// weights' scale, applied after a rounding).
template <class I, class S, bool kInt4, int M, int B>
static inline void dynamic_block(const DynamicTile& t, int64_t row, int64_t block, float* sums) {
    using Int = typename I::Int;
    constexpr int kParts = int(kBlockOut) / I::kLanes, kVectors = B * kParts;
    const int64_t steps = kInt4 ? t.group / 8 : (t.width + 3) / 4, groups = kInt4 ? t.width / t.group : 1;
    const int64_t block_bytes = steps * groups * 64;
    const char* w = static_cast<const char*>(t.data) + block * block_bytes;
    const uint8_t* const x = t.u + row * t.padded;
    for (int64_t g = 0; g < groups; g++) {
        Int acc[M][kVectors], total[kVectors];
        MOE_LORA_UNROLL
        for (int v = 0; v < kVectors; v++) {
            total[v] = I::int_zero();
            MOE_LORA_UNROLL
            for (int i = 0; i < M; i++) acc[i][v] = I::int_zero();
        }
        const auto add = [&](int64_t k, int half) __attribute__((always_inline)) {
            Int weights[kVectors];
            MOE_LORA_UNROLL
            for (int v = 0; v < kVectors; v++) {
                const char* at = w + v / kParts * block_bytes + v % kParts * I::kLanes * 4;
                weights[v] = kInt4 ? I::load_nibbles(at, half) : I::load_bytes(at);
                total[v] = I::sum_bytes(weights[v], total[v]);
            }
            MOE_LORA_UNROLL
            for (int i = 0; i < M; i++) {
                const Int four = I::four_bytes(x + k * M + i * 4);
                MOE_LORA_UNROLL
                for (int v = 0; v < kVectors; v++) acc[i][v] = I::dot_bytes(four, weights[v], acc[i][v]);
            }
        };
        for (int64_t step = 0; step < steps; step++, w += 64) {
            MOE_LORA_UNROLL
            for (int b = 0; b < B; b++) __builtin_prefetch(w + b * block_bytes + 1024, 0, 3);
            if constexpr (kInt4) {
                const int64_t k = g * t.group + step * 8;
                add(k, 0);
                add(k + 4, 1);
            } else {
                add(step * 4, 0);
            }
        }
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) {
            const Int zero = I::int_set1(t.zero[t.x[row + i]]);
            MOE_LORA_UNROLL
            for (int v = 0; v < kVectors; v++) {
                float* const to = sums + i * B * kBlockOut + v * I::kLanes;
                const typename I::V exact = I::to_float(I::int_sub_product(acc[i][v], zero, total[v]));
                if constexpr (!kInt4) {
                    I::store(to, exact);
                } else {
                    const S* scale = static_cast<const S*>(t.scale) + ((block + v / kParts) * groups + g) * kBlockOut;
                    const typename I::V by = I::load(scale + v % kParts * I::kLanes);
                    I::store(to, g ? I::fma(exact, by, I::load(to)) : I::mul(exact, by));
                }
            }
        }
    }
}

template <class I, class S, bool kInt4, int B, int M = I::kDynamicRows>
static inline void dynamic_rows(const DynamicTile& t, int64_t row, int rows, int64_t block, float* sums) {
    if constexpr (M > 1)
        if (rows < M) return dynamic_rows<I, S, kInt4, B, M - 1>(t, row, rows, block, sums);
    dynamic_block<I, S, kInt4, M, B>(t, row, block, sums);
}

// Scales, bias and rounding of one row's sums of one block.
template <class I, class T, bool kInt4>
static inline void finish_row(const DynamicTile& t, int64_t row, int64_t block, const float* sums) {
    const typename I::V by = I::set1(t.x_scale[t.x[row]]);
    const int64_t n0 = block * kBlockOut;
    T* const out = static_cast<T*>(t.out[row]) + t.column + n0;
    for (int64_t n = 0; n < kBlockOut && n0 + n < t.num_w; n += I::kLanes) {
        const int count = int(t.num_w - n0 - n < I::kLanes ? t.num_w - n0 - n : I::kLanes);
        typename I::V y = I::mul(I::load(sums + n), by);
        if constexpr (!kInt4) {
            if constexpr (sizeof(T) == 2) y = I::round_bf16(y);
            y = I::mul(y, I::load(static_cast<const float*>(t.scale) + n0 + n));
        }
        if (t.bias) y = I::add(y, I::load_part(static_cast<const T*>(t.bias) + n0 + n, count));
        if (count == I::kLanes)
            I::store(out + n, y);
        else
            I::store_part(out + n, y, count);
    }
}

template <class I, class T, bool kInt4>
static void dynamic_tile(const DynamicTile& t) {
    using S = T;
    constexpr int B = I::kDynamicBlocks;
    const int64_t blocks = (t.num_w + kBlockOut - 1) / kBlockOut;
    const int64_t groups = num_row_groups(t.rows, I::kDynamicRows);
    alignas(64) float sums[I::kDynamicRows * B * kBlockOut];
    for (int64_t block = 0; block < blocks; block += B) {
        const int num = int(blocks - block < B ? blocks - block : B);
        for (int64_t g = 0; g < groups; g++) {
            const int64_t row = t.rows * g / groups;
            const int rows = int(t.rows * (g + 1) / groups - row);
            if (num == B)
                dynamic_rows<I, S, kInt4, B>(t, row, rows, block, sums);
            else
                dynamic_rows<I, S, kInt4, 1>(t, row, rows, block, sums);
            for (int i = 0; i < rows; i++)
                for (int b = 0; b < num; b++)
                    finish_row<I, T, kInt4>(t, row + i, block + b, sums + (i * num + b) * kBlockOut);
        }
    }
}
