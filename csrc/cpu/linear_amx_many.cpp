// Products of many rows with a bfloat16 weight on the tile unit. Rows of x are tiles as they lie in
// memory; the weight is what is packed, because many rows share the effort. Sums come out in the
// order in which results are stored, [rows][outputs], and a row's are those that linear_amx.cpp
// computes: the same products in the same order.
//
// A thread packs a share of the outputs that its second cache holds, once, and lets all rows go by:
// 32 of them stay in the innermost cache meanwhile. So x is read once for each share, and the weight
// once. The unit is kept busy if other work is done beside it in small pieces: each step of a product
// also finishes some sums of the one before it, and fetches some of the rows that come next.
#include <algorithm>
#include <memory>
#include <vector>

#include "amx.h"
#include "finish_many.h"
#include "handout.h"
#include "linear_amx.h"

namespace kv8::amx {
namespace {

constexpr int64_t kSide = 16;             // rows of a tile, and words of one of its rows
constexpr int64_t kBlock = 2 * kSide;     // rows of x, and outputs, whose sums are in registers
constexpr int64_t kSums = kBlock * kBlock;
constexpr int64_t kInputs = 32;           // of a step: bfloat16 values of a row of a tile
constexpr int64_t kTileBytes = kSide * 64;
constexpr int64_t kStepBytes = 2 * kTileBytes;  // of packed weights
constexpr int64_t kMostSteps = 18;        // of a part of the inputs: of 32 rows they stay in the L1
constexpr int64_t kPackedBytes = 1 << 20; // of a share's weights: half of a core's L2
constexpr int64_t kFewestGroups = 4;      // of a share, so that x is not read too often
constexpr int64_t kPanelRows = 256;       // that a thread takes at a time

// Where the weights of 32 outputs lie: neighbours, or sixteen gates and as many ups.
struct Group {
  const uint8_t *first, *second;
  int64_t row_bytes;
  bool both;

  Group(const kv8_linear& l, bool gated, int64_t n) : row_bytes(2 * l.num_inputs) {
    first = static_cast<const uint8_t*>(l.weight) + (gated ? n / 2 : n) * row_bytes;
    second = first + (gated ? l.num_outputs / 2 : kSide) * row_bytes;
    both = n + kSide < l.num_outputs;
    if (!both) second = first;  // computed with, and of no consequence
  }
};

// The words of sixteen rows of the weight become columns of a tile.
KV8_INLINE void pack_tile(const uint8_t* rows, int64_t row_bytes, uint8_t* to) {
  const uint8_t* from[kSide];
  for (int64_t i = 0; i < kSide; ++i) from[i] = rows + i * row_bytes;
  U32 words[kSide];
  load_transposed(from, kSide, words);
  for (int64_t i = 0; i < kSide; ++i) store_words(to + 64 * i, words[i]);
}

// Packs a group's weights, two tiles a step, and fetches those of the next group, which are as many
// lines, in the order in which they lie.
void pack(const Group& group, const Group& next, int64_t steps, uint8_t* to) {
  for (int64_t step = 0; step < steps; ++step, to += kStepBytes) {
    for (int64_t line = step * kTileBytes; line < (step + 1) * kTileBytes; line += 64)
      prefetch(next.first + line), prefetch(next.second + line);
    pack_tile(group.first + 64 * step, group.row_bytes, to);
    pack_tile(group.second + 64 * step, group.row_bytes, to + kTileBytes);
  }
}

// Adds the products of two tiles of rows with two of outputs to sums, or sets them, and calls
// beside(step) with each step. Weights are loaded with the hint that they are not needed again soon:
// so they do not push the rows out of the innermost cache.
template <class Beside>
KV8_INLINE void multiply(const uint8_t* x, int64_t x_bytes, const uint8_t* packed, int64_t steps,
                         bool from_zero, float* sums, const Beside& beside) {
  constexpr int64_t kStride = kBlock * sizeof(float);
  float* lower = sums + kSide * kBlock;
  if (from_zero) {
    amx::zero<0>(), amx::zero<1>(), amx::zero<2>(), amx::zero<3>();
  } else {
    amx::load<0>(sums, kStride), amx::load<1>(sums + kSide, kStride);
    amx::load<2>(lower, kStride), amx::load<3>(lower + kSide, kStride);
  }
  for (int64_t step = 0; step < steps; ++step, x += 64, packed += kStepBytes) {
    amx::load<4>(x, x_bytes);
    amx::load_once<6>(packed, 64);
    amx::multiply<0, 4, 6>();
    amx::load_once<7>(packed + kTileBytes, 64);
    amx::multiply<1, 4, 7>();
    amx::load<5>(x + kSide * x_bytes, x_bytes);
    amx::multiply<2, 5, 6>();
    amx::multiply<3, 5, 7>();
    beside(step);
  }
  amx::store<0>(sums, kStride), amx::store<1>(sums + kSide, kStride);
  amx::store<2>(lower, kStride), amx::store<3>(lower + kSide, kStride);
}

// Sums [32 rows][16 outputs, 16 outputs] that are to be finished: those of rows `first` and later.
template <class Finish>
struct Finishing {
  const Finish finish;
  const float* sums = nullptr;
  int64_t row = 0, n = 0, first = kBlock;

