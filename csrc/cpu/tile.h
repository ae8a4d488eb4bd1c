// Attention of a block of query rows over one tile of keys: the arithmetic decode and prefill share,
// but for the products, of which there are two kinds: tile_float.h and tile_pairs.h.
//
// A row is computed in the same order whatever else shares its tile: logits dimension by dimension,
// sums key by key, tiles and splits at fixed positions of the sequence. The running maximum is a
// whole number in the exp2 domain, so a change of it multiplies by an exact power of two and leaves
// no trace. Hence no result depends on threads, chunks or neighbours.
#pragma once

#include <type_traits>

#include "tile_rows.h"

namespace kv8::KV8_ISA {

constexpr int kSplit = 8 * kTile;  // keys whose sums are formed apart from those of other splits
constexpr float kNoMaximum = -__builtin_inff();
constexpr float kLog2E = 1.4426950408889634f;
constexpr float kWeightSteps = 256.0f;  // FP8 attention stores softmax weights times this

// Values of a row of sums, in the order in which codes widen: `lane_of` of the products.
inline int padded(int head_dim) { return round_up(head_dim, 4 * kLanes); }

// Rows that have memory: products may be computed for sixteen at a time.
inline int padded_rows(int rows) { return rows <= 16 ? rows : round_up(rows, 16); }

// How many bfloat16 numbers, added up, stand for one of a query and for one of the weights, where
// products take those.
struct Parts {
  int query, weight;
};

// What attention has summed up for each row of a block so far.
struct Sums {
  float* values;   // [R, padded(D)], times 2**-maximum
  float* weights;  // [R, kLanes], likewise; their sum is the softmax's denominator
  float* maxima;   // [R] and a vector's more, whole numbers, kNoMaximum before the first key

  static int64_t floats(int rows, int head_dim) {
    return static_cast<int64_t>(padded_rows(rows)) * (padded(head_dim) + kLanes) +
           round_up(rows, 16) + 16;
  }
  Sums(float* memory, int rows, int head_dim)
      : values(memory),
        weights(values + static_cast<int64_t>(padded_rows(rows)) * padded(head_dim)),
        maxima(weights + static_cast<int64_t>(padded_rows(rows)) * kLanes) {}

