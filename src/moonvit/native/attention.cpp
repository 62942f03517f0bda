// Softmax(q kT scale) v for each head of each picture of a packed batch, without ever holding the scores.
//
// Queries lie across the lanes of registers, so that maxima and sums of the softmax need no work across
// lanes. For each head, keys and values are first copied into the order in which `multiply` reads them
// (`pack_*`), q and k being turned by their rotary angles on the way. Then each block of 48 queries runs
// over blocks of 128 keys: scores (L1), running maximum, probabilities in the numbers' own type (L1),
// product with the values added up in float32. Shape letters as in simd.h.
//
// A result depends on its own picture alone, bit for bit: not on the batch, nor on the threads.
#include "attention.h"

#include <algorithm>
#include <memory>
#include <vector>

#include "pack.h"

namespace moonvit {
namespace {

constexpr int kQueryColumns = 3;
constexpr int kQueries = kQueryColumns * kLanes;
constexpr int kKeys = 128;
constexpr long kPackedKeys = 1024;  // keys that one packing task takes

// Memory of one thread: `groups` blocks of queries share each block of keys while it is in the cache.
constexpr int kGroups = 4;

struct Scratch {
  std::unique_ptr<float[]> memory;
  long head_dim = 0;
  float* scores = nullptr;         // [kKeys, kQueries]
  Word* probabilities = nullptr;   // [kKeys / per_word, kQueries]
  Word* queries = nullptr;         // kGroups x [d / per_word, kQueries]
  float* out = nullptr;            // kGroups x [d, kQueries]

  void fit(long d) {
    if (head_dim >= d) return;
    memory.reset(new float[2 * kKeys * kQueries + 2 * kGroups * d * kQueries + 16]);
    scores = reinterpret_cast<float*>((reinterpret_cast<uintptr_t>(memory.get()) + 63) & ~uintptr_t{63});
    probabilities = reinterpret_cast<Word*>(scores + kKeys * kQueries);
    queries = probabilities + kKeys * kQueries;
    out = reinterpret_cast<float*>(queries + kGroups * d * kQueries);
    head_dim = d;
  }
};

thread_local Scratch scratch;

// ---- one block of queries against one block of keys ----

template <int columns>
struct Softmax {
  __m512 top[columns], sum[columns];  // running maximum of the scores, sum of the probabilities
};

template <int columns>
inline void set_all(__m512 (&x)[kRows][columns], __m512 value) {
  for (auto& row : x)
    for (auto& column : row) column = value;
}

// Scores of up to 128 keys into scratch; gives back their maxima. Keys past `valid` score -infinity.
template <class Kind, int columns>
void score(const Word* keys, const Word* queries, long words, long valid, float* scores, __m512 (&top)[columns]) {
  const __m512 nothing = _mm512_set1_ps(-__builtin_inff());
  for (auto& column : top) column = nothing;
  for (long key = 0; key < valid; key += kRows, keys += words * kRows) {
    __m512 sum[kRows][columns];
    set_all(sum, _mm512_setzero_ps());
    multiply<Kind>(keys, queries, words, sum);
    if (valid - key < kRows)
      for (long r = valid - key; r < kRows; ++r)
        for (int c = 0; c < columns; ++c) sum[r][c] = nothing;
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        store(scores + ((key + r) * columns + c) * kLanes, sum[r][c]);
        top[c] = _mm512_max_ps(top[c], sum[r][c]);
      }
  }
}

// Two rows of probabilities rounded into one row of words: `low` in the lower halves, `high` in the upper.
inline __m512i paired(__m512 low, __m512 high) {
  const __m256i a = (__m256i)_mm512_cvtneps_pbh(low), b = (__m256i)_mm512_cvtneps_pbh(high);
  return _mm512_or_si512(_mm512_cvtepu16_epi32(a), _mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16));
}

// Probabilities 2^(scores scale - shift) of `keys` keys, a multiple of 8; adds them up in `sum`.
template <class Kind, int columns>
void weigh(const float* scores, long keys, __m512 scale, const __m512 (&shift)[columns], Word* out,
           __m512 (&sum)[columns]) {
  constexpr int row = columns * kLanes;
  for (long key = 0; key < keys; key += Kind::per_word, scores += Kind::per_word * row, out += row) {
#pragma GCC unroll 4
    for (int c = 0; c < columns; ++c) {
      const __m512 first = exp2<Kind>(_mm512_fmsub_ps(load(scores + c * kLanes), scale, shift[c]));
      if constexpr (Kind::per_word == 1) {
        sum[c] = _mm512_add_ps(sum[c], first);
        _mm512_storeu_si512(out + c * kLanes, _mm512_castps_si512(first));
      } else {
        const __m512 second = exp2<Kind>(_mm512_fmsub_ps(load(scores + row + c * kLanes), scale, shift[c]));
        sum[c] = _mm512_add_ps(sum[c], _mm512_add_ps(first, second));
        _mm512_storeu_si512(out + c * kLanes, paired(first, second));
      }
    }
  }
}

