// Sixteen rows of the weight as it lies in memory are one tile, the same 32 inputs of sixteen rows
// of x, packed, are the other: the weight is read once and never repacked.
#include "linear_amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>

#include "amx.h"
#include "finish_row.h"
#include "handout.h"
#include "simd.h"

namespace kv8::amx {
namespace {

constexpr int64_t kSide = 16;               // rows of a tile, and float32 values of one of its rows
constexpr int64_t kInputs = 32;             // bfloat16 values of a row
constexpr int64_t kTileBytes = kSide * 64;
constexpr int64_t kShare = 6 * kSide;       // outputs of a share of work
constexpr int64_t kPanelBytes = 768 << 10;  // of packed x that stay in a core's cache

bool find_unit() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned needed = (1u << 22) | (1u << 24);  // AMX-BF16, AMX-TILE
  if ((d & needed) != needed) return false;
  // The kernel gives a process the tiles' state on request (ARCH_REQ_XCOMP_PERM, XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

// Rows [16 block, ...) of x as tiles: word r of each row, which is a pair of inputs, becomes row r.
void pack_block(const kv8_linear& l, int64_t num_rows, int64_t block, uint8_t* to) {
  alignas(64) static const uint8_t zeros[64] = {};
  for (int64_t input = 0; input < l.num_inputs; input += kInputs, to += kTileBytes) {
    const uint8_t* from[kSide];
    for (int64_t i = 0; i < kSide; ++i) {
      const int64_t t = block * kSide + i;
      const auto* x = static_cast<const uint16_t*>(l.x);
      from[i] = t < num_rows ? reinterpret_cast<const uint8_t*>(x + t * l.x_stride + input) : zeros;
    }
    U32 words[kSide];
    load_transposed(from, kSide, words);
    for (int64_t i = 0; i < kSide; ++i) store_words(to + 64 * i, words[i]);
  }
}

// Sums of kA tiles of outputs for `count` rows of x, stored as [outputs][rows]. They are rounded to
// pairs of outputs, a word for each row, before they are turned to [rows][outputs].
template <int kA>
void finish_tiles(const kv8_linear& l, int64_t first_row, int64_t count, int64_t n,
                  const float* sums) {
  const Round<BFloat16> round;
  const auto* bias = static_cast<const uint16_t*>(l.bias);
  U32 words[kSide] = {};
  for (int64_t i = 0; i < kA * kSide / 2; ++i) {
    F32 pair[2] = {load(sums + 2 * i * kSide), load(sums + (2 * i + 1) * kSide)};
    if (bias != nullptr)
      for (int64_t j = 0; j < 2; ++j)
        pair[j] = pair[j] + splat(BFloat16::decode(bias[n + 2 * i + j]));
    words[i] = round.words(pair);
  }
  transpose(words);
  for (int64_t i = 0; i < count; ++i) finish_row<kA * kSide>(l, first_row + i, n, words[i]);
}

// Sums of up to two tiles of outputs from n on, for up to two blocks of x.
struct Sums {
  int64_t block, n;
  int num_blocks, num_tiles;
  alignas(64) float sums[2][2][kSide * kSide];
};

void finish_sums(const kv8_linear& l, int64_t num_rows, const Sums& s) {
  for (int b = 0; b < s.num_blocks; ++b) {
    const int64_t first = (s.block + b) * kSide, count = std::min(num_rows - first, kSide);
    if (s.num_tiles == 2) finish_tiles<2>(l, first, count, s.n, s.sums[b][0]);
    else finish_tiles<1>(l, first, count, s.n, s.sums[b][0]);
  }
}

// Rows of the weight that come next, fetched from memory meanwhile in the order in which they lie.
struct Ahead {
  const uint8_t* at;
  int lines;  // with each step; none if there is nothing more
};

// kA tiles of weight rows from output n on, times kB blocks of x. Tiles of x are loaded with the
// hint that they are not needed again soon: so they do not push the weight out of the innermost
// cache.
template <int kA, int kB>
void multiply(const kv8_linear& l, const uint8_t* packed, int64_t block, int64_t n, Ahead ahead,
              Sums& s) {
  static_assert(kA * kB <= 4 && kA <= 2 && kB <= 2);
  s.block = block, s.n = n, s.num_blocks = kB, s.num_tiles = kA;
  const int64_t bytes = 2 * l.num_inputs, steps = l.num_inputs / kInputs;
  const auto* weight = static_cast<const uint8_t*>(l.weight) + n * bytes;
  const uint8_t* x = packed + block * steps * kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, weight += 64, x += kTileBytes) {
    _tile_stream_loadd(6, x, 64);
    if constexpr (kB > 1) {
      _tile_stream_loadd(7, x + steps * kTileBytes, 64);
    }
    for (int i = 0; i < ahead.lines; ++i, ahead.at += 64) prefetch(ahead.at);
    _tile_loadd(4, weight, bytes);
    _tile_dpbf16ps(0, 4, 6);
    if constexpr (kB > 1) {
      _tile_dpbf16ps(1, 4, 7);
    }
    if constexpr (kA > 1) {
      _tile_loadd(5, weight + kSide * bytes, bytes);
      _tile_dpbf16ps(2, 5, 6);
      if constexpr (kB > 1) {
        _tile_dpbf16ps(3, 5, 7);
      }
    }
  }
  _tile_stored(0, s.sums[0][0], 64);
  if constexpr (kB > 1) _tile_stored(1, s.sums[1][0], 64);
  if constexpr (kA > 1) _tile_stored(2, s.sums[0][1], 64);
  if constexpr (kA > 1 && kB > 1) _tile_stored(3, s.sums[1][1], 64);
}

// Outputs n to end.
struct Share {
  int64_t first_block, last_block;  // of x
  int64_t n, end;
};

// Up to two tiles of rows of the weight, from output n on, as what to fetch.
Ahead from(const kv8_linear& l, int64_t n, int64_t end) {
  return {static_cast<const uint8_t*>(l.weight) + n * 2 * l.num_inputs,
          static_cast<int>(n >= end ? 0 : std::min(end - n, 2 * kSide))};
}

void fetch(const Ahead& ahead, int64_t steps) {
  for (int64_t i = 0; i < ahead.lines * steps; ++i) prefetch(ahead.at + 64 * i);
}

// Two rows of tiles of the weight stay in the innermost cache while x goes by. Sums are finished
// while the unit works on the next ones. `after` is fetched at last.
void multiply_share(const kv8_linear& l, const uint8_t* packed, int64_t num_rows, const Share& share,
                    const Ahead& after) {
  Sums sums[2];
  int current = 0;
  sums[1].num_blocks = 0;
  const int64_t first = share.first_block, last = share.last_block, end = share.end;
  for (int64_t n = share.n; n < end; n += 2 * kSide) {
    const bool two = n + 2 * kSide <= end;
    const Ahead next = n + 2 * kSide < end ? from(l, n + 2 * kSide, end) : after;
    for (int64_t b = first; b < last; b += 2, current = 1 - current) {
      const Ahead ahead = b == first ? next : Ahead{};
      Sums& s = sums[current];
      if (two && b + 1 < last) multiply<2, 2>(l, packed, b, n, ahead, s);
      else if (two) multiply<2, 1>(l, packed, b, n, ahead, s);
      else if (b + 1 < last) multiply<1, 2>(l, packed, b, n, ahead, s);
      else multiply<1, 1>(l, packed, b, n, ahead, s);
      finish_sums(l, num_rows, sums[1 - current]);
    }
  }
  finish_sums(l, num_rows, sums[1 - current]);
}

}  // namespace

