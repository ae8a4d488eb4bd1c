// Products of many rows with a bfloat16 weight on the tile unit. Rows of x are tiles as they lie in
// memory; the weight is what is packed, 32 outputs at a time, because many rows share the effort.
// Sums come out in the order in which results are stored, [rows][outputs], and a row's are those
// that linear_amx.cpp computes: the same products in the same order.
//
// The unit is kept busy if other work is done beside it in small pieces: each step of a product
// also finishes some sums of the block before it, and fetches some of the weights that come next.
#include <algorithm>
#include <initializer_list>

#include "activations.h"
#include "amx.h"
#include "finish_row.h"
#include "handout.h"
#include "linear_amx.h"
#include "simd.h"

namespace kv8::amx {
namespace {

constexpr int64_t kSide = 16;                // rows of a tile, and words of one of its rows
constexpr int64_t kBlock = 2 * kSide;        // rows of x, and outputs, whose sums are in registers
constexpr int64_t kInputs = 32;              // of a step: bfloat16 values of a row of a tile
constexpr int64_t kTileBytes = kSide * 64;
constexpr int64_t kMostSteps = 18;           // of a unit of work: its weights stay in the L1 cache
constexpr int64_t kMostRows = 512;           // of a unit of work, where sums have to be kept
constexpr int64_t kPanelBytes = 1280 << 10;  // of x that stay in a core's cache

// Inputs [kInputs first_step, ...) of outputs [n, n + kBlock) for rows [row, end). The thread takes
// the same rows' outputs up to `end_output` next.
struct Unit {
  int64_t row, end, n, end_output, first_step, steps;
};

// Hands out units. Weights of a share of outputs that do not fit the innermost cache are taken in
// parts; meanwhile its sums wait in memory, as exact as they are in the tiles.
struct Units {
  const kv8_linear& l;
  int64_t num_rows, share, steps, unit_steps, panel_rows, shares, items;
  Handout handout;

  // A thread takes `share` outputs at a time.
  Units(const kv8_linear& l, int64_t num_rows, int64_t share)
      : l(l), num_rows(num_rows), share(share) {
    steps = l.num_inputs / kInputs;
    const int64_t parts = (steps + kMostSteps - 1) / kMostSteps;
    unit_steps = (steps + parts - 1) / parts;
    const int64_t most = parts == 1 ? num_rows : kMostRows;
    const int64_t rows = std::clamp(kPanelBytes / (2 * l.num_inputs), kBlock, most);
    const int64_t panels = (num_rows + rows - 1) / rows;
    panel_rows = ((num_rows + panels - 1) / panels + kBlock - 1) / kBlock * kBlock;
    shares = (l.num_outputs + share - 1) / share;
    items = (num_rows + panel_rows - 1) / panel_rows * shares;
  }
  bool first(Unit& unit) {
    const int64_t item = handout.take();
    if (item >= items) return false;
    const int64_t row = item / shares * panel_rows, n = item % shares * share;
    unit = {row, std::min(row + panel_rows, num_rows), n, std::min(n + share, l.num_outputs), 0,
            unit_steps};
    return true;
  }
  bool next(Unit& unit) {
    if (last(unit)) {
      if (unit.n + kBlock >= unit.end_output) return first(unit);
      unit.n += kBlock, unit.first_step = 0, unit.steps = unit_steps;
      return true;
    }
    unit.first_step += unit.steps;
    unit.steps = std::min(unit_steps, steps - unit.first_step);
    return true;
  }
  bool last(const Unit& unit) const { return unit.first_step + unit.steps == steps; }
};

// Where the weights of a unit's outputs lie: those whose sums are even lanes of a word, and odd ones.
// They are neighbours, or gate and up.
struct Source {
  const uint8_t *even, *odd;
  int64_t stride, rows;  // in bytes from one to the next; how many of each

