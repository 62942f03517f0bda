// What products of every kind share: a thread's memory, panels of rows and of weights, tasks, and the end.
#pragma once
#include <algorithm>
#include <memory>
#include <type_traits>

#include "numbers.h"
#include "product.h"

namespace moonvit {

constexpr int kColumns = 3;
constexpr long kOutputs = kColumns * kLanes;

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

// `count` rows of at most sixteen, `stride` words apart, into two panels [words, 8].
inline void store_panels(const Word* rows, long stride, long count, long words, Word* low) {
  exchange(rows, stride, count, words, [&](long w, __m512i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + w * kRows), _mm512_castsi512_si256(x));
    if (count > kRows)
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(low + (words + w) * kRows), _mm512_extracti64x4_epi64(x, 1));
  });
}

// `count` words of the rows of the weight from `output` on, `stride` words apart, into [count, 16 columns].
template <int columns>
void pack_weights(const Word* weight, long stride, long outputs, long output, long count, Word* out) {
  for (int c = 0; c < columns; ++c) {
    const long first = output + c * kLanes, rows = std::min<long>(kLanes, outputs - first);
    exchange(weight + first * stride, stride, rows, count,
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

// A sum's bias (or none) and epilogue, and where it goes.
template <class Kind, class Number = typename Kind::Number>
inline void conclude(__m512 y, int32_t epilogue, const Number* bias, Number* out, __mmask16 mask) {
  if (bias) y = _mm512_add_ps(y, get(bias, mask));
  if (epilogue == kGelu) y = gelu_tanh<Kind>(y);
  if (epilogue == kAdd) y = _mm512_add_ps(y, get(out, mask));
  put(out, mask, y);
}

// pack(row) for every sixteenth row, then block(columns, output, begin, end) for all outputs and parts of the rows.
template <class Call, class Pack, class Block>
void in_tasks(const Call& call, Pack pack, Block block) {
  const long blocks = (call.outputs + kOutputs - 1) / kOutputs;
  const long wanted = (4L * call.threads + blocks - 1) / blocks;  // four tasks a thread, to even out
  const long parts = std::clamp<long>(std::min(wanted, call.rows / 128), 1, 64);
  const long size = ((call.rows + parts - 1) / parts + kRows - 1) / kRows * kRows;
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(dynamic, 4)
    for (long row = 0; row < call.rows; row += kLanes) pack(row);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < blocks * parts; ++i) {
      const long begin = i % parts * size, end = std::min(call.rows, begin + size);
      const long output = i / parts * kOutputs, rest = call.outputs - output;
      if (begin >= call.rows) continue;
      if (rest > 2 * kLanes) {
        block(std::integral_constant<int, 3>{}, output, begin, end);
      } else if (rest > kLanes) {
        block(std::integral_constant<int, 2>{}, output, begin, end);
      } else {
        block(std::integral_constant<int, 1>{}, output, begin, end);
      }
    }
  }
}

// As many rows at a time as the workspace holds in panels, `words` for each.
template <class Number, class Call, class Run>
void in_parts(const Call& call, long words, Run run) {
  const long at_once = call.work_words / words / kLanes * kLanes;
  for (long row = 0; row < call.rows; row += at_once) {
    Call part = call;
    part.rows = std::min<long>(at_once, call.rows - row);
    part.x = static_cast<const Number*>(call.x) + row * call.x_row;
    part.out = static_cast<Number*>(call.out) + row * call.out_row;
    run(part);
  }
}

}  // namespace moonvit
