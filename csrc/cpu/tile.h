// Attention of a block of query rows over one tile of keys: the arithmetic decode and prefill share.
//
// A row is computed in the same order whatever else shares its tile: logits dimension by dimension,
// sums key by key, tiles and splits at fixed positions of the sequence. The running maximum is a
// whole number in the exp2 domain, so a change of it multiplies by an exact power of two and leaves
// no trace. Hence no result depends on threads, chunks or neighbours.
#pragma once

#include <type_traits>

#include "simd.h"

namespace kv8::KV8_ISA {

constexpr int kTile = 64;          // keys of a tile; position p lies in tile p / kTile
constexpr int kSplit = 8 * kTile;  // keys whose sums are formed apart from those of other splits
constexpr int kMaxHeadDim = 512;
constexpr float kNoMaximum = -__builtin_inff();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kWeightSteps = 256.0f;  // FP8 attention stores softmax weights times this

inline int round_up(int n, int unit) { return (n + unit - 1) / unit * unit; }

// Values of a row of sums, in the order in which codes widen; see `lane_of`.
inline int padded(int head_dim) { return round_up(head_dim, 4 * kLanes); }

// Where value d of a row lies once its words are widened: code i of kLanes words makes a vector.
inline int lane_of(int d, int codes_per_word) {
  const int group = kLanes * codes_per_word;
  return d / group * group + d % codes_per_word * kLanes + d % group / codes_per_word;
}

// Where the keys and values of a tile lie. Those outside [first, end) are not there: they point to
// zeros.
struct TileRows {
  const uint8_t* k[kTile];
  const uint8_t* v[kTile];
  int first, end;
};

// What attention has summed up for each row of a block so far.
struct Sums {
  float* values;   // [R, padded(D)], times 2**-maximum
  float* weights;  // [R, kLanes], likewise; their sum is the softmax's denominator
  float* maxima;   // [R], whole numbers, kNoMaximum before the first key

  static int64_t floats(int64_t rows, int head_dim) {
    return rows * (padded(head_dim) + kLanes) + round_up(static_cast<int>(rows), 16);
  }
  Sums(float* memory, int rows, int head_dim)
      : values(memory),
        weights(values + static_cast<int64_t>(rows) * padded(head_dim)),
        maxima(weights + static_cast<int64_t>(rows) * kLanes) {}

  void clear(int rows, int head_dim) const {
    std::memset(values, 0, static_cast<size_t>(rows) * (padded(head_dim) + kLanes) * sizeof(float));
    for (int r = 0; r < rows; ++r) maxima[r] = kNoMaximum;
  }
};

// 2**e for a whole e <= 0; 0 far below.
inline float power_of_two(float e) {
  if (!(e >= -126.0f)) return e != e ? e : 0.0f;
  return float_of(static_cast<uint32_t>(static_cast<int>(e) + 127) << 23);
}

inline void multiply(float* x, int count, float factor) {
  for (int i = 0; i < count; i += kLanes) store(x + i, load(x + i) * splat(factor));
}

// Raise the maximum of row r to `maximum`.
inline void raise(const Sums& sums, int r, int head_dim, float maximum) {
  if (sums.maxima[r] != kNoMaximum) {
    const float factor = power_of_two(sums.maxima[r] - maximum);
    multiply(sums.values + static_cast<int64_t>(r) * padded(head_dim), padded(head_dim), factor);
    multiply(sums.weights + r * kLanes, kLanes, factor);
  }
  sums.maxima[r] = maximum;
}

// Add the sums of a later split to those of all splits before it.
inline void merge(const Sums& total, const Sums& part, int rows, int head_dim) {
  const int width = padded(head_dim);
  for (int r = 0; r < rows; ++r) {
    if (part.maxima[r] > total.maxima[r]) raise(total, r, head_dim, part.maxima[r]);
    // Where no key was visible there is nothing to add, unless something that is no number.
    const float shift = part.maxima[r] == kNoMaximum ? 0.0f : part.maxima[r] - total.maxima[r];
    const F32 factor = splat(power_of_two(shift));
    const int64_t row = static_cast<int64_t>(r) * width;
    for (int d = 0; d < width; d += kLanes) {
      float* sum = total.values + row + d;
      store(sum, fma(load(part.values + row + d), factor, load(sum)));
    }
    float* weight = total.weights + r * kLanes;
    store(weight, fma(load(part.weights + r * kLanes), factor, load(weight)));
  }
}

// Widen the keys of a tile and turn them, so that a vector holds one dimension of kLanes keys:
// float32 [D][kTile]. Meanwhile fetch the keys of the tile that comes next; its values are fetched
// while this one's are read, since a core waits for only so many cache lines at once.
template <class Code>
inline void pack_keys(const TileRows& rows, const TileRows& next, int head_dim, float* tile) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int words = head_dim / kVectors;
  const Widen<Code> widen;
  for (int key = 0; key < kTile; key += kLanes) {
    for (int word = 0; word < words; word += kLanes) {
      const int some = words - word < kLanes ? words - word : kLanes;
      const uint8_t* from[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        from[i] = rows.k[key + i] + 4 * word;
        prefetch(next.k[key + i] + 4 * word);
      }
      U32 r[kLanes];
      load_transposed(from, some, r);
      float* out = tile + word * kVectors * kTile + key;
      for (int j = 0; j < some; ++j, out += kVectors * kTile) {
        F32 values[kVectors];
        widen(r[j], values);
        for (int i = 0; i < kVectors; ++i) store(out + i * kTile, values[i]);
      }
    }
  }
}

