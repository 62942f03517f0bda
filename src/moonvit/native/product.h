// What Python hands over; moonvit/native/library.py holds the same fields in the same order.
#pragma once
#include <cstdint>

#include "attention.h"

namespace moonvit {

enum Epilogue : int32_t { kStore = 0, kGelu = 1, kAdd = 2 };

// out [rows, outputs] = x [rows, inner] weight [outputs, inner]^T + bias, then the epilogue: kept as it is,
// through GELU, or added to what `out` holds. Rows of x and out lie `x_row` and `out_row` numbers apart.
struct Product {
  const void* x;
  int64_t x_row;
  const void *weight, *bias;  // [outputs, inner] contiguous; [outputs] or none
  void* out;
  int64_t out_row, rows, inner, outputs;
  void* work;  // room for 16 rows of x at least
  int64_t work_words;
  int32_t epilogue, kind, threads;
};

}  // namespace moonvit

extern "C" int moonvit_product(const moonvit::Product* call);
