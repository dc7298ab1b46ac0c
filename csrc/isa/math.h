// exp and SiLU on 16 lanes, the same polynomial on every machine.
#pragma once

#include "isa/simd.h"

namespace turnstile::TURNSTILE_LEVEL {

// e^x = 2^n * e^r with n = round(x / ln 2), |r| <= ln(2) / 2; e^r by its Taylor series to r^7, whose
// remainder is below 6e-9. Below -87 the result is e^-87, about 1e-38; NaN stays NaN.
INLINE F exp(F x) {
  x = max(splat(-87.0f), min(splat(88.0f), x));
  const F n = float_of(round_i(x * splat(1.44269504f)));
  F r = fma(n, splat(-0.693359375f), x);       // ln 2 in two pieces, the first one exact
  r = fma(n, splat(2.12194440e-4f), r);
  F p = fma(r, splat(1.0f / 5040), splat(1.0f / 720));
  p = fma(p, r, splat(1.0f / 120));
  p = fma(p, r, splat(1.0f / 24));
  p = fma(p, r, splat(1.0f / 6));
  p = fma(p, r, splat(0.5f));
  p = fma(p, r, splat(1.0f));
  p = fma(p, r, splat(1.0f));
  return p * bits_f(left<23>(round_i(n) + splat_i(127)));
}

// The same for one number, by the same operations: bitwise what a lane would give.
INLINE float exp_one(float x) {
  float lanes[16];
  store(lanes, exp(splat(x)));
  return lanes[0];
}

constexpr float kLog2E = 1.44269504f;

// 2^x for x <= 127, by a polynomial in the fraction of x that is 1 at 0; its relative error is 3e-6 (degree
// 4) or 2e-9 before rounding (degree 6). From -126 on down the result may be anything from 0 to 2^-126;
// NaN stays NaN.
template <int degree>
INLINE F exp2(F x) {
  static_assert(degree == 4 || degree == 6);
  const auto polynomial = [](F r) {
    F p;
    if constexpr (degree == 4) {
      p = fma(r, splat(0.009582851f), splat(0.05590643f));
      p = fma(p, r, splat(0.24024099f));
      p = fma(p, r, splat(0.69312418f));
    } else {
      p = fma(r, splat(0.0001535336f), splat(0.0013398875f));
      p = fma(p, r, splat(0.009618437f));
      p = fma(p, r, splat(0.055503324f));
      p = fma(p, r, splat(0.24022648f));
      p = fma(p, r, splat(0.69314718f));
    }
    return fma(p, r, splat(1.0f));
  };
  return scaled_by_exp2(x, polynomial);
}

INLINE F silu(F x) {
  const F e = exp2<6>(min(splat(127.0f), x * splat(-kLog2E)));
  return x / (splat(1.0f) + e);
}

}  // namespace turnstile::TURNSTILE_LEVEL
