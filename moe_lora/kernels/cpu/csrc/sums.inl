// SPDX-License-Identifier: Apache-2.0
// Scaled sums of rows of B; part of tiles.inl. An element's sum always runs over the rows in order, from zero.

constexpr int64_t kStreamColumns = 1024, kStripBytes = 24 << 10;

// out + delta, with delta = scale * sum rounded to the output's type: a delta from elsewhere gives the same bits.
// Adding zero leaves no negative zero, as a sum over a zeroed output would.
template <class I, class Out>
static inline typename I::V with_delta(typename I::V out, typename I::V scale, typename I::V sum) {
    const typename I::V delta = I::mul(scale, sum);
    return I::add(out, I::add(I::zero(), sizeof(Out) == 2 ? I::round_bf16(delta) : delta));
}

// M rows, C vectors of columns. `Fetch`: these rows are the first readers of their part of B, and fetch the
// next columns, a row's stride apart in memory.
template <class I, class T, class Out, int M, int C, bool Fetch>
static inline void sum_block(const SumTile& t, int64_t row, int64_t column) {
    const T* b = static_cast<const T*>(t.b) + column;
    const float* coef = t.coef + row * t.coef_stride;
    typename I::V acc[M][C];
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++)
        MOE_LORA_UNROLL
        for (int c = 0; c < C; c++) acc[i][c] = I::zero();
    constexpr int kAhead = C * I::kLanes, kLine = 64 / int(sizeof(T)), kOutLine = 64 / int(sizeof(Out));
    MOE_LORA_UNROLL
    for (int i = 0; C > 1 && i < M; i++)
        MOE_LORA_UNROLL
        for (int c = 0; c < kAhead; c += kOutLine)
            __builtin_prefetch(static_cast<const Out*>(t.out[row + i]) + column + kAhead + c, 1, 3);
    for (int64_t r = 0; r < t.depth; r++, b += t.b_stride) {
        typename I::V bv[C];
        MOE_LORA_UNROLL
        for (int c = 0; c < C; c++) bv[c] = I::load(b + c * I::kLanes);
        MOE_LORA_UNROLL
        for (int c = 0; Fetch && C > 1 && c < kAhead; c += kLine) __builtin_prefetch(b + kAhead + c, 0, 3);
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) {
            typename I::V h = I::set1(coef[i * t.coef_stride + r]);
            MOE_LORA_UNROLL
            for (int c = 0; c < C; c++) acc[i][c] = I::fma(h, bv[c], acc[i][c]);
        }
    }
    const typename I::V scale = I::set1(t.scale);
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++) {
        Out* out = static_cast<Out*>(t.out[row + i]) + column;
        MOE_LORA_UNROLL
        for (int c = 0; c < C; c++, out += I::kLanes) I::store(out, with_delta<I, Out>(I::load(out), scale, acc[i][c]));
    }
}

// The last columns, fewer than a vector.
template <class I, class T, class Out>
static inline void sum_tail(const SumTile& t, int64_t row, int64_t column, int count) {
    const T* b = static_cast<const T*>(t.b) + column;
    typename I::V acc = I::zero();
    for (int64_t r = 0; r < t.depth; r++, b += t.b_stride)
        acc = I::fma(I::set1(t.coef[row * t.coef_stride + r]), I::load_part(b, count), acc);
    Out* out = static_cast<Out*>(t.out[row]) + column;
    I::store_part(out, with_delta<I, Out>(I::load_part(out, count), I::set1(t.scale), acc), count);
}

template <class I, class T, class Out, int C, bool Fetch, int M = I::kMaxRows>
static inline void sum_rows(const SumTile& t, int64_t row, int rows, int64_t column) {
    if constexpr (M > 1)
        if (rows < M) return sum_rows<I, T, Out, C, Fetch, M - 1>(t, row, rows, column);
    sum_block<I, T, Out, M, C, Fetch>(t, row, column);
}

