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

INLINE F silu(F x) { return x / (splat(1.0f) + exp(splat(0.0f) - x)); }

}  // namespace turnstile::TURNSTILE_LEVEL
