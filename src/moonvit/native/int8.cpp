// Products of eight-bit integers. Each row of x gets its own scale, its largest number / 127, and is rounded to
// integers on the way into the panels that `multiply` reads; sums are exact in 32 bits.
//
// The instruction takes unsigned numbers times signed ones, so 128 is added to x and 128 times the sum of the
// weights taken off again.
#include "int8.h"

#include <algorithm>
#include <limits>
#include <memory>

#include "numbers.h"

namespace moonvit {
namespace {

constexpr int kColumns = 3;
constexpr long kOutputs = kColumns * kLanes;
constexpr long kOffset = 128;

struct Int8 {
  static __m512 step(__m512 sum, __m512i a, __m512i b) {
    return _mm512_castsi512_ps(_mm512_dpbusd_epi32(_mm512_castps_si512(sum), a, b));
  }
};

struct Room {
  std::unique_ptr<Word[]> memory;
  long size = 0;

  Word* fit(long words) {
    if (size < words) {
      memory.reset(new Word[words + kLanes]);
      size = words;
    }
    return reinterpret_cast<Word*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
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
  Word* low = panels.words + row * words;
  exchange(rows, words, count, words, [&](long w, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + w * kRows), _mm512_castsi512_si256(x));
    if (count > kRows)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + (words + w) * kRows), _mm512_extracti64x4_epi64(x, 1));
  });
}

// The rows of the weight from `output` on, into [inner / 4, 16 columns].
template <int columns>
void pack_weights(const Int8Product& call, long output, Word* out) {
  const long words = call.inner / 4;
  for (int c = 0; c < columns; ++c) {
    const long first = output + c * kLanes, rows = std::min<long>(kLanes, call.outputs - first);
    exchange(reinterpret_cast<const Word*>(call.weight + first * call.inner), words, rows, words,
             [&](long w, __m512i x) { _mm512_store_si512(out + (w * columns + c) * kLanes, x); });
  }
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
      if (bias) y = _mm512_add_ps(y, get(bias + at, mask));
      if (call.epilogue == kGelu) y = gelu_tanh<Kind>(y);
      if (call.epilogue == kAdd) y = _mm512_add_ps(y, get(out, mask));
      put(out, mask, y);
    }
  }
}

// Outputs [output, output + 16 columns) of rows [begin, end).
template <class Kind, int columns>
void block(const Int8Product& call, long output, long begin, long end) {
  const long words = call.inner / 4;
  Word* weights = room.fit(words * columns * kLanes);
  pack_weights<columns>(call, output, weights);
  const Word* rows = panels_of(call).words;
  for (long row = begin; row < end; row += kRows) {
    __m512 sum[kRows][columns];
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) sum[r][c] = _mm512_setzero_ps();
    multiply<Int8>(rows + row * words, weights, words, sum);
    finish<Kind>(call, row, output, sum);
  }
}

template <class Kind>
void block_of(const Int8Product& call, long output, long begin, long end) {
  const long rest = call.outputs - output;
  if (rest > 2 * kLanes) {
    block<Kind, 3>(call, output, begin, end);
  } else if (rest > kLanes) {
    block<Kind, 2>(call, output, begin, end);
  } else {
    block<Kind, 1>(call, output, begin, end);
  }
}

template <class Kind>
void run_rows(const Int8Product& call) {
  const long blocks = (call.outputs + kOutputs - 1) / kOutputs;
  const long wanted = (4L * call.threads + blocks - 1) / blocks;  // four tasks a thread, to even out
  const long parts = std::clamp<long>(std::min(wanted, call.rows / 128), 1, 64);
  const long size = ((call.rows + parts - 1) / parts + kRows - 1) / kRows * kRows;
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(dynamic, 4)
    for (long row = 0; row < call.rows; row += kLanes) pack_rows<typename Kind::Number>(call, row);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < blocks * parts; ++i) {
      const long begin = i % parts * size;
      if (begin < call.rows) block_of<Kind>(call, i / parts * kOutputs, begin, std::min(call.rows, begin + size));
    }
  }
}

// As many rows at a time as the workspace holds in panels.
template <class Kind>
void run(const Int8Product& call) {
  using Number = typename Kind::Number;
  const long at_once = call.work_words / (call.inner / 4 + 1) / kLanes * kLanes;
  for (long row = 0; row < call.rows; row += at_once) {
    Int8Product part = call;
    part.rows = std::min(at_once, call.rows - row);
    part.x = static_cast<const Number*>(call.x) + row * call.x_row;
    part.out = static_cast<Number*>(call.out) + row * call.out_row;
    run_rows<Kind>(part);
  }
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