  Source(const kv8_linear& l, bool gated, int64_t n) {
    const int64_t bytes = 2 * l.num_inputs;
    stride = gated ? bytes : 2 * bytes;
    even = static_cast<const uint8_t*>(l.weight) + n / 2 * stride;
    odd = even + (gated ? l.num_outputs / 2 : 1) * bytes;
    rows = std::min(kSide, (l.num_outputs - n) / 2);
  }
};

// Packs the weights of a unit: the words of even outputs' rows become columns of one tile, those of
// odd outputs' rows of another, so that the sums of two outputs that share a word are in the same
// lane. Where there are only sixteen outputs, their columns are followed by some that nobody reads.
void pack(const Source& source, const Unit& unit, uint8_t* to) {
  for (int64_t step = 0; step < unit.steps; ++step)
    for (const uint8_t* rows : {source.even, source.odd}) {
      const uint8_t* from[kSide];
      for (int64_t i = 0; i < kSide; ++i)
        from[i] = rows + (i < source.rows ? i : 0) * source.stride + (unit.first_step + step) * 64;
      U32 words[kSide];
      load_transposed(from, kSide, words);
      for (int64_t i = 0; i < kSide; ++i) store_words(to + 64 * i, words[i]);
      to += kTileBytes;
    }
}

// Asks for the next unit's weights, row after row, a few a step: what is waited for passes between.
struct Fetching {
  const Source source;
  const int64_t first, steps;
  int64_t row = 0, step = 0;

  Fetching(const Source& source, const Unit& unit)
      : source(source), first(unit.first_step * 64), steps(unit.steps) {
    if (steps == 0) row = source.rows;
  }
  KV8_INLINE void advance(int64_t count) {
    for (int64_t i = 0; i < count && row < source.rows; ++i) {
      const int64_t offset = row * source.stride + first + step % steps * 64;
      prefetch((step < steps ? source.even : source.odd) + offset);
      if (++step == 2 * steps) step = 0, ++row;
    }
  }
};

// What becomes of the sums of a row: pairs of neighbouring outputs, rounded.
struct Neighbours {
  const kv8_linear& l;

  KV8_INLINE void operator()(int64_t row, int64_t n, F32* pair) const {
    const Round<BFloat16> round;
    const bool whole = n + kBlock <= l.num_outputs;
    if (l.bias != nullptr) {
      F32 bias[2];
      const auto* at = static_cast<const uint16_t*>(l.bias) + n;
      Widen<BFloat16>()(load_some(at, whole ? kSide : kSide / 2), bias);
      for (int i = 0; i < 2; ++i) pair[i] = pair[i] + bias[i];
    }
    if (whole) finish_row<kBlock>(l, row, n, round.words(pair));
    else finish_row<kSide>(l, row, n, round.words(pair));
  }
};

// Or gate and up, both rounded before one gates the other.
template <class Function>
struct Gated {
  const kv8_linear& l;
  const kv8_gate& g;

  KV8_INLINE void operator()(int64_t row, int64_t n, F32* pair) const {
    const Round<BFloat16> round;
    if (l.bias != nullptr) {
      const auto* bias = static_cast<const uint16_t*>(l.bias) + n / 2;
      for (int i = 0; i < 2; ++i) pair[i] = pair[i] + widen_halves(bias + i * l.num_outputs / 2);
    }
    const F32 gated = round(Function::of(round(pair[0]))) * round(pair[1]);
    store_halves(static_cast<uint16_t*>(g.out) + row * g.out_stride + n / 2, gated);
  }
};

// Sums [rows][even, odd outputs] of rows [row, end) that are not finished yet.
template <class Finish>
struct Finishing {
  Finish finish;
  const float* sums = nullptr;
  int64_t row = 0, end = 0, n = 0;

