// Numbers in memory, float32 or bfloat16, as registers of float32; and GELU on such a register.
#pragma once
#include "simd.h"

namespace moonvit {

inline __m512 widen(__m256i x) {
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

inline __m512 get(const float* x, __mmask16 mask) { return _mm512_maskz_loadu_ps(mask, x); }
inline __m512 get(const uint16_t* x, __mmask16 mask) { return widen(_mm256_maskz_loadu_epi16(mask, x)); }
inline void put(float* x, __mmask16 mask, __m512 y) { _mm512_mask_storeu_ps(x, mask, y); }
inline void put(uint16_t* x, __mmask16 mask, __m512 y) {
  _mm256_mask_storeu_epi16(x, mask, (__m256i)_mm512_cvtneps_pbh(y));
}

inline __mmask16 mask_at(long i, long width) {
  return width - i >= kLanes ? 0xffff : static_cast<__mmask16>((1u << (width - i)) - 1);
}

// x (1 + tanh u) / 2 = x / (1 + e^-2u), u = sqrt(2/pi) (x + 0.044715 x^3).
template <class Kind>
inline __m512 gelu_tanh(__m512 x) {
  constexpr float slope = -2.0f * 0.7978845608028654f * 1.4426950408889634f;  // in powers of 2
  const __m512 cubic = _mm512_fmadd_ps(_mm512_mul_ps(x, x), _mm512_set1_ps(0.044715f), _mm512_set1_ps(1.0f));
  const __m512 power = exp2<Kind>(_mm512_mul_ps(_mm512_mul_ps(x, _mm512_set1_ps(slope)), cubic));
  const __m512 below = _mm512_add_ps(_mm512_set1_ps(1.0f), power);
  if constexpr (Kind::per_word == 2) return _mm512_mul_ps(x, _mm512_rcp14_ps(below));
  return _mm512_div_ps(x, below);
}

}  // namespace moonvit