// out [d, 16 columns] = out factor + values probabilities. A block's own sum comes first and is then added:
// float32 keeps more digits that way than in one long sum.
template <class Kind, int columns>
void mix(const Word* values, long panel, const Word* probabilities, long steps, long d,
         const __m512 (&factor)[columns], float* out) {
  for (long i = 0; i < d; i += kRows, values += panel) {
    __m512 sum[kRows][columns];
    set_all(sum, _mm512_setzero_ps());
    multiply<Kind>(values, probabilities, steps, sum);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r)
#pragma GCC unroll 4
      for (int c = 0; c < columns; ++c) {
        float* at = out + ((i + r) * columns + c) * kLanes;
        store(at, _mm512_fmadd_ps(load(at), factor[c], sum[r][c]));
      }
  }
}

template <class Kind, int columns>
void attend_block(const Call& call, const Unit& unit, long key, const Word* queries, Softmax<columns>& state,
                  float* out) {
  const long d = call.head_dim, words = d / Kind::per_word, valid = std::min<long>(kKeys, unit.length - key);
  const __m512 scale = _mm512_set1_ps(call.scale * 1.44269504088896341f);  // powers of 2, not of e
  __m512 top[columns], shift[columns], factor[columns], sum[columns];
  score<Kind>(unit.keys + key * words, queries, words, valid, scratch.scores, top);
  for (int c = 0; c < columns; ++c) {
    top[c] = _mm512_max_ps(state.top[c], top[c]);
    shift[c] = _mm512_mul_ps(top[c], scale);
    factor[c] = exp2<Float32>(_mm512_fmsub_ps(state.top[c], scale, shift[c]));
    state.top[c] = top[c];
    sum[c] = _mm512_setzero_ps();
  }
  const long keys = padded(valid);
  weigh<Kind>(scratch.scores, keys, scale, shift, scratch.probabilities, sum);
  for (int c = 0; c < columns; ++c) state.sum[c] = _mm512_fmadd_ps(state.sum[c], factor[c], sum[c]);
  const long panel = padded(unit.length) / Kind::per_word * kRows;
  mix<Kind>(unit.values + key / Kind::per_word * kRows, panel, scratch.probabilities, keys / Kind::per_word, d,
            factor, out);
}

// ---- results ----

inline void put_row(__m512 x, __mmask16 mask, float* out) { _mm512_mask_storeu_ps(out, mask, x); }
inline void put_row(__m512 x, __mmask16 mask, uint16_t* out) {
  _mm256_mask_storeu_epi16(out, mask, (__m256i)_mm512_cvtneps_pbh(x));
}

template <class Kind, int columns>
void write_block(const Call& call, const Unit& unit, long query, long end, const Softmax<columns>& state,
                 const float* out) {
  const long d = call.head_dim;
  auto* rows = static_cast<typename Kind::Number*>(call.out);
  for (int c = 0; c < columns; ++c) {
    const __m512 share = _mm512_div_ps(_mm512_set1_ps(1.0f), state.sum[c]);
    const long first = query + c * kLanes, count = std::min<long>(kLanes, end - first);
    for (long i = 0; i < d; i += kLanes) {
      const __mmask16 mask = d - i >= kLanes ? 0xffff : 0x00ff;
      __m512i x[kLanes];
      for (int r = 0; r < kLanes; ++r)
        x[r] = i + r < d ? _mm512_castps_si512(_mm512_mul_ps(share, load(out + ((i + r) * columns + c) * kLanes)))
                         : _mm512_setzero_si512();
      transpose(x);
      auto* row = rows + (unit.start + first) * call.out_row + unit.head * d + i;
      for (long r = 0; r < count; ++r) put_row(_mm512_castsi512_ps(x[r]), mask, row + r * call.out_row);
    }
  }
}

