// Sixteen rows of the weight as it lies in memory are one tile, the same 32 inputs of sixteen rows
// of x, packed, are the other: the weight is read once and never repacked.
#include "linear_amx.h"

#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "finish.h"
#include "tile.h"

namespace kv8::amx {
namespace {

constexpr int64_t kSide = 16;               // rows of a tile, and float32 values of one of its rows
constexpr int64_t kInputs = 32;             // bfloat16 values of a row
constexpr int64_t kTileBytes = kSide * 64;
constexpr int64_t kShare = 6 * kSide;       // outputs of a share of work

bool find_unit() {
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return false;
  const unsigned needed = (1u << 22) | (1u << 24);  // AMX-BF16, AMX-TILE
  if ((d & needed) != needed) return false;
  // The kernel gives a process the tiles' state on request (ARCH_REQ_XCOMP_PERM, XTILEDATA).
  return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
}

struct alignas(64) TileShapes {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {};
  uint8_t rows[16] = {};
  TileShapes() {
    for (int i = 0; i < 8; ++i) row_bytes[i] = 64, rows[i] = kSide;
  }
};

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

// Sums of sixteen outputs for sixteen rows of x, from a stored tile [outputs][rows].
void finish_tile(const kv8_linear& l, int64_t num_rows, int64_t first_row, int64_t n,
                 const float* tile) {
  const uint8_t* from[kSide];
  for (int64_t i = 0; i < kSide; ++i) from[i] = reinterpret_cast<const uint8_t*>(tile + i * kSide);
  U32 turned[kSide];
  load_transposed(from, kSide, turned);
  alignas(64) float sums[kSide];
  const int64_t count = num_rows - first_row < kSide ? num_rows - first_row : kSide;
  for (int64_t i = 0; i < count; ++i) {
    store_words(sums, turned[i]);
    finish<BFloat16>(l, first_row + i, n, kSide, sums);
  }
}

void fetch(const uint8_t* rows, int64_t bytes) {
  for (int64_t i = 0; i < kSide; ++i) prefetch(rows + i * bytes);
}

// kA tiles of weight rows from output n on, times kB blocks of x.
template <int kA, int kB>
void multiply(const kv8_linear& l, const uint8_t* packed, int64_t num_rows, int64_t block,
              int64_t n, bool more) {
  static_assert(kA * kB <= 4 && kA <= 4 && kB <= 4);
  const int64_t bytes = 2 * l.num_inputs, steps = l.num_inputs / kInputs;
  const auto* weight = static_cast<const uint8_t*>(l.weight) + n * bytes;
  const uint8_t* x = packed + block * steps * kTileBytes;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int64_t step = 0; step < steps; ++step, weight += 64, x += kTileBytes) {
    _tile_loadd(6, x, 64);
    if constexpr (kB > 1) {
      _tile_loadd(7, x + steps * kTileBytes, 64);
    }
    if (more)
      for (int a = 0; a < kA; ++a) fetch(weight + (2 + a) * kSide * bytes, bytes);
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
  alignas(64) float tile[kSide * kSide];
  auto done = [&](int a, int b) {
    finish_tile(l, num_rows, (block + b) * kSide, n + a * kSide, tile);
  };
  _tile_stored(0, tile, 64);
  done(0, 0);
  if constexpr (kB > 1) {
    _tile_stored(1, tile, 64);
    done(0, 1);
  }
  if constexpr (kA > 1) {
    _tile_stored(2, tile, 64);
    done(1, 0);
  }
  if constexpr (kA > 1 && kB > 1) {
    _tile_stored(3, tile, 64);
    done(1, 1);
  }
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

void linear(const kv8_linear& l, int64_t num_rows, int num_threads) {
  auto* packed = reinterpret_cast<uint8_t*>(l.scratch);
  const int64_t blocks = (num_rows + kSide - 1) / kSide;
  const int64_t block_bytes = l.num_inputs / kInputs * kTileBytes;
  const int64_t shares = (l.num_outputs + kShare - 1) / kShare;
  static const TileShapes shapes;
#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    _tile_loadconfig(&shapes);
#pragma omp for schedule(static)
    for (int64_t b = 0; b < blocks; ++b) pack_block(l, num_rows, b, packed + b * block_bytes);
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < shares; ++i) {
      const int64_t end = l.num_outputs < (i + 1) * kShare ? l.num_outputs : (i + 1) * kShare;
      for (int64_t n = i * kShare; n < end; n += 2 * kSide) {
        const bool two = n + 2 * kSide <= end;
        for (int64_t b = 0; b < blocks; b += 2) {
          const bool more = b == 0 && n + 4 * kSide <= end;
          if (two && b + 1 < blocks) multiply<2, 2>(l, packed, num_rows, b, n, more);
          else if (two) multiply<2, 1>(l, packed, num_rows, b, n, more);
          else if (b + 1 < blocks) multiply<1, 2>(l, packed, num_rows, b, n, more);
          else multiply<1, 1>(l, packed, num_rows, b, n, more);
        }
      }
    }
    _tile_release();
  }
}

}  // namespace kv8::amx
