// Vector pieces that the attention kernels share. Sixteen 32-bit words fill one register; a word holds one
// float32 or two bfloat16. Shape letters: L patches of a picture, d head size, Q queries of a block.
#pragma once
#include <immintrin.h>

#include <cstdint>

namespace moonvit {

using Word = uint32_t;
constexpr int kLanes = 16;  // words in a register
constexpr int kRows = 8;    // rows of a tile: with 3 columns of registers, 24 sums of the 32 registers

inline __m512 load(const float* at) { return _mm512_loadu_ps(at); }
inline void store(float* at, __m512 x) { _mm512_storeu_ps(at, x); }

// The two ways to multiply: `per_word` numbers in a word, and one step of a sum of products.
struct Float32 {
  using Number = float;
  static constexpr int per_word = 1;
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_fmadd_ps(_mm512_castsi512_ps(a), _mm512_castsi512_ps(b), sum);
  }
};

struct Bfloat16 {
  using Number = uint16_t;
  static constexpr int per_word = 2;
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
  }
};

// sum[r][c] += a[step][r] * b[step][16 c ...]: eight rows of `a` against columns of registers of `b`.
template <class Kind, int columns>
inline void multiply(const Word* a, const Word* b, long steps, __m512 (&sum)[kRows][columns]) {
  for (long step = 0; step < steps; ++step, a += kRows, b += columns * kLanes) {
    __m512i right[columns];
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) right[c] = _mm512_loadu_si512(b + c * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const __m512i left = _mm512_set1_epi32(static_cast<int>(a[r]));
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) sum[r][c] = Kind::step(sum[r][c], left, right[c]);
    }
  }
}

// The polynomial with these coefficients, highest first.
template <class... Rest>
inline __m512 polynomial(__m512 x, float highest, Rest... rest) {
  __m512 y = _mm512_set1_ps(highest);
  ((y = _mm512_fmadd_ps(y, x, _mm512_set1_ps(rest))), ...);
  return y;
}

// 2^x, 0 for -infinity, infinity for +infinity. The power of the fraction is taken by a polynomial on [0, 1) whose
// relative error is 7e-5 for bfloat16 (itself good to 4e-3) and 2e-9 for float32.
template <class Kind>
inline __m512 exp2(__m512 x) {
  const __m512 f = _mm512_reduce_ps(x, 0x01);  // x - floor(x)
  if constexpr (Kind::per_word == 2) {
    return _mm512_scalef_ps(polynomial(f, 0.07802452f, 0.2260672f, 0.6958335f, 0.9999252f), x);
  } else {
    return _mm512_scalef_ps(polynomial(f, 0.000217022555f, 0.001243968802f, 0.009678840949f, 0.05548334203f,
                                       0.2402298363f, 0.6931469838f, 1.0f), x);
  }
}

// Sixteen rows of sixteen words, rows and columns exchanged.
inline void transpose(__m512i (&x)[kLanes]) {
  __m512i y[kLanes];
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 2) {
    y[i] = _mm512_unpacklo_epi32(x[i], x[i + 1]);
    y[i + 1] = _mm512_unpackhi_epi32(x[i], x[i + 1]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; i += 4) {
    x[i] = _mm512_unpacklo_epi64(y[i], y[i + 2]);
    x[i + 1] = _mm512_unpackhi_epi64(y[i], y[i + 2]);
    x[i + 2] = _mm512_unpacklo_epi64(y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_unpackhi_epi64(y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 16
  for (int i = 0; i < 4; ++i) {  // 4x4 blocks stand in their 128-bit lanes: now exchange the lanes
    const __m512i a = _mm512_shuffle_i32x4(x[i], x[i + 4], 0x88), b = _mm512_shuffle_i32x4(x[i], x[i + 4], 0xdd);
    const __m512i c = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0x88);
    const __m512i d = _mm512_shuffle_i32x4(x[i + 8], x[i + 12], 0xdd);
    y[i] = _mm512_shuffle_i32x4(a, c, 0x88);
    y[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88);
    y[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    y[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
#pragma GCC unroll 16
  for (int i = 0; i < kLanes; ++i) x[i] = y[i];
}

// Up to 16 rows of `words` words, `stride` apart, turned on their side: each word of all rows goes to
// `put(word, register)`; lanes of absent rows are 0.
template <class Put>
inline void exchange(const Word* rows, long stride, long count, long words, Put put) {
  for (long w = 0; w < words; w += kLanes) {
    const long width = words - w < kLanes ? words - w : kLanes;
    const __mmask16 mask = static_cast<__mmask16>((1u << width) - 1);
    __m512i x[kLanes];
    for (int r = 0; r < kLanes; ++r)
      x[r] = r < count ? _mm512_maskz_loadu_epi32(mask, rows + r * stride + w) : _mm512_setzero_si512();
    transpose(x);
    for (long i = 0; i < width; ++i) put(w + i, x[i]);
  }
}

inline float to_float(uint16_t x) {
  const Word bits = static_cast<Word>(x) << 16;
  float y;
  __builtin_memcpy(&y, &bits, sizeof y);
  return y;
}

}  // namespace moonvit
