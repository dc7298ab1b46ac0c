// 16 lanes in 2 AVX registers, or in 4 of whatever 128-bit vectors the machine has (SSE2, NEON):
// compiler vectors, so this file compiles for any target.
#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace turnstile::TURNSTILE_LEVEL {

#if defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kParts = 16 / kLanes;

typedef float Fp __attribute__((vector_size(4 * kLanes)));
typedef int32_t Ip __attribute__((vector_size(4 * kLanes)));

struct F { Fp v[kParts]; };
struct I { Ip v[kParts]; };

#define EACH_PART _Pragma("GCC unroll 4") for (int i = 0; i < kParts; ++i)

// Part by part: a copy of all 64 bytes at once goes through the stack in other pieces than it is read
// back in, which stalls.
INLINE F load(const float* p) {
  F r;
  EACH_PART __builtin_memcpy(&r.v[i], p + i * kLanes, sizeof(Fp));
  return r;
}
INLINE void store(float* p, F a) { EACH_PART __builtin_memcpy(p + i * kLanes, &a.v[i], sizeof(Fp)); }
INLINE void stream(float* p, F a) { store(p, a); }  // nothing gained in parts of a cache line
INLINE void finish_streams() {}
INLINE I load_i(const void* p) {
  I r;
  EACH_PART __builtin_memcpy(&r.v[i], static_cast<const char*>(p) + i * sizeof(Ip), sizeof(Ip));
  return r;
}
INLINE void store_i(void* p, I a) {
  EACH_PART __builtin_memcpy(static_cast<char*>(p) + i * sizeof(Ip), &a.v[i], sizeof(Ip));
}
INLINE Fp splat_part(float x) {
  Fp r;
  for (int lane = 0; lane < kLanes; ++lane) r[lane] = x;
  return r;
}
INLINE F splat(float x) { F r; EACH_PART r.v[i] = splat_part(x); return r; }
INLINE I splat_i(int32_t x) { I r; EACH_PART r.v[i] = Ip{} + x; return r; }

INLINE F operator+(F a, F b) { EACH_PART a.v[i] += b.v[i]; return a; }
INLINE F operator-(F a, F b) { EACH_PART a.v[i] -= b.v[i]; return a; }
INLINE F operator*(F a, F b) { EACH_PART a.v[i] *= b.v[i]; return a; }
INLINE F operator/(F a, F b) { EACH_PART a.v[i] /= b.v[i]; return a; }
INLINE I operator+(I a, I b) { EACH_PART a.v[i] += b.v[i]; return a; }
INLINE I operator-(I a, I b) { EACH_PART a.v[i] -= b.v[i]; return a; }
INLINE I operator&(I a, I b) { EACH_PART a.v[i] &= b.v[i]; return a; }
INLINE I operator|(I a, I b) { EACH_PART a.v[i] |= b.v[i]; return a; }
template <int n> INLINE I left(I a) { EACH_PART a.v[i] <<= n; return a; }
INLINE I times_256(I a) { return left<8>(a); }
template <int n> INLINE I right(I a) { EACH_PART a.v[i] >>= n; return a; }

INLINE F bits_f(I a) { F r; EACH_PART r.v[i] = (Fp)a.v[i]; return r; }
INLINE I bits_i(F a) { I r; EACH_PART r.v[i] = (Ip)a.v[i]; return r; }

INLINE F fma(F a, F b, F c) {
#if defined(__AVX2__)
  EACH_PART c.v[i] = (Fp)_mm256_fmadd_ps((__m256)a.v[i], (__m256)b.v[i], (__m256)c.v[i]);
  return c;
#else
  return a * b + c;  // two roundings: a level may differ from another, never from itself
#endif
}
// Where the comparison fails (NaN), both return b.
INLINE F max(F a, F b) { EACH_PART a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F min(F a, F b) { EACH_PART a.v[i] = a.v[i] < b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE I max(I a, I b) { EACH_PART a.v[i] = a.v[i] > b.v[i] ? a.v[i] : b.v[i]; return a; }
INLINE F abs(F a) { return bits_f(bits_i(a) & splat_i(0x7FFFFFFF)); }
INLINE F float_of(I a) {
  F r;
  EACH_PART r.v[i] = __builtin_convertvector(a.v[i], Fp);
  return r;
}
// To the nearest, ties to even, for |a| < 2^22: the sum's last mantissa bits are the integer.
INLINE I round_i(F a) {
  const float magic = 12582912.0f;  // 1.5 * 2^23
  return bits_i(a + splat(magic)) - splat_i(0x4B400000);
}

// 2^round(x) * of(x - round(x)).
template <class Of>
INLINE F scaled_by_exp2(F x, const Of& of) {
  const float magic = 12582912.0f;  // 1.5 * 2^23: the last bits of x + magic are round(x)
  x = max(splat(-126.0f), x);       // NaN stays
  const F shifted = x + splat(magic + 127);
  return of(x - (shifted - splat(magic + 127))) * bits_f(left<23>(bits_i(shifted)));
}

INLINE F between(F a, F b, int first, int last) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  for (int lane = first; lane < last; ++lane) y[lane] = x[lane];
  return load(y);
}
INLINE unsigned equal_mask(F a, F b) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  unsigned mask = 0;
  for (int lane = 0; lane < 16; ++lane) mask |= static_cast<unsigned>(x[lane] == y[lane]) << lane;
  return mask;
}
INLINE unsigned greater_mask(F a, F b) {
  float x[16], y[16];
  store(x, a);
  store(y, b);
  unsigned mask = 0;
  for (int lane = 0; lane < 16; ++lane) mask |= static_cast<unsigned>(x[lane] > y[lane]) << lane;
  return mask;
}

