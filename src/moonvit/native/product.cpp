// Matrix products with what follows them done while the sums are in registers.
//
// Rows of x are copied once into panels of eight, in the order in which `multiply` reads them; then each task
// copies 48 rows of the weight the same way, a part of their length at a time, and meets all panels with them.
// Both copies cost about a hundredth of the products, so weights need no second place in memory.
#include "product.h"

#include <algorithm>
#include <memory>

#include "numbers.h"

namespace moonvit {
namespace {

constexpr int kColumns = 3;
constexpr long kOutputs = kColumns * kLanes;
// Steps that are added up in one go: their 48 rows of weights stay in the cache (100 kB, 50 kB), and a float32
// sum keeps more digits in short runs.
template <class Kind>
constexpr long kSteps = Kind::per_word == 2 ? 512 : 256;

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

template <class Kind>
const Word* row_of(const void* x, long row, long stride) {
  return reinterpret_cast<const Word*>(static_cast<const typename Kind::Number*>(x) + row * stride);
}

// Sixteen rows from `row` on into two panels [inner / per_word, 8].
template <class Kind>
void pack_rows(const Product& call, long row) {
  const long words = call.inner / Kind::per_word, count = std::min<long>(kLanes, call.rows - row);
  Word* low = static_cast<Word*>(call.work) + row * words;
  exchange(row_of<Kind>(call.x, row, call.x_row), call.x_row / Kind::per_word, count, words, [&](long w, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + w * kRows), _mm512_castsi512_si256(x));
    if (count > kRows)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + (words + w) * kRows), _mm512_extracti64x4_epi64(x, 1));
  });
}

// Words [from, from + count) of the outputs from `output` on, into [count, 16 columns].
template <class Kind, int columns>
void pack_weights(const Product& call, long output, long from, long count, Word* out) {
  for (int c = 0; c < columns; ++c) {
    const long first = output + c * kLanes, rows = std::min<long>(kLanes, call.outputs - first);
    exchange(row_of<Kind>(call.weight, first, call.inner) + from, call.inner / Kind::per_word, rows, count,
             [&](long w, __m512i x) { _mm512_store_si512(out + (w * columns + c) * kLanes, x); });
  }
}

template <int columns, class Function>
inline void each(__m512 (&x)[kRows][columns], Function f) {
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) x[r][c] = f((r * columns + c) * kLanes, x[r][c]);
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
      __m512 y = sum[r][c];
      if (bias) y = _mm512_add_ps(y, get(bias + output + c * kLanes, mask));
      if (call.epilogue == kGelu) y = gelu_tanh<Kind>(y);
      if (call.epilogue == kAdd) y = _mm512_add_ps(y, get(out + c * kLanes, mask));
      put(out + c * kLanes, mask, y);
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
    pack_weights<Kind, columns>(call, output, from, count, weights);
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
void block_of(const Product& call, long output, long begin, long end) {
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
void run_rows(const Product& call) {
  const long blocks = (call.outputs + kOutputs - 1) / kOutputs;
  const long wanted = (4L * call.threads + blocks - 1) / blocks;  // four tasks a thread, to even out
  const long parts = std::clamp<long>(std::min(wanted, call.rows / 128), 1, 64);
  const long size = ((call.rows + parts - 1) / parts + kRows - 1) / kRows * kRows;
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(dynamic, 4)
    for (long row = 0; row < call.rows; row += kLanes) pack_rows<Kind>(call, row);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < blocks * parts; ++i) {
      const long begin = i % parts * size;
      if (begin < call.rows) block_of<Kind>(call, i / parts * kOutputs, begin, std::min(call.rows, begin + size));
    }
  }
}

// As many rows at a time as the workspace holds in panels.
template <class Kind>
void run(const Product& call) {
  using Number = typename Kind::Number;
  const long at_once = call.work_words / (call.inner / Kind::per_word) / kLanes * kLanes;
  for (long row = 0; row < call.rows; row += at_once) {
    Product part = call;
    part.rows = std::min(at_once, call.rows - row);
    part.x = static_cast<const Number*>(call.x) + row * call.x_row;
    part.out = static_cast<Number*>(call.out) + row * call.out_row;
    run_rows<Kind>(part);
  }
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