  KV8_INLINE void rows(int64_t from, int64_t end) const {
    for (int64_t i = std::max(from, first); i < std::min(end, kBlock); ++i)
      finish(row + i, n, load(sums + i * kBlock), load(sums + i * kBlock + kSide));
  }
};

// How the work is shared out. Each share of the outputs has a thread that packs it; who has none
// left helps others with their rows.
struct Shares {
  const kv8_linear& l;
  const bool gated;
  const int64_t num_rows, steps, groups, panels;
  int64_t most_groups, count;
  Handout untouched;
  std::vector<Handout> rows;

  Shares(const kv8_linear& l, bool gated, int64_t num_rows, int64_t num_threads)
      : l(l), gated(gated), num_rows(num_rows), steps(l.num_inputs / kInputs),
        groups((l.num_outputs + kBlock - 1) / kBlock),
        panels((num_rows + kPanelRows - 1) / kPanelRows) {
    most_groups = std::max<int64_t>(kPackedBytes / (steps * kStepBytes), 1);
    const int64_t needed = (groups + most_groups - 1) / most_groups;
    const int64_t rounds = (needed + num_threads - 1) / num_threads;
    const int64_t useful = std::max<int64_t>(groups / kFewestGroups, 1);
    count = std::max(needed, std::min(rounds * num_threads, useful));
    rows.resize(static_cast<size_t>(count));
  }
  // Where a share begins; where two outputs become one, two groups share a line of memory.
  int64_t first_group(int64_t share) const {
    const int64_t group = share * groups / count;
    return gated && share < count ? group / 2 * 2 : group;
  }
  int64_t take_row(int64_t share) {
    return std::min(rows[static_cast<size_t>(share)].take() * kPanelRows, num_rows);
  }
};

// A thread's memory for packed weights and sums: as much for all products of a model, mostly.
class Memory {
 public:
  static Memory& of_thread() {
    static thread_local Memory memory;
    return memory;
  }
  void reserve(int64_t packed_bytes, int64_t num_sums) {
    const int64_t lines = (packed_bytes + num_sums * 4) / 64;
    if (lines > count_) lines_.reset(new Line[static_cast<size_t>(lines)]), count_ = lines;
    sums_ = packed_bytes / 64;
  }
  uint8_t* packed() const { return lines_[0].bytes; }
  float* sums() const { return reinterpret_cast<float*>(lines_[static_cast<size_t>(sums_)].bytes); }

 private:
  struct alignas(64) Line {
    uint8_t bytes[64];
  };
  std::unique_ptr<Line[]> lines_;
  int64_t count_ = 0, sums_ = 0;
};

// What a thread does.
template <class Finish>
class Worker {
 public:
  Worker(Shares& shares, const Finish& finish)
      : shares_(shares), l_(shares.l), memory_(Memory::of_thread()), finishing_{finish} {}

  void work() {
    for (int64_t s = shares_.untouched.take(); s < shares_.count; s = shares_.untouched.take()) run(s);
    for (int64_t s = 0; s < shares_.count; ++s) run(s);
    finishing_.rows(0, kBlock);
  }

