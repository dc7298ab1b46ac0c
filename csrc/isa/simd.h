// Vectors of 16 lanes of 4 bytes on every machine: F (float) and I (int32), and the few operations
// the kernels are written in. AVX-512 has them in one register, the others in parts.
#pragma once

#include <cstddef>
#include <cstdint>

#define INLINE static inline __attribute__((always_inline))

#if defined(__AVX512F__)
#include "isa/simd_avx512.h"
#else
#include "isa/simd_parts.h"
#endif