  KV8_INLINE void advance(int64_t count) {
    for (; count > 0 && row < end; --count) {
      F32 pair[2] = {load(sums), load(sums + kSide)};
      finish(row, n, pair);
      sums += kBlock, ++row;
    }
  }
};

// Adds the products of two tiles of rows with two of outputs to sums that are zero at first.
template <class Beside>
KV8_INLINE void multiply(const uint8_t* x, int64_t x_bytes, const uint8_t* packed, int64_t steps,
                         bool from_zero, float* sums, Beside beside) {
  constexpr int64_t kStride = kBlock * sizeof(float);
  float* lower = sums + kSide * kBlock;
  if (from_zero) {
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  } else {
    amx::load<0>(sums, kStride), amx::load<1>(sums + kSide, kStride);
    amx::load<2>(lower, kStride), amx::load<3>(lower + kSide, kStride);
  }
  for (int64_t step = 0; step < steps; ++step, x += 64, packed += 2 * kTileBytes) {
    amx::load_once<4>(x, x_bytes);
    amx::load<6>(packed, 64);
    amx::multiply<0, 4, 6>();
    amx::load<7>(packed + kTileBytes, 64);
    amx::multiply<1, 4, 7>();
    amx::load_once<5>(x + kSide * x_bytes, x_bytes);
    amx::multiply<2, 5, 6>();
    amx::multiply<3, 5, 7>();
    beside();
  }
  amx::store<0>(sums, kStride), amx::store<1>(sums + kSide, kStride);
  amx::store<2>(lower, kStride), amx::store<3>(lower + kSide, kStride);
}

// A thread's part of the work.
template <class Finish>
void work(Units& units, bool gated, const Finish& finish) {
  const kv8_linear& l = units.l;
  alignas(64) uint8_t packed[kMostSteps * 2 * kTileBytes];
  alignas(64) float sums[kMostRows / kBlock][kBlock * kBlock];
  const bool kept = units.steps > units.unit_steps;
  Finishing<Finish> finishing{finish};
  Unit unit;
  for (bool more = units.first(unit); more;) {
    pack(Source(l, gated, unit.n), unit, packed);
    Unit next = unit;
    more = units.next(next);
    if (!more) next.steps = 0;
    Fetching fetching(Source(l, gated, next.n), next);
    const int64_t blocks = (unit.end - unit.row + kBlock - 1) / kBlock;
    // Sums that are not finished are, after so many a step, before others are stored there.
    const int64_t finished = (kBlock + unit.steps - 1) / unit.steps;
    const int64_t fetched = kBlock * next.steps / (blocks * unit.steps) + 1;
    for (int64_t b = 0; b < blocks; ++b) {
      // The last rows share a block with some before them, which are done already.
      const int64_t row = unit.row + b * kBlock, from = std::min(row, units.num_rows - kBlock);
      float* to = sums[kept ? b : 0];
      const auto* x = static_cast<const uint16_t*>(l.x) + from * l.x_stride;
      multiply(reinterpret_cast<const uint8_t*>(x + unit.first_step * kInputs), 2 * l.x_stride,
               packed, unit.steps, unit.first_step == 0, to, [&]() KV8_INLINED {
        finishing.advance(finished);
        fetching.advance(fetched);
      });
      if (units.last(unit)) {
        finishing.sums = to + (row - from) * kBlock, finishing.n = unit.n;
        finishing.row = row, finishing.end = std::min(row + kBlock, unit.end);
      }
    }
    unit = next;
  }
  finishing.advance(kBlock);
}

}  // namespace

void linear_many(const kv8_linear& l, const kv8_gate* gate, int64_t num_rows, int num_threads) {
  // Where two outputs become one, twice as many share a line of memory, which one thread writes.
  Units units(l, num_rows, gate == nullptr ? kBlock : 2 * kBlock);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    amx::configure();
    if (gate == nullptr) {
      work(units, false, Neighbours{l});
    } else {
      with_activation(gate->function, [&](auto function) {
        work(units, true, Gated<decltype(function)>{l, *gate});
      });
    }
    amx::release();
  }
}

}  // namespace kv8::amx