// Always the same tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
INLINE float sum(F a) {
  float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane) x[lane] = x[lane] + x[lane + width];
  return x[0];
}
INLINE float highest(F a) {
  float x[16];
  store(x, a);
  for (int width = 8; width > 0; width /= 2)
    for (int lane = 0; lane < width; ++lane)
      x[lane] = x[lane] > x[lane + width] ? x[lane] : x[lane + width];
  return x[0];
}
// The largest lane.
INLINE int32_t highest(I a) {
  int32_t x[16];
  store_i(x, a);
  for (int lane = 1; lane < 16; ++lane) x[0] = x[lane] > x[0] ? x[lane] : x[0];
  return x[0];
}

// One stage of a Hadamard transform within the lanes: lane i becomes x[i] + x[i + stride] if i's bit
// `stride` is clear, x[i - stride] - x[i] if it is set.
template <int stride> INLINE F butterfly(F a) {
  float x[16], y[16];
  store(x, a);
  for (int lane = 0; lane < 16; ++lane) y[lane] = lane & stride ? x[lane ^ stride] - x[lane] : x[lane] + x[lane ^ stride];
  return load(y);
}

// acc + the four products of unsigned bytes of a and signed bytes of b in each lane. AVX2's own
// byte product saturates at 16 bits, so both sides are widened: bytes 0 and 2 of a lane, then 1 and 3.
INLINE I dot4(I acc, I a, I b) {
#if defined(__AVX2__)
  EACH_PART {
    const __m256i x = (__m256i)a.v[i], y = (__m256i)b.v[i];
    const __m256i even = _mm256_madd_epi16(_mm256_and_si256(x, _mm256_set1_epi16(0xFF)),
                                           _mm256_srai_epi16(_mm256_slli_epi16(y, 8), 8));
    const __m256i odd = _mm256_madd_epi16(_mm256_srli_epi16(x, 8), _mm256_srai_epi16(y, 8));
    acc.v[i] += (Ip)_mm256_add_epi32(even, odd);
  }
  return acc;
#else
  typedef int16_t Sp __attribute__((vector_size(4 * kLanes)));
  typedef uint16_t Up __attribute__((vector_size(4 * kLanes)));
  EACH_PART {
    // A product of an unsigned and a signed byte fits 16 bits: at most 255 * 128.
    const Sp y = (Sp)b.v[i];
    const Up x = (Up)a.v[i];
    const Ip even = (Ip)((Sp)(x & static_cast<uint16_t>(0xFF)) * ((y << 8) >> 8));
    const Ip odd = (Ip)((Sp)(x >> 8) * (y >> 8));
    acc.v[i] += ((even << 16) >> 16) + (even >> 16) + ((odd << 16) >> 16) + (odd >> 16);
  }
  return acc;
#endif
}

// acc + the two products of bfloat16 values in each lane.
INLINE F dot2(F acc, I a, I b) {
  const I high = splat_i(static_cast<int32_t>(0xFFFF0000u));
  acc = fma(bits_f(left<16>(a)), bits_f(left<16>(b)), acc);
  return fma(bits_f(a & high), bits_f(b & high), acc);
}

INLINE I load_u8(const uint8_t* p) {
  int32_t x[16];
  for (int lane = 0; lane < 16; ++lane) x[lane] = p[lane];
  return load_i(x);
}
INLINE I load_s8(const uint8_t* p) {
  int32_t x[16];
  for (int lane = 0; lane < 16; ++lane) x[lane] = static_cast<int8_t>(p[lane]);
  return load_i(x);
}
INLINE void store_u8(uint8_t* p, I a) {
  int32_t x[16];
  store_i(x, a);
  for (int lane = 0; lane < 16; ++lane) p[lane] = static_cast<uint8_t>(x[lane]);
}
// Four times 16 lanes of -127 to 127, as bytes of lane + 128.
INLINE void store_offset_bytes(uint8_t* p, const I* q) {
  for (int i = 0; i < 4; ++i) store_u8(p + 16 * i, q[i] + splat_i(128));
}
// Four times 16 lanes of 16 bits: their high bytes and their low bytes, 64 each.
INLINE void store_planes(const I* q, uint8_t* high, uint8_t* low) {
  for (int i = 0; i < 4; ++i) {
    store_u8(high + 16 * i, right<8>(q[i]));
    store_u8(low + 16 * i, q[i]);
  }
}
INLINE F load_bf16(const uint16_t* p) {
  int32_t x[16];
  for (int lane = 0; lane < 16; ++lane) x[lane] = static_cast<int32_t>(static_cast<uint32_t>(p[lane]) << 16);
  return bits_f(load_i(x));
}
INLINE void store_bf16(uint16_t* p, F a) {
  uint32_t x[16];
  store_i(x, bits_i(a));
  for (int lane = 0; lane < 16; ++lane) {
    // Round to nearest even; a NaN keeps its top bits and is made quiet.
    const uint32_t bits = x[lane];
    const bool nan = (bits & 0x7FFFFFFFu) > 0x7F800000u;
    const uint32_t up = nan ? bits | 0x400000u : bits + 0x7FFFu + ((bits >> 16) & 1u);
    p[lane] = static_cast<uint16_t>(up >> 16);
  }
}

#undef EACH_PART

}  // namespace turnstile::TURNSTILE_LEVEL