// Queries [begin, end), at most kGroups blocks of `columns` registers.
template <class Kind, int columns>
void attend(const Call& call, const Unit& unit, long begin, long end) {
  const long d = call.head_dim, width = columns * kLanes, groups = (end - begin + width - 1) / width;
  scratch.fit(d);
  Softmax<columns> state[kGroups];
  for (long g = 0; g < groups; ++g) {
    pack_queries<Kind, columns>(call, unit, begin + g * width, end, scratch.queries + g * d * width);
    for (int c = 0; c < columns; ++c) {
      state[g].top[c] = _mm512_set1_ps(-__builtin_inff());
      state[g].sum[c] = _mm512_setzero_ps();
    }
  }
  std::fill(scratch.out, scratch.out + groups * d * width, 0.0f);
  for (long key = 0; key < unit.length; key += kKeys)
    for (long g = 0; g < groups; ++g)
      attend_block<Kind>(call, unit, key, scratch.queries + g * d * width, state[g], scratch.out + g * d * width);
  for (long g = 0; g < groups; ++g)
    write_block<Kind>(call, unit, begin + g * width, std::min(end, begin + (g + 1) * width), state[g],
                      scratch.out + g * d * width);
}

// Blocks always begin at multiples of 48 queries, whatever a task holds: results do not hang on tasks.
template <class Kind>
void answer(const Call& call, const Task& task) {
  const long rest = (task.end - task.begin) % kQueries, whole = task.end - rest;
  if (whole > task.begin) attend<Kind, kQueryColumns>(call, *task.unit, task.begin, whole);
  if (rest > 2 * kLanes) {
    attend<Kind, 3>(call, *task.unit, whole, task.end);
  } else if (rest > kLanes) {
    attend<Kind, 2>(call, *task.unit, whole, task.end);
  } else if (rest > 0) {
    attend<Kind, 1>(call, *task.unit, whole, task.end);
  }
}

// ---- all heads of all pictures ----

template <class Kind>
long words_of(const Call& call, long length) {
  return padded(length) * call.head_dim / Kind::per_word;  // of keys, and again of values
}

void split(const std::vector<Unit>& units, long size, bool pad, std::vector<Task>& tasks) {
  tasks.clear();
  for (const Unit& unit : units) {
    const long length = pad ? padded(unit.length) : unit.length;
    for (long begin = 0; begin < length; begin += size)
      tasks.push_back({&unit, begin, std::min(length, begin + size)});
  }
}

template <class Kind>
void run_group(const Call& call, const std::vector<Unit>& units) {
  std::vector<Task> packing, answering;
  split(units, kPackedKeys, true, packing);
  long queries = 0;
  for (const Unit& unit : units) queries += unit.length;
  const long wanted = queries / (8L * call.threads * kQueries);  // eight tasks a thread, to even out
  split(units, std::clamp<long>(wanted, 1, kGroups) * kQueries, false, answering);
  const long first = static_cast<long>(packing.size()), second = static_cast<long>(answering.size());
#pragma omp parallel num_threads(call.threads)
  {
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < 2 * first; ++i)
      i < first ? pack_keys<Kind>(call, packing[i]) : pack_values<Kind>(call, packing[i - first]);
#pragma omp for schedule(dynamic, 1)
    for (long i = 0; i < second; ++i) answer<Kind>(call, answering[i]);
  }
}

// As many heads at once as the workspace holds.
template <class Kind>
void run(const Call& call) {
  std::vector<Unit> units;
  Word* const work = static_cast<Word*>(call.work);
  int64_t used = 0;
  for (long s = 0; s < call.segments; ++s)
    for (long head = 0; head < call.heads; ++head) {
      const long start = call.starts[s], length = call.starts[s + 1] - start, words = words_of<Kind>(call, length);
      if (used + 2 * words > call.work_words) {
        run_group<Kind>(call, units);
        units.clear();
        used = 0;
      }
      units.push_back({start, length, head, work + used, work + used + words});
      used += 2 * words;
    }
  run_group<Kind>(call, units);
}

}  // namespace
}  // namespace moonvit

extern "C" int moonvit_attention(const moonvit::Call* call) {
  using namespace moonvit;
  if (call->head_dim % kRows || call->head_dim > kMaxHeadDim || call->segments < 1) return 1;
  long longest = 0;
  for (long s = 0; s < call->segments; ++s) longest = std::max(longest, call->starts[s + 1] - call->starts[s]);
  const long words = call->kind == kBfloat16 ? words_of<Bfloat16>(*call, longest) : words_of<Float32>(*call, longest);
  if (2 * words > call->work_words) return 2;
  call->kind == kBfloat16 ? run<Bfloat16>(*call) : run<Float32>(*call);
  return 0;
}