// Widen the values of a tile to float32 [kTile][padded(D)]. Returns whether all are finite.
template <class Code>
inline bool pack_values(const TileRows& rows, const TileRows& next, int head_dim, float* tile) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int words = head_dim / kVectors, width = padded(head_dim);
  const Widen<Code> widen;
  F32 zero = splat(0.0f);  // stays so: 0 * x is NaN when x is not finite
  for (int key = 0; key < kTile; ++key) {
    float* out = tile + key * width;
    for (int word = 0; word < words; word += kLanes, out += kVectors * kLanes) {
      F32 values[kVectors];
      prefetch(next.v[key] + 4 * word);
      widen(load_some(rows.v[key] + 4 * word, words - word), values);
      for (int i = 0; i < kVectors; ++i) {
        store(out + i * kLanes, values[i]);
        zero = fma(values[i], splat(0.0f), zero);
      }
    }
    for (; out < tile + (key + 1) * width; out += kLanes) store(out, splat(0.0f));
  }
  float lanes[kLanes];
  store(lanes, zero);
  bool finite = true;
  for (float lane : lanes) finite = finite && lane == 0.0f;
  return finite;
}

// Call work.template operator()<n> for blocks of at most kMost rows, as even as they get.
template <int kMost, class Work, int kCount = kMost>
inline void with_count(int count, Work&& work) {
  if constexpr (kCount > 1) {
    if (count < kCount) return with_count<kMost, Work, kCount - 1>(count, static_cast<Work&&>(work));
  }
  work(std::integral_constant<int, kCount>{});
}

template <int kMost, class Work>
inline void in_blocks(int rows, Work&& work) {
  int blocks = (rows + kMost - 1) / kMost;
  for (int start = 0; blocks > 0; --blocks) {
    const int count = (rows - start + blocks - 1) / blocks;
    with_count<kMost>(count, [&](auto n) { work(start, n); });
    start += count;
  }
}

// Dot products of R rows of queries [R][D] with the keys of a tile, [R][kTile].
inline void dot_products(const float* queries, int rows, const float* tile, int head_dim,
                         float* out) {
  in_blocks<kRows>(rows, [&](int start, auto count) {
    constexpr int n = count;
    const float* q = queries + static_cast<int64_t>(start) * head_dim;
    for (int key = 0; key < kTile; key += kColumns * kLanes) {
      F32 sum[n][kColumns];
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < kColumns; ++c) sum[r][c] = splat(0.0f);
      const float* k = tile + key;
      for (int d = 0; d < head_dim; ++d, k += kTile) {
        F32 column[kColumns];
        for (int c = 0; c < kColumns; ++c) column[c] = load(k + c * kLanes), pin(column[c]);
        for (int r = 0; r < n; ++r) {
          const F32 x = splat(q[r * head_dim + d]);
          for (int c = 0; c < kColumns; ++c) sum[r][c] = fma(column[c], x, sum[r][c]);
        }
      }
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < kColumns; ++c)
          store(out + (start + r) * kTile + key + c * kLanes, sum[r][c]);
    }
  });
}

// How dot products become logits in the exp2 domain.
struct Logits {
  float cap;           // 0, or softcap * log2(e): then multiplier * dot is the tanh's argument
  bool round_weights;  // FP8 attention
};

