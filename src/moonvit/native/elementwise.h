// What Python hands over; moonvit/native/library.py holds the same fields in the same order.
#pragma once
#include <cstdint>

#include "attention.h"

namespace moonvit {

// Rows [rows, width], contiguous; weight and bias have the rows' type, bias may be absent.
struct Norm {
  const void* x;
  void* out;
  const void *weight, *bias;
  int64_t rows, width;
  float eps;
  int32_t centred, kind, threads;
};

// In place, contiguous.
struct Gelu {
  void* x;
  int64_t count;
  int32_t kind, threads;
};

// In place, [rows, heads, head_dim] with neighbouring heads, rows `row` numbers apart; tables [rows, head_dim/2].
struct Turn {
  void* x;
  const float *cosine, *sine;
  int64_t rows, row, heads, head_dim;
  int32_t kind, threads;
};

}  // namespace moonvit

extern "C" int moonvit_norm(const moonvit::Norm* call);
extern "C" int moonvit_gelu_tanh(const moonvit::Gelu* call);
extern "C" int moonvit_turn(const moonvit::Turn* call);