bool available() {
  static const bool found = find_unit();
  return found;
}

bool takes(const kv8_linear& l) {
  return static_cast<Format>(l.dtype) == Format::kBFloat16 && l.num_inputs % kInputs == 0 &&
         l.num_outputs % kSide == 0 && available();
}

bool takes_gated(const kv8_gated& g, int64_t num_rows) {
  return takes(g.both) && num_rows >= kManyRows && g.both.num_outputs % (2 * kSide) == 0;
}

void linear(const kv8_linear& l, int64_t num_rows, int num_threads) {
  if (num_rows == 1 && takes_one(l)) return linear_one(l, num_threads);
  if (num_rows >= kManyRows) return linear_many(l, nullptr, num_rows, num_threads);
  auto* packed = reinterpret_cast<uint8_t*>(l.scratch);
  const int64_t block_bytes = l.num_inputs / kInputs * kTileBytes;
  const int64_t blocks = (num_rows + kSide - 1) / kSide;
  const int64_t panel_blocks = std::max<int64_t>(kPanelBytes / (2 * block_bytes), 1) * 2;
  const int64_t panels = (blocks + panel_blocks - 1) / panel_blocks;
  const int64_t shares = (l.num_outputs + kShare - 1) / kShare, all = panels * shares;
  auto share = [&](int64_t i) {
    const int64_t block = i / shares * panel_blocks, n = i % shares * kShare;
    return Share{block, std::min(block + panel_blocks, blocks), n,
                 std::min(n + kShare, l.num_outputs)};
  };
  auto ahead = [&](int64_t i) { return i < all ? from(l, share(i).n, share(i).end) : Ahead{}; };
  Handout handout;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    amx::configure();
    const int64_t own = handout.take();
    fetch(ahead(own), l.num_inputs / kInputs);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) pack_block(l, num_rows, b, packed + b * block_bytes);
    take_ahead(handout, own, all, [&](int64_t i, int64_t next) {
      multiply_share(l, packed, num_rows, share(i), ahead(next));
    });
    amx::release();
  }
}

}  // namespace kv8::amx