// A row's logits over a tile. Keys outside [first, end) are hidden. Returns the largest.
inline float row_logits(const float* dots, float multiplier, const Logits& logits, int first,
                        int end, F32 (&x)[kTile / kLanes]) {
  F32 largest = splat(kNoMaximum);
  const bool all = first <= 0 && end >= kTile;
  for (int i = 0; i < kTile / kLanes; ++i) {
    x[i] = load(dots + i * kLanes) * splat(multiplier);
    if (logits.cap != 0.0f) x[i] = tanh(x[i]) * splat(logits.cap);
    if (!all) x[i] = keep_lanes(x[i], first - i * kLanes, end - i * kLanes, splat(kNoMaximum));
    largest = max(x[i], largest);
  }
  return reduce_max(largest);
}

// To the nearest value of e4m3, ties to even, for 0 <= x <= 256.
KV8_INLINE F32 round_to_e4m3(F32 x) {
  // The power of two below x, but at least the smallest normal one, fixes the distance of codes.
  const F32 power =
      max(float_of(bits_of(x) & splat_word(0x7f800000u)), splat(0x1p-6f));
  const F32 grid = power * splat(0x1.8p20f);
  return (x + grid) - grid;
}

// Turn row r's dot products into softmax weights, in place, and add them up.
inline void soften(float* dots, float multiplier, const Logits& logits, int first, int end,
                   const Sums& sums, int r, int head_dim) {
  F32 x[kTile / kLanes];
  const float largest = __builtin_ceilf(row_logits(dots, multiplier, logits, first, end, x));
  if (largest > sums.maxima[r]) raise(sums, r, head_dim, largest);
  const F32 maximum = splat(sums.maxima[r] == kNoMaximum ? 0.0f : sums.maxima[r]);
  F32 total = load(sums.weights + r * kLanes);
  for (int i = 0; i < kTile / kLanes; ++i) {
    F32 weight = exp2_minus(x[i], maximum);
    total = total + weight;
    if (logits.round_weights) weight = round_to_e4m3(weight * splat(kWeightSteps));
    store(dots + i * kLanes, weight);
  }
  store(sums.weights + r * kLanes, total);
}

constexpr int kWeighRows = kLanes == 16 ? 6 : 2;  // with four vectors of sums each

// sums[r] += weights[r][key] * values[key] for first <= key < end, from a packed tile.
inline void weigh(const float* weights, int rows, const float* tile, int head_dim, int first,
                  int end, float* sums) {
  const int width = padded(head_dim);
  for (int d = 0; d < width; d += 4 * kLanes) {
    in_blocks<kWeighRows>(rows, [&](int start, auto count) {
      constexpr int n = count;
      float* s = sums + static_cast<int64_t>(start) * width + d;
      const float* w = weights + start * kTile;
      F32 sum[n][4];
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < 4; ++c) sum[r][c] = load(s + r * width + c * kLanes);
      for (int key = first; key < end; ++key) {
        F32 value[4];
        for (int c = 0; c < 4; ++c)
          value[c] = load(tile + key * width + d + c * kLanes), pin(value[c]);
        for (int r = 0; r < n; ++r) {
          const F32 weight = splat(w[r * kTile + key]);
          for (int c = 0; c < 4; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
        }
      }
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < 4; ++c) store(s + r * width + c * kLanes, sum[r][c]);
    });
  }
}

// The same for few rows, widening values on the way: no tile is written.
constexpr int kDirectRows = 4;
template <class Code>
inline void weigh_direct(const float* weights, int rows, const TileRows& tile,
                         const TileRows& next, int head_dim, float* sums) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int words = head_dim / kVectors, width = padded(head_dim);
  const Widen<Code> widen;
  with_count<kDirectRows>(rows, [&](auto count) {
    constexpr int n = count;
    for (int word = 0; word < words; word += kLanes) {
      float* s = sums + word * kVectors;
      F32 sum[n][kVectors];
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < kVectors; ++c) sum[r][c] = load(s + r * width + c * kLanes);
      for (int key = tile.first; key < tile.end; ++key) {
        F32 value[kVectors];
        prefetch(next.v[key] + 4 * word);
        widen(load_some(tile.v[key] + 4 * word, words - word), value);
        for (int r = 0; r < n; ++r) {
          const F32 weight = splat(weights[r * kTile + key]);
          for (int c = 0; c < kVectors; ++c) sum[r][c] = fma(weight, value[c], sum[r][c]);
        }
      }
      for (int r = 0; r < n; ++r)
        for (int c = 0; c < kVectors; ++c) store(s + r * width + c * kLanes, sum[r][c]);
    }
  });
}

}  // namespace kv8::KV8_ISA