  void clear(int rows, int head_dim) const {
    clear_values(0, padded_rows(rows), head_dim);
    clear_weights(rows);
  }
  void clear_values(int first, int rows, int head_dim) const {
    const int64_t width = padded(head_dim);
    std::memset(values + first * width, 0, static_cast<size_t>(rows * width) * sizeof(float));
  }
  void clear_weights(int rows) const {
    std::memset(weights, 0, static_cast<size_t>(padded_rows(rows)) * kLanes * sizeof(float));
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

// The same for rows first <= r < first + count whose maxima are larger.
inline void raise_some(const Sums& sums, int first, int count, int head_dim, F32 vector) {
  float maxima[kLanes];
  store(maxima, vector);
  for (int i = 0; i < count; ++i)
    if (maxima[i] > sums.maxima[first + i]) raise(sums, first + i, head_dim, maxima[i]);
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

// What softmax weights are rounded to before they meet the values: nothing, codes in FP8 attention,
// or what a matrix unit takes.
enum class Rounding { kNone, kE4M3, kBFloat16 };

// How dot products become logits in the exp2 domain, and those become weights.
struct Logits {
  float cap;  // 0, or softcap * log2(e): then multiplier * dot is the tanh's argument
  Rounding rounding;
};

// Call `work` with how weights are rounded, as a constant.
template <class Work>
KV8_INLINE void with_rounding(Rounding rounding, Work&& work) {
  switch (rounding) {
    case Rounding::kNone: return work(std::integral_constant<Rounding, Rounding::kNone>{});
    case Rounding::kE4M3: return work(std::integral_constant<Rounding, Rounding::kE4M3>{});
    case Rounding::kBFloat16: return work(std::integral_constant<Rounding, Rounding::kBFloat16>{});
  }
}

using TileOfWeights = F32[kTile / kLanes];  // of one row

// The largest lanes of a row's dot products over a tile.
KV8_INLINE F32 largest_of(const float* dots) {
  F32 largest = splat(kNoMaximum);
  for (int i = 0; i < kTile / kLanes; ++i) largest = max(load(dots + i * kLanes), largest);
  return largest;
}

// A row's dot products over a tile times `multiplier`.
KV8_INLINE void times(const float* dots, float multiplier, TileOfWeights& x) {
  for (int i = 0; i < kTile / kLanes; ++i) x[i] = load(dots + i * kLanes) * splat(multiplier);
}

// Turn a row's dot products over a tile into logits. Keys outside `visible` are hidden. Returns the
// largest logits.
KV8_INLINE F32 row_logits(const float* dots, float multiplier, const Logits& logits,
                          const KeyRange& visible, TileOfWeights& x) {
  F32 largest = splat(kNoMaximum);
  const bool all = visible.first <= 0 && visible.end >= kTile;
  for (int i = 0; i < kTile / kLanes; ++i) {
    x[i] = load(dots + i * kLanes) * splat(multiplier);
    if (logits.cap != 0.0f) x[i] = tanh(x[i]) * splat(logits.cap);
    if (!all) {
      const int first = i * kLanes;
      x[i] = keep_lanes(x[i], visible.first - first, visible.end - first, splat(kNoMaximum));
    }
    largest = max(x[i], largest);
  }
  return largest;
}

// The sums of the lanes of each row, in the order of lanes; of kLanes rows, or as many as there are.
inline F32 row_sums(const float* rows, int count) {
  const uint8_t* from[kLanes];
  for (int i = 0; i < kLanes; ++i)
    from[i] = reinterpret_cast<const uint8_t*>(rows + min(i, count - 1) * kLanes);
  U32 lanes[kLanes];
  load_transposed(from, kLanes, lanes);
  F32 sum = float_of(lanes[0]);
  for (int i = 1; i < kLanes; ++i) sum = sum + float_of(lanes[i]);
  return sum;
}

// To the nearest value of e4m3, ties to even, for 0 <= x <= 256.
KV8_INLINE F32 round_to_e4m3(F32 x) {
  // The power of two below x, but at least the smallest normal one, fixes the distance of codes.
  const F32 power =
      max(float_of(bits_of(x) & splat_word(0x7f800000u)), splat(0x1p-6f));
  const F32 grid = power * splat(0x1.8p20f);
  return (x + grid) - grid;
}

// Running maxima are multiples of this, so that they seldom have to be raised. FP8 attention's are
// known before; its codes want the smallest.
template <Rounding kRounding>
constexpr float kMaximumStep = kRounding == Rounding::kE4M3 ? 1.0f : 8.0f;

template <Rounding kRounding>
KV8_INLINE F32 next_maximum(F32 x) {
  constexpr float kStep = kMaximumStep<kRounding>;
  return ceiling(x * splat(1.0f / kStep)) * splat(kStep);
}

// Turn row r's logits into softmax weights, and add them up. Those that are rounded to bfloat16
// next (`set_weights` of the products) need not be exact to more digits.
template <Rounding kRounding>
KV8_INLINE void soften(const Sums& sums, int r, TileOfWeights& x) {
  using Precision = std::conditional_t<kRounding == Rounding::kBFloat16, EightBits, FullPrecision>;
  const F32 maximum = splat(sums.maxima[r] == kNoMaximum ? 0.0f : sums.maxima[r]);
  F32 total = load(sums.weights + r * kLanes);
  for (int i = 0; i < kTile / kLanes; ++i) {
    F32 weight = exp2_minus<Precision>(x[i], maximum);
    total = total + weight;
    if (kRounding == Rounding::kE4M3) weight = round_to_e4m3(weight * splat(kWeightSteps));
    x[i] = weight;
  }
  store(sums.weights + r * kLanes, total);
}

}  // namespace kv8::KV8_ISA
