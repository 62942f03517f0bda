// Products of eight-bit integers. Each row of x gets its own scale, its largest number / 127, and is rounded to
// integers on the way into the panels that `multiply` reads; sums are exact in 32 bits.
//
// The instruction takes unsigned numbers times signed ones, so 128 is added to x and 128 times the sum of the
// weights taken off again.
#include "int8.h"

#include <limits>

#include "panels.h"

namespace moonvit {
namespace {

constexpr long kOffset = 128;

struct Int8 {
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), a, b));
  }
};

thread_local Room room;

// The largest magnitude / 127, or 0 where that would be below the normal numbers. Compared as integers, so that a
// NaN is the largest of all.
template <class Number>
float scale_of(const Number* x, long count) {
  __m512i most = _mm512_setzero_si512();
  for (long i = 0; i < count; i += kLanes) {
    const __m512i bits = _mm512_castps_si512(get(x + i, mask_at(i, count)));
    most = _mm512_max_epi32(most, _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff)));
  }
  const int largest = _mm512_reduce_max_epi32(most);
  float y;
  __builtin_memcpy(&y, &largest, sizeof y);
  const float scale = y / 127.0f;
  return scale < std::numeric_limits<float>::min() ? 0.0f : scale;
}

// x / scale + 128, halves to even; a row of zeros has scale 0 and stays zeros.
template <class Number>
void quantise(const Number* x, long count, float scale, uint8_t* out) {
  const __m512 divisor = _mm512_set1_ps(scale == 0.0f ? 1.0f : scale);
  for (long i = 0; i < count; i += kLanes) {
    const __mmask16 mask = mask_at(i, count);
    const __m512i y = _mm512_cvtps_epi32(_mm512_div_ps(get(x + i, mask), divisor));
    _mm_mask_storeu_epi8(out + i, mask, _mm512_cvtepi32_epi8(_mm512_add_epi32(y, _mm512_set1_epi32(kOffset))));
  }
}

struct Panels {
  float* scales;  // a row each
  Word* words;    // [rows / 8, inner / 4, 8]
};

Panels panels_of(const Int8Product& call) {
  float* scales = static_cast<float*>(call.work);
  return {scales, static_cast<Word*>(call.work) + (call.rows + kLanes - 1) / kLanes * kLanes};
}

// Sixteen rows from `row` on, quantised, into two panels.
template <class Number>
void pack_rows(const Int8Product& call, long row) {
  const long words = call.inner / 4, count = std::min<long>(kLanes, call.rows - row);
  const Panels panels = panels_of(call);
  Word* rows = room.fit(kLanes * words);
  for (long r = 0; r < count; ++r) {
    const Number* x = static_cast<const Number*>(call.x) + (row + r) * call.x_row;
    const float scale = panels.scales[row + r] = scale_of(x, call.inner);
    quantise(x, call.inner, scale, reinterpret_cast<uint8_t*>(rows + r * words));
  }
  store_panels(rows, words, count, words, panels.words + row * words);
}

template <class Kind, int columns>
void finish(const Int8Product& call, long row, long output, const __m512 (&sum)[kRows][columns]) {
  using Number = typename Kind::Number;
  const long count = std::min<long>(kRows, call.rows - row);
  const auto* bias = static_cast<const Number*>(call.bias);
  const float* scales = panels_of(call).scales + row;
#pragma GCC unroll 4
  for (int c = 0; c < columns; ++c) {
    const long at = output + c * kLanes;
    const __mmask16 mask = mask_at(at, call.outputs);
    const __m512 scale = get(call.scale + at, mask);
    const __m512i offset = _mm512_slli_epi32(_mm512_maskz_loadu_epi32(mask, call.sums + at), 7);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      if (r >= count) break;
      Number* out = static_cast<Number*>(call.out) + (row + r) * call.out_row + at;
      __m512 y = _mm512_cvtepi32_ps(_mm512_sub_epi32(_mm512_castps_si512(sum[r][c]), offset));
      y = _mm512_mul_ps(y, _mm512_mul_ps(scale, _mm512_set1_ps(scales[r])));
      conclude<Kind>(y, call.epilogue, bias ? bias + at : nullptr, out, mask);
    }
  }
}

// Outputs [output, output + 16 columns) of rows [begin, end).
template <class Kind, int columns>
void block(const Int8Product& call, long output, long begin, long end) {
  const long words = call.inner / 4;
  Word* weights = room.fit(words * columns * kLanes);
  pack_weights<columns>(reinterpret_cast<const Word*>(call.weight), words, call.outputs, output, words, weights);
  const Word* rows = panels_of(call).words;
  for (long row = begin; row < end; row += kRows) {
    __m512 sum[kRows][columns];
    each(sum, [](long, __m512) { return _mm512_setzero_ps(); });
    multiply<Int8>(rows + row * words, weights, words, sum);
    finish<Kind>(call, row, output, sum);
  }
}

template <class Kind>
void run(const Int8Product& call) {
  using Number = typename Kind::Number;
  in_parts<Number>(call, call.inner / 4 + 1, [](const Int8Product& part) {
    in_tasks(part, [&](long row) { pack_rows<Number>(part, row); },
             [&](auto columns, long output, long begin, long end) { block<Kind, columns>(part, output, begin, end); });
  });
}

}  // namespace
}  // namespace moonvit

extern "C" int moonvit_int8_product(const moonvit::Int8Product* call) {
  using namespace moonvit;
  if (call->inner % 4) return 1;
  if (call->inner > 65536) return 3;  // 255 * 127 * inner must stay below 2^31
  if (call->work_words < kLanes * (call->inner / 4 + 1)) return 2;
  call->kind == kBfloat16 ? run<Bfloat16>(*call) : run<Float32>(*call);
  return 0;
}
