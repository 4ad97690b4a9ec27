// Elementary functions of vectors of fp32, for the CPU kernels.
#pragma once

#include "cpu_vec.h"

namespace pagedattn::PAGEDATTN_CPU_NAMESPACE {
namespace {

// c[0] + c[1] x + c[2] x^2 + ...
template <int N>
PAGEDATTN_INLINE Vec polynomial(Vec x, const float (&c)[N]) {
  Vec sum = broadcast(c[N - 1]);
  PAGEDATTN_UNROLL
  for (int i = N - 2; i >= 0; --i) sum = fma(sum, x, broadcast(c[i]));
  return sum;
}

// mantissa * 2^n
struct Exponential {
  Vec mantissa;
  Vec n;
  Vec shifted;  // its last bits are the integer n
};

// e^x, or e^-x with a SIGN of -1, for |x| up to about 100. SIGN x = n ln 2 + SIGN r (ln 2 in two parts, as in Cephes
// expf). The mantissa is a polynomial in SIGN r. Of the polynomials with constant and slope 1 it has the least relative
// error, 3e-9.
template <int SIGN = 1>
PAGEDATTN_INLINE Exponential exponential(Vec x) {
  const Vec round_to_int = broadcast(0x1.8p23f);
  const Vec shifted = fma(x, broadcast(SIGN * 1.44269504f), round_to_int);
  const Vec n = shifted - round_to_int;
  const Vec r = fma(n, broadcast(SIGN * 2.12194440e-4f), fma(n, broadcast(SIGN * -0.693359375f), x));
  const Vec mantissa = polynomial(
      r, {1.0f, SIGN * 1.0f, 4.9999994e-1f, SIGN * 1.6666521e-1f, 4.1668266e-2f, SIGN * 8.368675e-3f, 1.3820662e-3f});
  return {mantissa, n, shifted};
}

// e^x within 1 ulp; 0 below -87.3, infinity above 88.7.
PAGEDATTN_INLINE Vec exp(Vec x) {
#if defined(__AVX512F__)
  // A large x would lose the digits of r. In this order, NaN stays NaN.
  x = (Vec)_mm512_maskz_min_ps(0xffff, (__m512)broadcast(90.0f), (__m512)x);
  const Exponential e = exponential(x);
  const __mmask16 not_small = _mm512_cmp_ps_mask((__m512)x, (__m512)broadcast(-87.33654f), _CMP_NLT_UQ);
  return (Vec)_mm512_maskz_scalef_ps(not_small, (__m512)e.mantissa, (__m512)e.n);
#else
  // Added to the exponent, n multiplies by 2^n, up to 2^128: for that n, the mantissa is below 1.
  const Exponential e = exponential(x);
  const Vec result = (Vec)((UintVec)e.mantissa + ((UintVec)e.shifted << 23));
  const Vec small_or_nan = max(Vec{}, x);  // in this order, NaN stays NaN
  return select(x > 88.72283f, broadcast(__builtin_inff()), select(x >= -87.33654f, result, small_or_nan));
#endif
}

PAGEDATTN_INLINE float exp(float x) { return exp(broadcast(x))[0]; }

// A softmax's exponentials are relative to its greatest logit. Where nothing is visible, they are relative to 0, so
// that every exponential is 0.
PAGEDATTN_INLINE float softmax_base(float max_logit) { return max_logit == -__builtin_inff() ? 0.0f : max_logit; }
PAGEDATTN_INLINE Vec softmax_base(Vec max_logits) { return select(max_logits == -__builtin_inff(), Vec{}, max_logits); }

// 1 - erf(x) for x >= 0, to 2e-7 of itself: the Chebyshev fit in Press et al., Numerical Recipes, section 6.2.
PAGEDATTN_INLINE Vec erfc(Vec x) {
  const Vec t = 1.0f / fma(x, broadcast(0.5f), broadcast(1.0f));
  const Vec p = polynomial(t, {-1.26551223f, 1.00002368f, 0.37409196f, 0.09678418f, -0.18628806f, 0.27886807f,
                               -1.13520398f, 1.48851587f, -0.82215223f, 0.17087277f});
  return t * exp(fma(-x, x, p));
}

// x times the logistic function of u; u is NaN only if x is.
PAGEDATTN_INLINE Vec times_sigmoid(Vec x, Vec u) {
#if defined(__AVX512F__)
  // Beyond 90 on either side the quotient is x or 0. One instruction clamps u to this range, and the exponential needs
  // no further check.
  constexpr int LESSER_MAGNITUDE = 2;
  u = (Vec)_mm512_maskz_range_ps(0xffff, (__m512)u, (__m512)broadcast(90.0f), LESSER_MAGNITUDE);
  const Exponential e = exponential<-1>(u);
  return x / (1.0f + (Vec)_mm512_maskz_scalef_ps(0xffff, (__m512)e.mantissa, (__m512)e.n));
#else
  // Below -88.7, adding n to the exponent gives the bits of infinity or of a NaN. Infinity is meant.
  const Exponential e = exponential<-1>(min(max(u, broadcast(-89.0f)), broadcast(80.0f)));
  const IntVec bits = (IntVec)e.mantissa + ((IntVec)e.shifted << 23);
  return x / (1.0f + (Vec)min(bits, IntVec{} + 0x7f800000));
#endif
}

// Cephes tanhf: near 0, where the quotient would lose digits, a polynomial.
PAGEDATTN_INLINE Vec tanh(Vec x) {
  const Vec square = x * x;
  const Vec p = polynomial(
      square, {-3.33332819422e-1f, 1.33314422036e-1f, -5.37397155531e-2f, 2.06390887954e-2f, -5.70498872745e-3f});
  const Vec near_zero = fma(p * square, x, x);
  const Vec quotient = 1.0f - 2.0f / (exp(2.0f * x) + 1.0f);
  return select(square < 0.625f * 0.625f, near_zero, quotient);
}

}  // namespace
}  // namespace pagedattn::PAGEDATTN_CPU_NAMESPACE
