// Rows of q, k and v copied into the order in which `multiply` reads them, q and k turned on the way.
#pragma once
#include <algorithm>

#include "attention.h"
#include "simd.h"

namespace moonvit {

inline long padded(long keys) { return (keys + kRows - 1) / kRows * kRows; }

// One head of one picture, and where its packed keys and values lie in the workspace.
struct Unit {
  long start, length, head;
  Word *keys, *values;
};

struct Task {
  const Unit* unit;
  long begin, end;  // keys to pack, or queries to answer
};

// ---- rows of q and k, turned by their angles ----

inline void turn(float& a, float& b, float cosine, float sine) {
  const float first = a * cosine - b * sine;
  b = b * cosine + a * sine;
  a = first;
}

inline void round_row(const float* x, long d, float* out) { std::copy(x, x + d, out); }

inline void round_row(const float* x, long d, uint16_t* out) {
  for (long i = 0; i < d; i += kRows) {
    const __m128bh y = _mm256_cvtneps_pbh(_mm256_loadu_ps(x + i));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out + i), (__m128i)y);
  }
}

inline float widened(float x) { return x; }
inline float widened(uint16_t x) { return to_float(x); }

template <class Number>
void turned_row(const Call& call, const Number* x, long patch, Number* out) {
  const long d = call.head_dim, pairs = d / 2;
  const float *cosine = call.cosine + patch * pairs, *sine = call.sine + patch * pairs;
  float wide[kMaxHeadDim];
  for (long i = 0; i < d; ++i) wide[i] = widened(x[i]);
  if (call.rotation == kAdjacentPairs) {
    for (long i = 0; i < pairs; ++i) turn(wide[2 * i], wide[2 * i + 1], cosine[i], sine[i]);
  } else {
    for (long i = 0; i < pairs; ++i) turn(wide[i], wide[i + pairs], cosine[i], sine[i]);
  }
  round_row(wide, d, out);
}

// ---- packing ----

inline void put_half(Word* at, __m256i x) { _mm256_storeu_si256(reinterpret_cast<__m256i*>(at), x); }

// Eight bfloat16 as words.
inline __m256i get_half(const uint16_t* at) {
  return _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(at)));
}

// Up to 16 rows of one head from `patch` on, as words; rows past `end` are zero.
template <class Kind>
void gather_rows(const Call& call, const Plane& x, long head, long patch, long end, Word* rows) {
  using Number = typename Kind::Number;
  const long d = call.head_dim, words = d / Kind::per_word;
  for (int r = 0; r < kLanes; ++r) {
    auto* out = reinterpret_cast<Number*>(rows + r * kMaxHeadDim);
    if (patch + r >= end) {
      std::fill(rows + r * kMaxHeadDim, rows + r * kMaxHeadDim + words, 0);
      continue;
    }
    const Number* row = static_cast<const Number*>(x.data) + (patch + r) * x.row + head * x.head;
    if (call.rotation == kNoRotation) {
      std::copy(row, row + d, out);
    } else {
      turned_row(call, row, patch + r, out);
    }
  }
}

// Keys: [L / 8, d / per_word, 8] words.
template <class Kind>
void pack_keys(const Call& call, const Task& task) {
  const Unit& unit = *task.unit;
  const long words = call.head_dim / Kind::per_word, panel = words * kRows;
  alignas(64) Word rows[kLanes * kMaxHeadDim];
  for (long key = task.begin; key < task.end; key += kLanes) {
    gather_rows<Kind>(call, call.k, unit.head, unit.start + key, unit.start + unit.length, rows);
    Word* low = unit.keys + key / kRows * panel;
    const bool both = padded(unit.length) > key + kRows;
    exchange(rows, kMaxHeadDim, kLanes, words, [&](long w, __m512i x) {
      put_half(low + w * kRows, _mm512_castsi512_si256(x));
      if (both) put_half(low + panel + w * kRows, _mm512_extracti64x4_epi64(x, 1));
    });
  }
}

// Values: [d / 8, L / per_word, 8] words; a bfloat16 word holds one feature of two neighbouring patches.
template <class Kind>
void pack_values(const Call& call, const Task& task) {
  using Number = typename Kind::Number;
  const Unit& unit = *task.unit;
  const long d = call.head_dim, panel = padded(unit.length) / Kind::per_word * kRows;
  const Number* zero = static_cast<const Number*>(call.zeros);
  auto row_of = [&](long key) {
    const Number* first = static_cast<const Number*>(call.v.data) + unit.head * call.v.head;
    return key < unit.length ? first + (unit.start + key) * call.v.row : zero;
  };
  for (long key = task.begin; key < task.end; key += Kind::per_word) {
    Word* out = unit.values + key / Kind::per_word * kRows;
    const Number* row = row_of(key);
    if constexpr (Kind::per_word == 1) {
      for (long i = 0; i < d; i += kRows) put_half(out + i / kRows * panel, _mm256_castps_si256(_mm256_loadu_ps(row + i)));
    } else {
      const Number* next = row_of(key + 1);
      for (long i = 0; i < d; i += kRows) {
        const __m256i high = _mm256_slli_epi32(get_half(next + i), 16);
        put_half(out + i / kRows * panel, _mm256_or_si256(get_half(row + i), high));
      }
    }
  }
}

// Queries: [d / per_word, 16 columns] words.
template <class Kind, int columns>
void pack_queries(const Call& call, const Unit& unit, long query, long end, Word* out) {
  alignas(64) Word rows[kLanes * kMaxHeadDim];
  for (int c = 0; c < columns; ++c) {
    const long first = unit.start + query + c * kLanes;
    gather_rows<Kind>(call, call.q, unit.head, first, unit.start + end, rows);
    exchange(rows, kMaxHeadDim, kLanes, call.head_dim / Kind::per_word,
             [&](long w, __m512i x) { _mm512_storeu_si512(out + (w * columns + c) * kLanes, x); });
  }
}

}  // namespace moonvit
