// SPDX-License-Identifier: Apache-2.0
// Online softmax over chunks of logits; part of tiles.inl.

// exp(x) for x <= 0 to about 2 ulp; below -87 the result is zero.
template <class I>
static inline typename I::V exp_nonpositive(typename I::V x) {
    using V = typename I::V;
    // max returns its second argument if one is NaN: NaN must not turn into a number here.
    const V clamped = I::max(I::set1(-87.0f), x);
    const V n = I::round(I::mul(clamped, I::set1(1.44269504f)));
    V r = I::fma(n, I::set1(-0.693359375f), clamped);
    r = I::fma(n, I::set1(2.12194440e-4f), r);
    V p = I::set1(1.0f / 720);
    p = I::fma(p, r, I::set1(1.0f / 120));
    p = I::fma(p, r, I::set1(1.0f / 24));
    p = I::fma(p, r, I::set1(1.0f / 6));
    p = I::fma(p, r, I::set1(0.5f));
    p = I::fma(p, r, I::set1(1.0f));
    p = I::fma(p, r, I::set1(1.0f));
    return I::zero_below(x, -87.0f, I::mul(p, I::power_of_two(n)));
}

// logits[0:count] become exp(scale * logits - max), those outside [low, high) zero. `count` is a multiple of
// 16, `scale` positive. state.max and state.sum take in this chunk; state.rescale is the factor for earlier sums.
template <class I>
static void softmax_row(float* logits, int64_t count, int64_t low, int64_t high, float scale, SoftmaxState& state) {
    using V = typename I::V;
    const float minus_inf = -__builtin_inff();
    for (int64_t c = 0; c < low; c++) logits[c] = minus_inf;
    for (int64_t c = high; c < count; c++) logits[c] = minus_inf;
    V top = I::set1(minus_inf);
    const V factor = I::set1(scale);
    for (int64_t c = 0; c < count; c += I::kLanes) {
        const V value = I::mul(I::load(logits + c), factor);
        I::store(logits + c, value);
        top = I::max(top, value);
    }
    float lanes[I::kLanes], largest = state.max;
    I::store(lanes, top);
    for (int lane = 0; lane < I::kLanes; lane++) largest = lanes[lane] > largest ? lanes[lane] : largest;
    const float base = largest == minus_inf ? 0.0f : largest;
    V sum = I::zero();
    for (int64_t c = 0; c < count; c += I::kLanes) {
        const V p = exp_nonpositive<I>(I::sub(I::load(logits + c), I::set1(base)));
        I::store(logits + c, p);
        sum = I::add(sum, p);
    }
    I::store(lanes, sum);
    float total = 0;
    for (int lane = 0; lane < I::kLanes; lane++) total += lanes[lane];
    float shift[I::kLanes];
    I::store(shift, exp_nonpositive<I>(I::set1(state.max - base)));
    state.rescale = state.max == largest ? 1.0f : shift[0];
    state.sum = state.sum * state.rescale + total;
    state.max = largest;
}

template <class I>
static void scale_row(float* row, int64_t count, float scale) {
    for (int64_t c = 0; c < count; c++) row[c] *= scale;
}

template <class I, class Out>
static void store_row(const float* row, int64_t count, float scale, void* out_row) {
    Out* out = static_cast<Out*>(out_row);
    const typename I::V factor = I::set1(scale);
    int64_t c = 0;
    for (; c + I::kLanes <= count; c += I::kLanes) I::store(out + c, I::mul(I::load(row + c), factor));
    if (c < count) I::store_part(out + c, I::mul(I::load_part(row + c, int(count - c)), factor), int(count - c));
}
