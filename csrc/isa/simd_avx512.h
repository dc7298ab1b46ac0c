// 16 lanes in one AVX-512 register. Included by simd.h inside a level's namespace.
#include <immintrin.h>

namespace turnstile::TURNSTILE_LEVEL {

struct F { __m512 v; };
struct I { __m512i v; };

INLINE F load(const float* p) { return {_mm512_loadu_ps(p)}; }
INLINE void store(float* p, F a) { _mm512_storeu_ps(p, a.v); }
// Past the caches, to an aligned p; other threads see it after finish_streams.
INLINE void stream(float* p, F a) { _mm512_stream_ps(p, a.v); }
INLINE void finish_streams() { _mm_sfence(); }
INLINE I load_i(const void* p) { return {_mm512_loadu_si512(p)}; }
INLINE void store_i(void* p, I a) { _mm512_storeu_si512(p, a.v); }
INLINE F splat(float x) { return {_mm512_set1_ps(x)}; }
INLINE I splat_i(int32_t x) { return {_mm512_set1_epi32(x)}; }

INLINE F operator+(F a, F b) { return {_mm512_add_ps(a.v, b.v)}; }
INLINE F operator-(F a, F b) { return {_mm512_sub_ps(a.v, b.v)}; }
INLINE F operator*(F a, F b) { return {_mm512_mul_ps(a.v, b.v)}; }
INLINE F operator/(F a, F b) { return {_mm512_div_ps(a.v, b.v)}; }
INLINE I operator+(I a, I b) { return {_mm512_add_epi32(a.v, b.v)}; }
INLINE I operator-(I a, I b) { return {_mm512_sub_epi32(a.v, b.v)}; }
INLINE I operator&(I a, I b) { return {_mm512_and_si512(a.v, b.v)}; }
INLINE I operator|(I a, I b) { return {_mm512_or_si512(a.v, b.v)}; }
template <int n> INLINE I left(I a) { return {_mm512_slli_epi32(a.v, n)}; }
template <int n> INLINE I right(I a) { return {_mm512_srai_epi32(a.v, n)}; }

// By shuffling bytes, which another unit does than shifts, conversions and products of floats: these have one
// unit instead of two while tiles are multiplied.
INLINE I times_256(I a) {
  return {_mm512_shuffle_epi8(a.v, _mm512_set4_epi32(0x0E0D0C80, 0x0A090880, 0x06050480, 0x02010080))};
}

INLINE F fma(F a, F b, F c) { return {_mm512_fmadd_ps(a.v, b.v, c.v)}; }
// Where the comparison fails (NaN), both return b.
INLINE F max(F a, F b) { return {_mm512_max_ps(a.v, b.v)}; }
INLINE F min(F a, F b) { return {_mm512_min_ps(a.v, b.v)}; }
INLINE F abs(F a) { return {_mm512_abs_ps(a.v)}; }
INLINE I max(I a, I b) { return {_mm512_max_epi32(a.v, b.v)}; }
INLINE I round_i(F a) { return {_mm512_cvtps_epi32(a.v)}; }
INLINE F float_of(I a) { return {_mm512_cvtepi32_ps(a.v)}; }
INLINE F bits_f(I a) { return {_mm512_castsi512_ps(a.v)}; }
INLINE I bits_i(F a) { return {_mm512_castps_si512(a.v)}; }

// 2^round(x) * of(x - round(x)).
template <class Of>
INLINE F scaled_by_exp2(F x, const Of& of) {
  const F r = {_mm512_reduce_ps(x.v, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)};
  return {_mm512_scalef_ps(of(r).v, (x - r).v)};
}

// Lanes first <= i < last of a, the others of b.
INLINE F between(F a, F b, int first, int last) {
  const auto mask = static_cast<__mmask16>((0xFFFFu >> (16 - last)) & (0xFFFFu << first));
  return {_mm512_mask_blend_ps(mask, b.v, a.v)};
}
INLINE unsigned equal_mask(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_EQ_OQ); }
INLINE unsigned greater_mask(F a, F b) { return _mm512_cmp_ps_mask(a.v, b.v, _CMP_GT_OQ); }

INLINE F swapped_halves(F a) { return {_mm512_shuffle_f32x4(a.v, a.v, 0x4E)}; }
// Always the same tree: 8 + 8, 4 + 4, 2 + 2, 1 + 1.
INLINE float sum(F a) {
  F s = a + swapped_halves(a);
  s = s + F{_mm512_shuffle_f32x4(s.v, s.v, 0xB1)};
  s = s + F{_mm512_permute_ps(s.v, 0x4E)};
  s = s + F{_mm512_permute_ps(s.v, 0xB1)};
  return _mm512_cvtss_f32(s.v);
}
INLINE float highest(F a) {
  F s = max(a, swapped_halves(a));
  s = max(s, F{_mm512_shuffle_f32x4(s.v, s.v, 0xB1)});
  s = max(s, F{_mm512_permute_ps(s.v, 0x4E)});
  s = max(s, F{_mm512_permute_ps(s.v, 0xB1)});
  return _mm512_cvtss_f32(s.v);
}

