// Norms and GELU over rows, in one pass each; all arithmetic is float32 whatever the type of the numbers.
#include "elementwise.h"

#include <algorithm>

#include "numbers.h"

namespace moonvit {
namespace {

// Sum over the row of f(x); four partial sums, so that additions need not wait for each other.
template <class Number, class Function>
inline float sum_of(const Number* x, long width, Function f) {
  __m512 sums[4] = {_mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps(), _mm512_setzero_ps()};
  for (long i = 0; i < width; i += kLanes) {
    const __mmask16 mask = mask_at(i, width);
    __m512& sum = sums[i / kLanes % 4];
    sum = _mm512_mask_add_ps(sum, mask, sum, f(get(x + i, mask)));
  }
  return _mm512_reduce_add_ps(_mm512_add_ps(_mm512_add_ps(sums[0], sums[1]), _mm512_add_ps(sums[2], sums[3])));
}

// (x - mean) / root of the mean square around it, times the weight, plus the bias; RMS norms have mean 0.
template <class Number>
void norm_row(const Norm& call, const Number* x, Number* out) {
  const long width = call.width;
  const float mean = call.centred ? sum_of(x, width, [](__m512 v) { return v; }) / width : 0.0f;
  const __m512 middle = _mm512_set1_ps(mean);
  const float square = sum_of(x, width, [&](__m512 v) {
    const __m512 c = _mm512_sub_ps(v, middle);
    return _mm512_mul_ps(c, c);
  });
  const __m512 scale = _mm512_set1_ps(1.0f / __builtin_sqrtf(square / width + call.eps));
  const auto *weight = static_cast<const Number*>(call.weight), *bias = static_cast<const Number*>(call.bias);
  for (long i = 0; i < width; i += kLanes) {
    const __mmask16 mask = mask_at(i, width);
    __m512 y = _mm512_mul_ps(_mm512_mul_ps(_mm512_sub_ps(get(x + i, mask), middle), scale), get(weight + i, mask));
    if (bias) y = _mm512_add_ps(y, get(bias + i, mask));
    put(out + i, mask, y);
  }
}

template <class Number>
void norm_rows(const Norm& call) {
  const auto* x = static_cast<const Number*>(call.x);
  auto* out = static_cast<Number*>(call.out);
#pragma omp parallel for num_threads(call.threads) schedule(static)
  for (long row = 0; row < call.rows; ++row) norm_row(call, x + row * call.width, out + row * call.width);
}

template <class Kind>
void gelu_all(const Gelu& call) {
  constexpr long chunk = 4096;
  auto* x = static_cast<typename Kind::Number*>(call.x);
#pragma omp parallel for num_threads(call.threads) schedule(static)
  for (long start = 0; start < call.count; start += chunk)
    for (long i = start; i < std::min(call.count, start + chunk); i += kLanes) {
      const __mmask16 mask = mask_at(i, call.count);
      put(x + i, mask, gelu_tanh<Kind>(get(x + i, mask)));
    }
}

// Adjacent pairs turned by their angles: (a, b) -> (a cos - b sin, b cos + a sin).
template <class Number>
void turn_row(const Number* x, long pairs, const float* cosine, const float* sine, Number* out) {
  const __m512i pick = _mm512_set_epi32(7, 7, 6, 6, 5, 5, 4, 4, 3, 3, 2, 2, 1, 1, 0, 0);
  for (long i = 0; i < 2 * pairs; i += kLanes) {
    const __mmask16 mask = mask_at(i, 2 * pairs), half = mask_at(i / 2, pairs) & 0xff;
    const __m512 pair = get(x + i, mask), swapped = _mm512_permute_ps(pair, 0xb1);
    const __m512 c = _mm512_permutexvar_ps(pick, _mm512_maskz_loadu_ps(half, cosine + i / 2));
    const __m512 s = _mm512_permutexvar_ps(pick, _mm512_maskz_loadu_ps(half, sine + i / 2));
    put(out + i, mask, _mm512_fmaddsub_ps(pair, c, _mm512_mul_ps(swapped, s)));
  }
}

template <class Number>
void turn_rows(const Turn& call) {
  auto* x = static_cast<Number*>(call.x);
  const long pairs = call.head_dim / 2;
#pragma omp parallel for num_threads(call.threads) schedule(static)
  for (long row = 0; row < call.rows; ++row)
    for (long head = 0; head < call.heads; ++head) {
      Number* at = x + row * call.row + head * call.head_dim;
      turn_row(at, pairs, call.cosine + row * pairs, call.sine + row * pairs, at);
    }
}

}  // namespace
}  // namespace moonvit

extern "C" int moonvit_norm(const moonvit::Norm* call) {
  using namespace moonvit;
  call->kind == kBfloat16 ? norm_rows<uint16_t>(*call) : norm_rows<float>(*call);
  return 0;
}

extern "C" int moonvit_gelu_tanh(const moonvit::Gelu* call) {
  using namespace moonvit;
  call->kind == kBfloat16 ? gelu_all<Bfloat16>(*call) : gelu_all<Float32>(*call);
  return 0;
}

extern "C" int moonvit_turn(const moonvit::Turn* call) {
  using namespace moonvit;
  call->kind == kBfloat16 ? turn_rows<uint16_t>(*call) : turn_rows<float>(*call);
  return 0;
}
