// What Python hands over; moonvit/native/library.py holds the same fields in the same order.
#pragma once
#include <cstdint>

namespace moonvit {

constexpr long kMaxHeadDim = 256;
enum Kind : int32_t { kFloat32 = 0, kBfloat16 = 1 };
enum Rotation : int32_t { kNoRotation = 0, kAdjacentPairs = 1, kHalves = 2 };

// [N, H, d] with the last axis contiguous; strides count numbers.
struct Plane {
  const void* data;
  int64_t row, head;
};

struct Call {
  Plane q, k, v;
  void* out;               // [N, H d], rows `out_row` numbers apart
  int64_t out_row;
  const int64_t* starts;   // [segments + 1]: first patch of each picture, and the end
  int64_t segments, heads, head_dim;
  const float *cosine, *sine;  // [N, d/2], contiguous; unused without rotation
  const void* zeros;       // head_dim zeros
  void* work;              // at least the packed keys and values of the longest picture's head
  int64_t work_words;
  float scale;
  int32_t kind, rotation, threads;
};

}  // namespace moonvit

extern "C" int moonvit_attention(const moonvit::Call* call);
