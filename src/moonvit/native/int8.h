// What Python hands over; moonvit/native/library.py holds the same fields in the same order.
#pragma once
#include <cstdint>

#include "product.h"

namespace moonvit {

// out [rows, outputs] = x weight^T + bias, x quantised row by row and the weight before; then the epilogue.
struct Int8Product {
  const void* x;  // [rows, inner], `kind`
  int64_t x_row;
  const int8_t* weight;  // [outputs, inner] contiguous
  const float* scale;    // [outputs]
  const int32_t* sums;   // [outputs], of each row of the weight
  const void* bias;      // [outputs] of `kind`, or none
  void* out;             // `kind`
  int64_t out_row, rows, inner, outputs;
  void* work;            // room for 16 rows of x, one byte a number, and their scales, at least
  int64_t work_words;
  int32_t epilogue, kind, threads;
};

}  // namespace moonvit

extern "C" int moonvit_int8_product(const moonvit::Int8Product* call);
