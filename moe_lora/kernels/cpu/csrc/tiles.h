// SPDX-License-Identifier: Apache-2.0
// Shared by all sources: element types, the tiles of each instruction set's vector code,
// and the table of functions for the drivers (linear, lora, attention).
//
// Every result is bit-stable: the sum behind one output element runs in an order that depends on the
// instruction set and the inner width alone, never on how rows, columns or threads are cut.
#pragma once
#include <cstdint>
#include <cstdlib>
#include <cstring>

struct bf16 {
    uint16_t bits;
};

// Values of the 256 codes of E4M3 (OCP 8-bit floating point, its finite kind), divided by 256.
struct Fp8Values {
    float of[256];
    constexpr Fp8Values() : of() {
        for (int code = 0; code < 256; code++) {
            const int exponent = code >> 3 & 15, mantissa = code & 7;
            float value = exponent ? 8 + mantissa : mantissa;  // times 2 ** (max(exponent, 1) - 18)
            for (int e = exponent ? exponent : 1; e < 18; e++) value /= 2;
            if ((code & 127) == 127) value = __builtin_nanf("");
            of[code] = code & 128 ? -value : value;
        }
    }
};
constexpr float kFp8Scale = 256;

// A cut of a "dot" product: out[i][column + n] = dot(x[i], w[n]) (+ bias[n]) for i < rows, n < num_w.
struct DotTile {
    const void* const* x;  // row pointers
    const void* w;         // num_w contiguous rows of `width`
    const void* bias;      // num_w elements of the output type, or null
    void* const* out;      // row pointers
    int64_t rows, num_w, width, column;
    const void* next;  // weights that this thread reads after this tile (prefetched), or null
};

// A cut of a "sum of rows": out[i][c] += round(scale * sum_r coef[i * coef_stride + r] * b[r * b_stride + c]),
// rounded to the type of out, then added and rounded again.
struct SumTile {
    const float* coef;
    const void* b;
    void* const* out;  // row pointers, already at the first column
    int64_t rows, depth, columns, coef_stride, b_stride;
    float scale;
    const void* next;  // the b that this thread reads after this tile, or null
    int64_t next_stride;
};

// A cut of a "dot" product over quantised weights; see unpack.inl.
struct PackedTile : DotTile {  // w: num_w rows of codes, row_bytes apart
    const float* scale;        // [num_w][groups]
    int64_t zero;              // from a scale to the value that stands for zero, or 0: none
    const float* values;       // of the 16 codes of 4 bits
    int64_t group, groups, row_bytes;
    bool exact;  // all values of 4 bits times their scales are numbers of bf16
};

constexpr int64_t kManyStep = 64;

// Scales of bytes that vectors take are 0, or of a size from 2^-100 to 2^100; the bits of both.
constexpr uint32_t kLeastScaleBits = (127 - 100) << 23, kMostScaleBits = (127 + 100) << 23;

// Kinds of codes of a PackedTile; int8 with and without zeros.
enum Codes : int32_t { kInt8, kInt8Zero, kFp8, kNibbles, kNumCodes };

// Rows of x in bytes against weight blocks [0, num_w / 16); see dynamic.inl.
struct DynamicTile {
    const int64_t* x;      // number of the quantised row at each place
    const uint8_t* plain;  // rows by number, `padded` bytes apart
    const uint8_t* u;      // of the rows at all places, if they are few; see dynamic.inl
    const float* x_scale;  // by number
    const int32_t* zero;   // by number
    const void* data;
    const void* scale;
    const void* bias;  // num_w elements of the output type, or null
    void* const* out;  // row pointers
    int64_t rows, num_w, width, padded, group, column;
};

// One row of logits in an online softmax; see softmax_row in tiles.inl.
struct SoftmaxState {
    float max, sum, rescale;
};

