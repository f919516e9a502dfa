// Rows of quantised weights to rows of T, out = round(scale * q): what torchao's `dequantize` gives, bit for bit.
// Included after tiles.inl.
//
// int8: q [rows][width], one fp32 scale per row. int4: q + 8 in four bits, 64 of them in 32 bytes (byte i: element
// i low, element 32 + i high; where width ends at a half, its bytes' high bits are 0), a scale of T per group.

template <class I, class T>
static void unpack_int8(const UnpackRows& u) {
    for (int64_t row = 0; row < u.rows; row++) {
        const int8_t* q = static_cast<const int8_t*>(u.data) + row * u.width;
        const typename I::V scale = I::set1(static_cast<const float*>(u.scale)[row]);
        T* out = static_cast<T*>(u.out) + row * u.width;
        int64_t k = 0;
        for (; k + I::kLanes <= u.width; k += I::kLanes) {
            if (k % 64 == 0) __builtin_prefetch(q + k + u.ahead, 0, 2);
            I::store(out + k, I::mul(I::load_int8(q + k), scale));
        }
        if (k < u.width) {
            int8_t padded[I::kLanes] = {};
            memcpy(padded, q + k, u.width - k);
            I::store_part(out + k, I::mul(I::load_int8(padded), scale), int(u.width - k));
        }
    }
}

// What the 16 nibbles mean at this scale.
template <class I, class T>
static inline void fill_table(float scale, T* table) {
    static const float values[16] = {-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7};
    for (int i = 0; i < 16; i += I::kLanes) I::store(table + i, I::mul(I::load(values + i), I::set1(scale)));
}

template <class I, class T>
static void unpack_int4(const UnpackRows& u) {
    const int64_t row_bytes = (u.width + 63) / 64 * 32, groups = u.width / u.group;
    for (int64_t row = 0; row < u.rows; row++) {
        const uint8_t* data = static_cast<const uint8_t*>(u.data) + row * row_bytes;
        const T* scale = static_cast<const T*>(u.scale) + row * groups;
        T* out = static_cast<T*>(u.out) + row * u.width;
        alignas(64) T table[16];
        for (int64_t k = 0; k < u.width; k += 32) {
            if (k % u.group == 0) fill_table<I, T>(widen(scale[k / u.group]), table);
            const uint8_t* bytes = data + k / 64 * 32;
            if (k % 128 == 0) __builtin_prefetch(bytes + u.ahead, 0, 2);
            I::look_up(bytes, k % 64 ? 4 : 0, table, out + k);
        }
    }
}

// 32 nibbles, in the bits from `shift` on of 32 bytes, by the table.
template <class T>
static inline void look_up_plainly(const uint8_t* bytes, int shift, const T* table, T* out) {
    for (int i = 0; i < 32; i++) out[i] = table[bytes[i] >> shift & 15];
}