// Columns [begin, end) of balanced groups of rows in registers.
template <class I, class T, class Out>
static void sum_columns(const SumTile& t, int64_t begin, int64_t end) {
    const int64_t groups = (t.rows + I::kMaxRows - 1) / I::kMaxRows, wide = 4 * I::kLanes;
    for (int64_t g = 0; g < groups; g++) {
        const int64_t row = t.rows * g / groups;
        const int rows = int(t.rows * (g + 1) / groups - row);
        int64_t c = begin;
        for (; c + wide <= end; c += wide)
            if (g == 0)
                sum_rows<I, T, Out, 4, true>(t, row, rows, c);
            else
                sum_rows<I, T, Out, 4, false>(t, row, rows, c);
        for (; c < end; c += I::kLanes) sum_rows<I, T, Out, 1, false>(t, row, rows, c);
    }
}

// M (1 or 2) rows in one pass over B in memory order, four of its rows at a time, sums kept in `acc`.
template <class I, class T, int M, int R>
static inline void stream_rows(const SumTile& t, int64_t r, int64_t column, int64_t count, float* acc) {
    const T* b = static_cast<const T*>(t.b) + r * t.b_stride + column;
    const bool last = r + R >= t.depth;
    const T* ahead = last ? static_cast<const T*>(t.next) : b + R * t.b_stride;
    const int64_t ahead_stride = last ? t.next_stride : t.b_stride;
    typename I::V h[M][R];
    MOE_LORA_UNROLL
    for (int i = 0; i < M; i++)
        MOE_LORA_UNROLL
        for (int j = 0; j < R; j++) h[i][j] = I::set1(t.coef[i * t.coef_stride + r + j]);
    constexpr int kLine = 64 / int(sizeof(T));
    for (int64_t c = 0; c < count; c += I::kLanes) {
        if (ahead && c % kLine == 0)
            MOE_LORA_UNROLL
            for (int j = 0; j < R; j++) __builtin_prefetch(ahead + j * ahead_stride + c, 0, 3);
        typename I::V sum[M];
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) sum[i] = I::load(acc + i * kStreamColumns + c);
        MOE_LORA_UNROLL
        for (int j = 0; j < R; j++) {
            const typename I::V bv = I::load(b + j * t.b_stride + c);
            MOE_LORA_UNROLL
            for (int i = 0; i < M; i++) sum[i] = I::fma(h[i][j], bv, sum[i]);
        }
        MOE_LORA_UNROLL
        for (int i = 0; i < M; i++) I::store(acc + i * kStreamColumns + c, sum[i]);
    }
}

// Columns [0, count), a multiple of the vector length, for M rows.
template <class I, class T, class Out, int M>
static void stream_sums(const SumTile& t, int64_t columns) {
    float acc[M * kStreamColumns];
    const typename I::V scale = I::set1(t.scale);
    for (int64_t column = 0; column < columns; column += kStreamColumns) {
        const int64_t count = columns - column < kStreamColumns ? columns - column : kStreamColumns;
        for (int i = 0; i < M; i++) memset(acc + i * kStreamColumns, 0, count * sizeof(float));
        int64_t r = 0;
        for (; r + 4 <= t.depth; r += 4) stream_rows<I, T, M, 4>(t, r, column, count, acc);
        for (; r < t.depth; r++) stream_rows<I, T, M, 1>(t, r, column, count, acc);
        for (int i = 0; i < M; i++) {
            Out* out = static_cast<Out*>(t.out[i]) + column;
            for (int64_t c = 0; c < count; c += I::kLanes)
                I::store(out + c, with_delta<I, Out>(I::load(out + c), scale, I::load(acc + i * kStreamColumns + c)));
        }
    }
}

template <class I, class T, class Out>
static void sum_tile(const SumTile& t) {
    const int64_t whole = t.columns / I::kLanes * I::kLanes, wide = 4 * I::kLanes;
    if (t.rows == 1) stream_sums<I, T, Out, 1>(t, whole);
    if (t.rows == 2) stream_sums<I, T, Out, 2>(t, whole);
    if (t.rows > 2) {
        // All groups of rows pass over the columns of B in the first-level cache.
        const int64_t fitting = kStripBytes / (t.depth * int64_t(sizeof(T)) + 1) / wide * wide;
        const int64_t strip = fitting > wide ? fitting : wide;
        for (int64_t c = 0; c < whole; c += strip) sum_columns<I, T, Out>(t, c, c + strip < whole ? c + strip : whole);
    }
    if (whole < t.columns)
        for (int64_t row = 0; row < t.rows; row++) sum_tail<I, T, Out>(t, row, whole, int(t.columns - whole));
}
