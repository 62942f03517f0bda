// Matrix products with what follows them done while the sums are in registers.
//
// Rows of x are copied once into panels of eight, in the order in which `multiply` reads them; then each task
// copies 48 rows of the weight the same way, a part of their length at a time, and meets all panels with them.
// Both copies cost about a hundredth of the products, so weights need no second place in memory.
#include "product.h"

#include "panels.h"

namespace moonvit {
namespace {

// Steps that are added up in one go: their 48 rows of weights stay in the cache (100 kB, 50 kB), and a float32
// sum keeps more digits in short runs.
template <class Kind>
constexpr long kSteps = Kind::per_word == 2 ? 512 : 256;

thread_local Room room;

// Sixteen rows from `row` on into two panels [inner / per_word, 8].
template <class Kind>
void pack_rows(const Product& call, long row) {
  const long words = call.inner / Kind::per_word, stride = call.x_row / Kind::per_word;
  store_panels(static_cast<const Word*>(call.x) + row * stride, stride, std::min<long>(kLanes, call.rows - row), words,
               static_cast<Word*>(call.work) + row * words);
}

template <class Kind, int columns>
void finish(const Product& call, long row, long output, const __m512 (&sum)[kRows][columns]) {
  using Number = typename Kind::Number;
  const long count = std::min<long>(kRows, call.rows - row);
  const auto* bias = static_cast<const Number*>(call.bias);
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    if (r >= count) break;
    Number* out = static_cast<Number*>(call.out) + (row + r) * call.out_row + output;
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) {
      const __mmask16 mask = mask_at(output + c * kLanes, call.outputs);
      conclude<Kind>(sum[r][c], call.epilogue, bias ? bias + output + c * kLanes : nullptr, out + c * kLanes, mask);
    }
  }
}

// Outputs [output, output + 16 columns) of rows [begin, end).
template <class Kind, int columns>
void block(const Product& call, long output, long begin, long end) {
  constexpr long tile = kRows * columns * kLanes;
  const long words = call.inner / Kind::per_word, most = std::min(words, kSteps<Kind>);
  Word* weights = room.fit(most * kOutputs + (end - begin + kRows) * kOutputs);
  float* totals = reinterpret_cast<float*>(weights + most * kOutputs);
  for (long from = 0; from < words; from += most) {
    const long count = std::min(most, words - from);
    pack_weights<columns>(static_cast<const Word*>(call.weight) + from, words, call.outputs, output, count, weights);
    float* total = totals;
    for (long row = begin; row < end; row += kRows, total += tile) {
      __m512 sum[kRows][columns];
      each(sum, [](long, __m512) { return _mm512_setzero_ps(); });
      multiply<Kind>(static_cast<const Word*>(call.work) + row * words + from * kRows, weights, count, sum);
      if (from > 0) each(sum, [&](long at, __m512 x) { return _mm512_add_ps(x, load(total + at)); });
      if (from + count == words) {
        finish<Kind>(call, row, output, sum);
      } else {
        each(sum, [&](long at, __m512 x) { store(total + at, x); return x; });
      }
    }
  }
}

template <class Kind>
void run(const Product& call) {
  in_parts<typename Kind::Number>(call, call.inner / Kind::per_word, [](const Product& part) {
    in_tasks(part, [&](long row) { pack_rows<Kind>(part, row); },
             [&](auto columns, long output, long begin, long end) { block<Kind, columns>(part, output, begin, end); });
  });
}

}  // namespace
}  // namespace moonvit

extern "C" int moonvit_product(const moonvit::Product* call) {
  using namespace moonvit;
  if (call->kind == kBfloat16 && (call->inner % 2 || call->x_row % 2)) return 1;
  const int64_t words = call->inner / (call->kind == kBfloat16 ? 2 : 1);
  if (call->work_words < kLanes * words) return 2;
  call->kind == kBfloat16 ? run<Bfloat16>(*call) : run<Float32>(*call);
  return 0;
}