// The same trees for 16 registers at once: lane i is all lanes of a[i]. Each stage halves what is left of two
// registers and puts them into one.
template <class Two>
INLINE F each_reduced(const F* a, const Two& two) {
  const auto eights = [&](F x, F y) {
    return two(F{_mm512_shuffle_f32x4(x.v, y.v, 0x44)}, F{_mm512_shuffle_f32x4(x.v, y.v, 0xEE)});
  };
  const auto fours = [&](F x, F y) {
    return two(F{_mm512_shuffle_f32x4(x.v, y.v, 0x88)}, F{_mm512_shuffle_f32x4(x.v, y.v, 0xDD)});
  };
  F quarter[4];  // of a[i], a[4 + i], a[8 + i], a[12 + i]
  for (int i = 0; i < 4; ++i) quarter[i] = fours(eights(a[i], a[4 + i]), eights(a[8 + i], a[12 + i]));
  const auto twos = [&](F x, F y) {
    return two(F{_mm512_shuffle_ps(x.v, y.v, 0x44)}, F{_mm512_shuffle_ps(x.v, y.v, 0xEE)});
  };
  const F x = twos(quarter[0], quarter[1]), y = twos(quarter[2], quarter[3]);
  return two(F{_mm512_shuffle_ps(x.v, y.v, 0x88)}, F{_mm512_shuffle_ps(x.v, y.v, 0xDD)});
}
INLINE F each_sum(const F (&a)[16]) {
  return each_reduced(a, [](F x, F y) { return x + y; });
}
INLINE F each_highest(const F (&a)[16]) {
  return each_reduced(a, [](F x, F y) { return max(x, y); });
}

// The largest lane.
INLINE int32_t highest(I a) { return _mm512_reduce_max_epi32(a.v); }

// One stage of a Hadamard transform within the lanes: lane i becomes x[i] + x[i + stride] if i's bit
// `stride` is clear, x[i - stride] - x[i] if it is set: one fused operation, in which nothing is rounded
// but the sum.
template <int stride> INLINE F butterfly(F a) {
  const __m512 other = stride == 8   ? swapped_halves(a).v
                       : stride == 4 ? _mm512_shuffle_f32x4(a.v, a.v, 0xB1)
                       : stride == 2 ? _mm512_permute_ps(a.v, 0x4E)
                                     : _mm512_permute_ps(a.v, 0xB1);
  constexpr __mmask16 set = stride == 8 ? 0xFF00 : stride == 4 ? 0xF0F0 : stride == 2 ? 0xCCCC : 0xAAAA;
  const __m512 sign = _mm512_mask_blend_ps(set, _mm512_set1_ps(1.0f), _mm512_set1_ps(-1.0f));
  return {_mm512_fmadd_ps(a.v, sign, other)};
}

// acc + the four products of unsigned bytes of a and signed bytes of b in each lane.
INLINE I dot4(I acc, I a, I b) { return {_mm512_dpbusd_epi32(acc.v, a.v, b.v)}; }

// acc + the two products of bfloat16 values in each lane.
INLINE F dot2(F acc, I a, I b) {
#if defined(__AVX512BF16__)
  return {_mm512_dpbf16_ps(acc.v, (__m512bh)a.v, (__m512bh)b.v)};
#else
  const I high = splat_i(static_cast<int32_t>(0xFFFF0000u));
  acc = fma(bits_f(left<16>(a)), bits_f(left<16>(b)), acc);
  return fma(bits_f(a & high), bits_f(b & high), acc);
#endif
}

INLINE I load_u8(const uint8_t* p) {
  return {_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE I load_s8(const uint8_t* p) {
  return {_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)))};
}
INLINE void store_u8(uint8_t* p, I a) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(a.v));
}
// Packing works within each quarter of a register: of four registers packed into one, quarter i has lanes
// 4 i to 4 i + 3 of all. This order of its lanes puts them one register after the other.
INLINE __m512i packed_order() { return _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15); }
// Four times 16 lanes of -127 to 127, as bytes of lane + 128.
INLINE void store_offset_bytes(uint8_t* p, const I* q) {
  const __m512i bytes = _mm512_packs_epi16(_mm512_packs_epi32(q[0].v, q[1].v), _mm512_packs_epi32(q[2].v, q[3].v));
  _mm512_storeu_si512(p, _mm512_xor_si512(_mm512_permutexvar_epi32(packed_order(), bytes), _mm512_set1_epi8(-128)));
}
// Four times 16 lanes of 16 bits: their high bytes and their low bytes, 64 each.
INLINE void store_planes(const I* q, uint8_t* high, uint8_t* low) {
  const __m512i a = _mm512_packus_epi32(q[0].v, q[1].v), b = _mm512_packus_epi32(q[2].v, q[3].v);
  const __m512i byte = _mm512_set1_epi16(0xFF);
  const __m512i highs = _mm512_packus_epi16(_mm512_srli_epi16(a, 8), _mm512_srli_epi16(b, 8));
  const __m512i lows = _mm512_packus_epi16(_mm512_and_si512(a, byte), _mm512_and_si512(b, byte));
  _mm512_storeu_si512(high, _mm512_permutexvar_epi32(packed_order(), highs));
  _mm512_storeu_si512(low, _mm512_permutexvar_epi32(packed_order(), lows));
}
INLINE F load_bf16(const uint16_t* p) {
  const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return bits_f(left<16>(I{_mm512_cvtepu16_epi32(half)}));
}
INLINE void store_bf16(uint16_t* p, F a) {
#if defined(__AVX512BF16__)
  const __m256i half = (__m256i)_mm512_cvtneps_pbh(a.v);
#else
  // Round to nearest even; a NaN keeps its top bits and is made quiet.
  const __m512i bits = _mm512_castps_si512(a.v);
  const __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
  __m512i up = _mm512_add_epi32(_mm512_add_epi32(bits, odd), _mm512_set1_epi32(0x7FFF));
  const __mmask16 nan = _mm512_cmp_ps_mask(a.v, a.v, _CMP_UNORD_Q);
  up = _mm512_mask_or_epi32(up, nan, bits, _mm512_set1_epi32(0x400000));
  const __m256i half = _mm512_cvtepi32_epi16(_mm512_srli_epi32(up, 16));
#endif
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), half);
}

}  // namespace turnstile::TURNSTILE_LEVEL