 private:
  void run(int64_t share) {
    if (shares_.first_group(share) == shares_.first_group(share + 1)) return;  // of gates: an odd one
    int64_t row = shares_.take_row(share);
    if (row == shares_.num_rows) return;
    finishing_.rows(0, kBlock);  // before the memory of its sums is used otherwise
    finishing_.first = kBlock;
    first_group_ = shares_.first_group(share);
    groups_ = shares_.first_group(share + 1) - first_group_;
    pack_share();
    for (int64_t next; row < shares_.num_rows; row = next) {
      next = shares_.take_row(share);
      multiply_panel(row, std::min(row + kPanelRows, shares_.num_rows), next);
    }
  }

  void pack_share() {
    const int64_t bytes = shares_.steps * kStepBytes;
    memory_.reserve(groups_ * bytes, std::max<int64_t>(groups_, 2) * kSums);
    for (int64_t g = 0; g < groups_; ++g)
      pack(group(g), group(std::min(g + 1, groups_ - 1)), shares_.steps, memory_.packed() + g * bytes);
  }
  Group group(int64_t g) const { return Group(l_, shares_.gated, (first_group_ + g) * kBlock); }

  // Rows [row, end), after which come those from `next` on.
  void multiply_panel(int64_t row, int64_t end, int64_t next) {
    for (; row < end; row += kBlock) {
      // The last rows share a block with some before them, which are done already.
      const int64_t from = std::min(row, shares_.num_rows - kBlock);
      const int64_t then = row + kBlock < end ? row + kBlock : next;
      multiply_block(from, row - from, then < shares_.num_rows ? x(then) : nullptr);
    }
  }

  // Inputs that would not stay in the innermost cache go by in parts, and sums wait for the last one.
  void multiply_block(int64_t row, int64_t first_row, const uint8_t* next) {
    const int64_t steps = shares_.steps, parts = (steps + kMostSteps - 1) / kMostSteps;
    const int64_t part = (steps + parts - 1) / parts;
    const int64_t lines = next == nullptr ? 0 : (kBlock + groups_ - 1) / groups_;
    for (int64_t first = 0; first < steps; first += part) {
      const int64_t count = std::min(part, steps - first);
      const int64_t finished = (kBlock + count - 1) / count;
      for (int64_t g = 0; g < groups_; ++g) {
        turn_ ^= 1;
        float* sums = memory_.sums() + (parts > 1 ? g : turn_) * kSums;
        const uint8_t* packed = memory_.packed() + (g * steps + first) * kStepBytes;
        const Finishing<Finish> before = finishing_;
        multiply(x(row) + 64 * first, 2 * l_.x_stride, packed, count, first == 0, sums,
                 [&](int64_t step) KV8_INLINED {
          before.rows(step * finished, (step + 1) * finished);
          for (int64_t i = 0; i < lines; ++i, next += 64) prefetch(next);
        });
        finishing_.first = kBlock;
        if (first + count == steps) {
          finishing_.sums = sums, finishing_.row = row, finishing_.first = first_row;
          finishing_.n = (first_group_ + g) * kBlock;
        }
      }
    }
  }

  const uint8_t* x(int64_t row) const {
    return reinterpret_cast<const uint8_t*>(static_cast<const uint16_t*>(l_.x) + row * l_.x_stride);
  }

  Shares& shares_;
  const kv8_linear& l_;
  Memory& memory_;
  Finishing<Finish> finishing_;
  int64_t first_group_ = 0, groups_ = 0;
  int turn_ = 0;
};

}  // namespace

void linear_many(const kv8_linear& l, const kv8_gate* gate, int64_t num_rows, int num_threads) {
  Shares shares(l, gate != nullptr, num_rows, num_threads);
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    amx::configure();
    if (gate == nullptr) {
      Worker(shares, Neighbours{l}).work();
    } else {
      with_activation(gate->function, [&](auto function) {
        Worker(shares, Gated<decltype(function)>{l, *gate}).work();
      });
    }
    amx::release();
  }
}

}  // namespace kv8::amx