// Rows of a value head of the gated delta rule, and the convolution over them; see delta.inl.
struct DeltaRows {
    const float* x;     // [conv_width - 1 + tokens][channels]: k, q and v, each padded with zeros
    const float* conv;  // [conv_width][channels]
    float* mixed;       // [tokens][channels]
    int64_t tokens, channels, conv_width, k_padded, k_size;
};

// Columns of the memory of a value head over tokens; see delta.inl.
constexpr int64_t kDeltaColumns = 64;
struct DeltaTile {
    const float *mixed, *v;  // rows `channels` apart: of DeltaRows, and the values of these columns
    const float *decay, *beta;
    float* memory;  // [k_padded][kDeltaColumns]
    float* out;     // [tokens][kDeltaColumns]
    int64_t tokens, channels, k_padded;
};

// A dot over quantised weights, with its rows of x and weights per call; by default of no rows.
struct PackedDot {
    void (*run)(const PackedTile&) = nullptr;
    int64_t least_rows = 1, most_rows = 0, columns = 0;

    bool takes(int64_t rows) const { return rows >= least_rows && rows <= most_rows; }
};

struct IsaTable {
    const char* name;
    void (*dot_f32)(const DotTile&);
    void (*dot_bf16)(const DotTile&);
    void (*dot_bf16_to_f32)(const DotTile&);
    void (*sum_f32)(const SumTile&);
    void (*sum_bf16)(const SumTile&);
    void (*sum_bf16_to_f32)(const SumTile&);
    void (*softmax_row)(float* logits, int64_t count, int64_t low, int64_t high, float scale, SoftmaxState& state);
    void (*scale_row)(float* row, int64_t count, float scale);
    void (*store_f32)(const float* row, int64_t count, float scale, void* out);
    void (*store_bf16)(const float* row, int64_t count, float scale, void* out);
    void (*unpack[kNumCodes][2])(const PackedTile&, void* out);  // by codes and data type: rows of the tile, unpacked
    PackedDot dot_packed[kNumCodes][2];                          // by codes and data type
    PackedDot dot_many[kNumCodes];  // by codes: of bf16, in widths of whole `kManyStep`s
    int64_t dot_columns[2];                                      // weights that a dot takes together, by data type
    void (*quantise_f32)(const void* x, int64_t width, bool asymmetric, uint8_t* u, float* scale, int32_t* zero);
    void (*quantise_bf16)(const void* x, int64_t width, bool asymmetric, uint8_t* u, float* scale, int32_t* zero);
    int64_t dynamic_rows;  // that are computed together
    int64_t tiled_rows_int8, tiled_rows_int4;  // from that many on, rows are read from `plain`
    void (*dynamic_int8_f32)(const DynamicTile&);
    void (*dynamic_int8_bf16)(const DynamicTile&);
    void (*dynamic_int4_f32)(const DynamicTile&);
    void (*dynamic_int4_bf16)(const DynamicTile&);
    void (*delta_mix)(const DeltaRows&);
    void (*delta_tokens)(const DeltaTile&);
};

#if defined(__x86_64__) || defined(_M_X64)
#define MOE_LORA_X86 1
const IsaTable* avx2_table();
const IsaTable* avx512_table();
const IsaTable* avx512_bf16_table();
const IsaTable* avx512_vbmi_table();
#if defined(__linux__) && (defined(__clang__) || __GNUC__ >= 11)
#define MOE_LORA_AMX 1
const IsaTable* amx_bf16_table();
#endif
#endif
const IsaTable* amx_emulated_table();
const IsaTable* portable_table();

// The table in use: the processor's best, or the one named by MOE_LORA_ISA.
const IsaTable& isa();

enum DataType : int32_t { kF32 = 0, kBf16 = 1 };

// Rows in balanced groups of up to `most`: group g is [rows * g / groups, rows * (g + 1) / groups).
inline int64_t num_row_groups(int64_t rows, int64_t most) { return (rows + most - 1) / most; }

inline int64_t item_size(int32_t dtype) { return dtype == kF32 ? 4 : 2; }
