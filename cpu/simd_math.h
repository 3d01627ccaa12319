// exp2, log and tanh of a vector, to about one unit in the last place. The polynomials are minimax fits.
#pragma once

namespace jax_varlen {
namespace {

template <int N>
inline F Polynomial(F x, const float (&c)[N]) {
  F y = Set(c[N - 1]);
#pragma GCC unroll 16
  for (int i = N - 2; i >= 0; --i) y = y * x + c[i];
  return y;
}

// For x up to 127. Exactly 1 at 0 and exactly 0 below -125, so a masked logit of -inf leaves nothing behind.
inline F Exp2(F x) {
  constexpr float c[] = {1.0f, 6.931469776e-01f, 2.402224209e-01f, 5.550733744e-02f, 9.671512649e-03f, 1.326472707e-03f};
  const F shifter = x + 0x1.8p23f;  // rint(x) in the low bits
  return Scale(Polynomial(x - (shifter - 0x1.8p23f), c), shifter, x);
}

// Natural logarithm of a normal number; -inf at 0.
inline F Log(F x) {
  constexpr float c[] = {3.333331044e-01f,  -2.499998659e-01f, 2.000222658e-01f,  -1.666925116e-01f, 1.421865900e-01f,
                         -1.238434294e-01f, 1.187296459e-01f,  -1.178983574e-01f, 6.915427108e-02f};
  const I exponent = (Bits<I>(x) - 0x3f3504f3) >> 23;  // of x / sqrt(1/2)
  const F t = Bits<F>(Bits<I>(x) - (exponent << 23)) - 1.0f;
  const F log1p = t - t * t * (0.5f - t * Polynomial(t, c));
  const F y = __builtin_convertvector(exponent, F) * kLn2 + log1p;
  return x > 0.0f && x < kInf ? y : x == 0.0f ? Set(-kInf) : x;
}

inline F Tanh(F x) {
  constexpr float c[] = {-3.333333091e-01f, 1.333320977e-01f,  -5.394720459e-02f,
                         2.170296870e-02f,  -8.182677455e-03f, 2.147539912e-03f};
  const F a = Abs(x), z = a * a;
  const F small = a + a * z * Polynomial(z, c);
  const F clamped = a > 10.0f ? Set(10.0f) : a;
  const F large = 1.0f - 2.0f / (Exp2(clamped * (2.0f * kLog2E)) + 1.0f);
  const F y = a < 0.625f ? small : a == a ? large : a;
  return Bits<F>(Bits<U>(y) | (Bits<U>(x) & 0x80000000u));
}

}  // namespace
}  // namespace jax_varlen
