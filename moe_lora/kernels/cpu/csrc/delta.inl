// SPDX-License-Identifier: Apache-2.0
// Tokens of one value head of the gated delta rule; part of tiles.inl. Sums run over rows of the memory in two
// chains, even and odd: bits depend on the instruction set and the key's size alone.

// head *= factor / |head|. `count`: a multiple of 16.
template <class I>
static inline void make_unit(float* head, int64_t count, float factor) {
    typename I::V sum = I::zero();
    for (int64_t c = 0; c < count; c += I::kLanes) sum = I::fma(I::load(head + c), I::load(head + c), sum);
    float lanes[I::kLanes], total = 1e-6f;
    I::store(lanes, sum);
    for (int lane = 0; lane < I::kLanes; lane++) total += lanes[lane];
    const typename I::V scale = I::set1(factor / __builtin_sqrtf(total));
    for (int64_t c = 0; c < count; c += I::kLanes) I::store(head + c, I::mul(I::load(head + c), scale));
}

// mixed[t] = silu(sum over w of x[t + w] * conv[w]), then k and q of length 1, and q / sqrt(k_size).
template <class I>
static void delta_mix(const DeltaRows& m) {
    using V = typename I::V;
    for (int64_t t = 0; t < m.tokens; t++) {
        const float* x = m.x + t * m.channels;
        float* out = m.mixed + t * m.channels;
        for (int64_t c = 0; c < m.channels; c += I::kLanes) {
            V sum = I::zero();
            for (int64_t w = 0; w < m.conv_width; w++)
                sum = I::fma(I::load(x + w * m.channels + c), I::load(m.conv + w * m.channels + c), sum);
            // silu(x) = x * (1 or e) / (1 + e), with e = exp(-|x|).
            const V e = exp_nonpositive<I>(I::sub(I::zero(), I::max(I::sub(I::zero(), sum), sum)));
            const V top = I::add(I::zero_below(sum, 0.0f, I::sub(I::set1(1.0f), e)), e);
            I::store(out + c, I::mul(sum, top) / I::add(I::set1(1.0f), e));
        }
        make_unit<I>(out, m.k_padded, 1.0f);
        make_unit<I>(out + m.k_padded, m.k_padded, 1.0f / __builtin_sqrtf(float(m.k_size)));
    }
}

// For each token: S = decay * S, then S += k (beta * (v - k S)), and out = q S.
template <class I>
static void delta_tokens(const DeltaTile& t) {
    using V = typename I::V;
    constexpr int kWide = 4;
    for (int64_t column = 0; column < kDeltaColumns; column += kWide * I::kLanes)
        for (int64_t i = 0; i < t.tokens; i++) {
            const float *k = t.mixed + i * t.channels, *q = k + t.k_padded, *v = t.v + i * t.channels + column;
            float* memory = t.memory + column;
            V sum[2][kWide], out[2][kWide], change[kWide];
            MOE_LORA_UNROLL
            for (int c = 0; c < kWide; c++) sum[0][c] = sum[1][c] = out[0][c] = out[1][c] = I::zero();
            for (int64_t row = 0; row < t.k_padded; row += 2)
                MOE_LORA_UNROLL
                for (int odd = 0; odd < 2; odd++) {
                    const V key = I::set1(k[row + odd]);
                    MOE_LORA_UNROLL
                    for (int c = 0; c < kWide; c++)
                        sum[odd][c] = I::fma(key, I::load(memory + (row + odd) * kDeltaColumns + c * I::kLanes),
                                             sum[odd][c]);
                }
            const V decay = I::set1(t.decay[i]), beta = I::set1(t.beta[i]);
            MOE_LORA_UNROLL
            for (int c = 0; c < kWide; c++) {
                const V held = I::mul(decay, I::add(sum[0][c], sum[1][c]));
                change[c] = I::mul(beta, I::sub(I::load(v + c * I::kLanes), held));
            }
            for (int64_t row = 0; row < t.k_padded; row += 2)
                MOE_LORA_UNROLL
                for (int odd = 0; odd < 2; odd++) {
                    const V key = I::set1(k[row + odd]), query = I::set1(q[row + odd]);
                    MOE_LORA_UNROLL
                    for (int c = 0; c < kWide; c++) {
                        float* at = memory + (row + odd) * kDeltaColumns + c * I::kLanes;
                        const V now = I::fma(key, change[c], I::mul(decay, I::load(at)));
                        I::store(at, now);
                        out[odd][c] = I::fma(query, now, out[odd][c]);
                    }
                }
            MOE_LORA_UNROLL
            for (int c = 0; c < kWide; c++)
                I::store(t.out + i * kDeltaColumns + column + c * I::kLanes, I::add(out[0][c], out[1][c]));
        }
}
