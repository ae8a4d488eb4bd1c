// Products of few rows with a weight matrix as models hold it: row after row, read once, never
// repacked. A row of x meets each weight in the same order whatever rows are beside it.
#include "finish.h"
#include "blocks.h"
#include "tile.h"

#if defined(KV8_AMX)
#include "linear_amx.h"
#endif

namespace kv8::KV8_ISA {
namespace {

constexpr int kTokens = kRows;                         // rows of x whose sums registers hold
constexpr int kOutputs = kLanes == 16 ? 4 : 2;         // times so many rows of the weight
constexpr int kOutputsAlone = kLanes == 16 ? 8 : 4;    // or so many for one row of x
constexpr int64_t kWorthwhile = 16384;                 // weights a thread is worth waking for

inline float reduce_sum(F32 x) {
  float lanes[kLanes];
  store(lanes, x);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
}

// Values of a widened row: whole vectors, zeros at the end.
template <class Code>
inline int64_t widened(int64_t count) {
  constexpr int64_t unit = kLanes * Code::kCodesPerWord;
  return (count + unit - 1) / unit * unit;
}

// A row as float32, in the order in which words of the weight widen.
template <class Code>
void widen_row(const uint8_t* from, int64_t count, float* to) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int64_t words = count / kVectors;
  const Widen<Code> widen;
  for (int64_t word = 0; word < words; word += kLanes, to += kVectors * kLanes) {
    F32 values[kVectors];
    widen(load_some(from + 4 * word, static_cast<int>(words - word)), values);
    for (int i = 0; i < kVectors; ++i) store(to + i * kLanes, values[i]);
  }
}

// sums[t][o] = weight row o . row t of x, for kO rows of the weight and kT of x. Meanwhile fetch the
// rows of the weight that come next, if a first block of x asks for it.
template <class Code, int kO, int kT>
KV8_INLINE void dot_products(const uint8_t* weight, int64_t weight_bytes, const float* x,
                             int64_t x_stride, int64_t words, bool fetch, float* sums) {
  constexpr int kVectors = Code::kCodesPerWord;
  const Widen<Code> widen;
  F32 sum[kO][kT];
  for (int o = 0; o < kO; ++o)
    for (int t = 0; t < kT; ++t) sum[o][t] = splat(0.0f);
  auto step = [&](int64_t word, auto load_words_at) {
    F32 w[kO][kVectors];
    for (int o = 0; o < kO; ++o) {
      const uint8_t* at = weight + o * weight_bytes + 4 * word;
      if (fetch) prefetch(at + kO * weight_bytes);
      widen(load_words_at(at), w[o]);
    }
    for (int i = 0; i < kVectors; ++i)
      for (int t = 0; t < kT; ++t) {
        F32 value = load(x + t * x_stride + word * kVectors + i * kLanes);
        pin(value);
        for (int o = 0; o < kO; ++o) sum[o][t] = fma(w[o][i], value, sum[o][t]);
      }
  };
  int64_t word = 0;
  for (; word + kLanes <= words; word += kLanes)
    step(word, [](const uint8_t* at) { return load_words(at); });
  if (word < words) {
    const int some = static_cast<int>(words - word);
    step(word, [some](const uint8_t* at) { return load_some(at, some); });
  }
  for (int o = 0; o < kO; ++o)
    for (int t = 0; t < kT; ++t) sums[t * kO + o] = reduce_sum(sum[o][t]);
}

// kO rows of the weight, from n on, with all T rows of x.
template <class Code, int kO>
void multiply_rows(const kv8_linear& l, int64_t num_rows, int64_t n, bool more) {
  const int64_t stride = widened<Code>(l.num_inputs);
  const auto bytes = l.num_inputs * static_cast<int64_t>(sizeof(typename Code::Code));
  const auto* weight = static_cast<const uint8_t*>(l.weight) + n * bytes;
  auto block = [&](int start, auto tokens) {
    constexpr int kT = tokens;
    float sums[kO * kT];
    dot_products<Code, kO, kT>(weight, bytes, l.scratch + start * stride, stride, bytes / 4,
                               more && start == 0, sums);
    for (int t = 0; t < kT; ++t) finish<Code>(l, start + t, n, kO, sums + t * kO);
  };
  if constexpr (kO == kOutputsAlone) {
    block(0, std::integral_constant<int, 1>{});
  } else {
    in_blocks<kTokens>(static_cast<int>(num_rows), block);
  }
}

// Rows [first, end) of the weight, kO at a time, what is left one by one.
template <class Code, int kO>
void multiply_share(const kv8_linear& l, int64_t num_rows, int64_t first, int64_t end) {
  int64_t n = first;
  for (; n + kO <= end; n += kO) multiply_rows<Code, kO>(l, num_rows, n, n + 2 * kO <= end);
  for (; n < end; ++n) multiply_rows<Code, 1>(l, num_rows, n, false);
}

template <class Code>
void run(const kv8_linear& l, int64_t num_rows, int num_threads) {
  constexpr int64_t size = sizeof(typename Code::Code);
  const int64_t stride = widened<Code>(l.num_inputs);
  const auto* x = static_cast<const uint8_t*>(l.x);
  // Shares of some ten kilobytes, given out as threads ask: one that is held up delays nobody.
  const int64_t share = (1 + 32768 / (l.num_inputs * size + 1)) * kOutputsAlone;
  const int64_t shares = (l.num_outputs + share - 1) / share;
  const bool worthwhile = num_threads > 1 && l.num_outputs * l.num_inputs >= 2 * kWorthwhile;
#pragma omp parallel num_threads(num_threads) if (worthwhile)
  {
#pragma omp for schedule(static)
    for (int64_t t = 0; t < num_rows; ++t)
      widen_row<Code>(x + t * l.x_stride * size, l.num_inputs, l.scratch + t * stride);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < shares; ++i) {
      const int64_t first = i * share;
      const int64_t end = first + share < l.num_outputs ? first + share : l.num_outputs;
      if (num_rows == 1)
        multiply_share<Code, kOutputsAlone>(l, num_rows, first, end);
      else
        multiply_share<Code, kOutputs>(l, num_rows, first, end);
    }
  }
}

}  // namespace

// Run `g` without its intermediate results in memory, if there is a way to; returns whether.
bool gated_at_once([[maybe_unused]] const kv8_gated& g, [[maybe_unused]] int64_t num_rows,
                   [[maybe_unused]] int num_threads) {
#if defined(KV8_AMX)
  if (kv8_isa() == 4 && kv8::amx::takes_gated(g, num_rows)) {
    kv8::amx::linear_many(g.both, &g.gate, num_rows, num_threads);
    return true;
  }
#endif
  return false;
}

void linear(const kv8_linear& l, int64_t num_rows, int num_threads) {
#if defined(KV8_AMX)
  if (kv8_isa() == 4 && kv8::amx::takes(l))
    return kv8::amx::linear(l, num_rows, num_threads);
#endif
  switch (static_cast<Format>(l.dtype)) {
    case Format::kBFloat16: return run<BFloat16>(l, num_rows, num_threads);
    case Format::kFloat16: return run<Float16>(l, num_rows, num_threads);
    default: return run<Float32>(l, num_rows, num_threads);
  }
}

}  // namespace kv8::KV8_ISA
