// SPDX-License-Identifier: Apache-2.0
// Vectors of the compiler's own extension, 4 lanes (SSE2, NEON, or plain scalar code). Included after tiles.inl.

typedef int32_t QuadInt __attribute__((vector_size(16)));

struct Portable {
    using V = Quad;
    static constexpr int kLanes = 4, kMaxRows = 2, kTallRows = 2;
    static constexpr bool kPairs = false;

    static inline V zero() { return Quad{0, 0, 0, 0}; }
    static inline V set1(float value) { return Quad{value, value, value, value}; }
    static inline V add(V a, V b) { return a + b; }
    static inline V sub(V a, V b) { return a - b; }
    static inline V mul(V a, V b) { return a * b; }
#ifdef __FP_FAST_FMAF  // contraction is off: ask for what the processor has
    static inline V fma(V a, V b, V c) {
        return Quad{__builtin_fmaf(a[0], b[0], c[0]), __builtin_fmaf(a[1], b[1], c[1]),
                    __builtin_fmaf(a[2], b[2], c[2]), __builtin_fmaf(a[3], b[3], c[3])};
    }
#else
    static inline V fma(V a, V b, V c) { return a * b + c; }
#endif
    static inline V select(QuadInt take, V a, V b) { return (V)((take & (QuadInt)a) | (~take & (QuadInt)b)); }
    static inline V max(V a, V b) { return select(a > b, a, b); }
    // Adding 1.5 * 2^23 leaves no fraction bits, in the rounding mode (to nearest) of the addition.
    static inline V round(V a) { return (a + 12582912.0f) - 12582912.0f; }
    static inline V power_of_two(V n) { return (V)((__builtin_convertvector(n, QuadInt) + 127) << 23); }
    static inline V zero_below(V x, float limit, V value) { return select(x < limit, zero(), value); }

    static inline V round_bf16(V value) {
        bf16 rounded[4];
        store_quad(rounded, value);
        return load_quad(rounded);
    }

    using Int = QuadInt;
    static constexpr int kDynamicRows = 2, kDynamicBlocks = 1;
    static inline Int int_zero() { return Int{0, 0, 0, 0}; }
    static inline Int int_set1(int32_t value) { return Int{value, value, value, value}; }
    static inline Int load_bytes(const void* p) {
        Int value;
        memcpy(&value, p, 16);
        return value;
    }
    static inline Int load_nibbles(const void* p, int half) {
        uint8_t bytes[16];
        memcpy(bytes, p, 16);
        for (uint8_t& byte : bytes) byte = uint8_t((byte >> (half ? 4 : 0) & 15) - 8);
        return load_bytes(bytes);
    }
    static inline Int four_bytes(const uint8_t* p) {
        int32_t value;
        memcpy(&value, p, 4);
        return int_set1(value);
    }
    // Four unsigned bytes of x by four signed bytes of w, added to the lane's sum.
    static inline Int dot_bytes(Int x, Int w, Int acc) {
        for (int j = 0; j < 4; j++) acc += (x >> 8 * j & 255) * ((w << (24 - 8 * j)) >> 24);
        return acc;
    }
    static inline Int sum_bytes(Int w, Int acc) { return dot_bytes(int_set1(0x01010101), w, acc); }
    static inline Int int_sub_product(Int a, Int b, Int c) { return a - b * c; }
    static inline V to_float(Int value) { return __builtin_convertvector(value, Quad); }
    static inline V load_int8(const int8_t* p) { return Quad{float(p[0]), float(p[1]), float(p[2]), float(p[3])}; }
    static inline void store_bytes(uint8_t* to, V value, int count) {
        float lanes[kLanes];
        store(lanes, value);
        store_bytes_plainly(to, lanes, count);
    }
    static inline V load_fp8(const uint8_t* p) {
        const float* of = kFp8Values.of;
        return Quad{of[p[0]], of[p[1]], of[p[2]], of[p[3]]};
    }
    template <class T>
    static inline V load(const T* p) {
        return load_quad(p);
    }
    template <class T>
    static inline V load_part(const T* p, int count) {
        T padded[4] = {};
        memcpy(padded, p, count * sizeof(T));
        return load_quad(padded);
    }
    template <class T>
    static inline void store(T* p, V value) {
        store_quad(p, value);
    }
    template <class T>
    static inline void store_part(T* p, V value, int count) {
        T padded[4];
        store_quad(padded, value);
        memcpy(p, padded, count * sizeof(T));
    }
    static inline Quad sum4(V a, V b, V c, V d) {
        return Quad{(a[0] + a[1]) + (a[2] + a[3]), (b[0] + b[1]) + (b[2] + b[3]), (c[0] + c[1]) + (c[2] + c[3]),
                    (d[0] + d[1]) + (d[2] + d[3])};
    }

    template <class T>
    struct Dot {
        using Raw = V;
        using Unpacked = Raw;
        static inline Unpacked unpacked(Raw raw) { return raw; }
        static constexpr int kStep = 4;
        static inline Raw load(const T* p) { return load_quad(p); }
        static inline Raw load_part(const T* p, int count) { return Portable::load_part(p, count); }
        static inline void store(T* p, Raw raw) { store_quad(p, raw); }
        static inline Raw pack(const V* v) { return sizeof(T) == 2 ? round_bf16(v[0]) : v[0]; }
        using Table = CodeTable<T>;
        static inline void fill(Table& table, const V* v) {
            for (int i = 0; i < 4; i++) store_quad(table.of + 4 * i, v[i]);
        }
        static inline Raw look_up(const uint8_t* bytes, int shift, const Table& table) {
            T out[kStep];
            table.look_up(bytes, shift, out, kStep);
            return load(out);
        }
        static inline V dot(Raw x, Raw w, V acc) { return fma(x, w, acc); }
    };
};
