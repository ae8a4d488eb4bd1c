// One row of x, as in decoding one sequence: its pairs are the only column of a product, as they lie.
//
// Nothing is packed, so that threads need not wait for each other, and nothing is fetched ahead: what
// is left is reading the weight, which a core does fastest when it reads a few dozen rows side by side
// and leaves the rest to its own prefetchers (measured: 26 GB/s a core pair with, 31 without).
#include "linear_amx.h"

#include <algorithm>

#include "amx.h"
#include "finish_row.h"
#include "handout.h"

namespace kv8::amx {
namespace {

constexpr int64_t kOutputs = 32;           // at once: two tiles
constexpr int64_t kShare = 3 * kOutputs;   // of a share of work

// Products [n, n + kOutputs). One tile has the even ones and the other the odd ones, so that they are
// in order when they are rounded to words.
void multiply(const kv8_linear& l, int64_t n) {
  const int64_t bytes = 2 * l.num_inputs;
  const auto* x = static_cast<const uint8_t*>(l.x);
  const auto* even = static_cast<const uint8_t*>(l.weight) + n * bytes;
  const auto* odd = even + bytes;
  amx::zero<0>(), amx::zero<1>();
  for (int64_t at = 0; at < bytes; at += 64) {
    amx::load<2>(x + at, 4);
    amx::load<3>(even + at, 2 * bytes), amx::multiply<0, 3, 2>();
    amx::load<4>(odd + at, 2 * bytes), amx::multiply<1, 4, 2>();
  }
  alignas(64) float sums[kOutputs];
  amx::store<0>(sums, 4), amx::store<1>(sums + kLanes, 4);
  F32 pair[2] = {load(sums), load(sums + kLanes)};
  if (l.bias != nullptr) {
    F32 bias[2];
    Widen<BFloat16>()(load_words(static_cast<const uint16_t*>(l.bias) + n), bias);
    for (int i = 0; i < 2; ++i) pair[i] = pair[i] + bias[i];
  }
  finish_row<kOutputs>(l, 0, n, Round<BFloat16>().words(pair));
}

}  // namespace

bool takes_one(const kv8_linear& l) { return l.num_outputs % kOutputs == 0; }

void linear_one(const kv8_linear& l, int num_threads) {
  amx::Shapes shapes;
  for (int tile = 0; tile < 5; ++tile) shapes.set(tile, 16, tile < 3 ? 1 : 16);
  const int64_t shares = (l.num_outputs + kShare - 1) / kShare;
  Handout handout;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    amx::configure(shapes);
    for (int64_t i = handout.take(); i < shares; i = handout.take()) {
      const int64_t end = std::min((i + 1) * kShare, l.num_outputs);
      for (int64_t n = i * kShare; n < end; n += kOutputs) multiply(l, n);
    }
    amx::release();
  }
}

}  // namespace kv8::amx
