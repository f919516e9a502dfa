// SPDX-License-Identifier: Apache-2.0
// MOE_LORA_TARGET("avx2,..."): the following functions may use these instructions.
#pragma once
#include <immintrin.h>

#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC diagnostic ignored "-Wuninitialized"  // both raised by the compiler's own header
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#endif

#define MOE_LORA_PRAGMA(text) _Pragma(#text)
#ifdef __clang__
#define MOE_LORA_TARGET(list) \
    MOE_LORA_PRAGMA(clang attribute push(__attribute__((target(list))), apply_to = function))
#define MOE_LORA_TARGET_END MOE_LORA_PRAGMA(clang attribute pop)
#else
#define MOE_LORA_TARGET(list) MOE_LORA_PRAGMA(GCC target(list))
#define MOE_LORA_TARGET_END
#endif
