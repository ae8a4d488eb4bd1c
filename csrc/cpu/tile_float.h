// The products of attention as float32 multiply-adds: dot products dimension by dimension, weighted
// sums key by key.
#pragma once

#include "arena.h"
#include "blocks.h"
#include "fetch.h"

namespace kv8::KV8_ISA {

// Widen the keys of a tile and turn them, so that a vector holds one dimension of kLanes keys:
// float32 [D][kTile].
template <class Code>
inline void pack_keys(const TileRows& rows, Fetch& fetch, int head_dim, float* tile) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int words = head_dim / kVectors;
  const Widen<Code> widen;
  for (int key = 0; key < kTile; key += kLanes) {
    for (int word = 0; word < words; word += kLanes) {
      const int some = words - word < kLanes ? words - word : kLanes;
      const uint8_t* from[kLanes];
      for (int i = 0; i < kLanes; ++i) {
        from[i] = rows.k.row(key + i) + 4 * word;
        if (word == 0 && i % 4 == 0) fetch.step();
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
inline bool pack_values(const TileRows& rows, Fetch& fetch, int head_dim, float* tile) {
  constexpr int kVectors = Code::kCodesPerWord;
  const int words = head_dim / kVectors, width = padded(head_dim);
  const Widen<Code> widen;
  F32 zero = splat(0.0f);  // stays so: 0 * x is NaN when x is not finite
  for (int key = 0; key < kTile; ++key) {
    float* out = tile + key * width;
    for (int word = 0; word < words; word += kLanes, out += kVectors * kLanes) {
      F32 values[kVectors];
      if (word == 0 && key % 4 == 0) fetch.step();
      widen(load_some(rows.v.row(key) + 4 * word, words - word), values);
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
                         Fetch& fetch, int head_dim, float* sums) {
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
        if (word == 0 && key % 4 == 0) fetch.step();
        widen(load_some(tile.v.row(key) + 4 * word, words - word), value);
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

// The products of attention in float32, for any format and any CPU.
template <class Code>
class FloatProducts {
 public:
  static constexpr int kBlockRows = 1 << 20;  // rows that go through a tile together: all
  static constexpr bool kTakesParts = false;
  struct Session {};                          // nothing to set up for a thread

  FloatProducts(Arena& arena, int rows, int head_dim, Parts)
      : head_dim_(head_dim),
        queries_(arena.take<float>(static_cast<int64_t>(rows) * head_dim)),
        keys_(arena.take<float>(static_cast<int64_t>(kTile) * head_dim)),
        values_(arena.take<float>(static_cast<int64_t>(kTile) * padded(head_dim))),
        weights_(arena.take<float>(static_cast<int64_t>(kTile) * rows)) {}

  // Where value d of a row of sums lies: code i of kLanes words makes a vector.
  static int lane_of(int d) {
    constexpr int codes = Code::kCodesPerWord, group = kLanes * codes;
    return d / group * group + d % codes * kLanes + d % group / codes;
  }

  // A piece of this many rows a head begins; `single` if all of them see the same keys.
  void begin(int rows, bool single) {
    rows_ = rows, single_ = single, direct_ = single && rows <= kDirectRows;
  }
  bool overwrites() const { return false; }
  void set_query(int r, const float* values) const {
    std::memcpy(queries_ + static_cast<int64_t>(r) * head_dim_, values,
                static_cast<size_t>(head_dim_) * sizeof(float));
  }
  void load_keys(const TileRows& tile, Fetch& fetch) const {
    pack_keys<Code>(tile, fetch, head_dim_, keys_);
  }
  void multiply_keys(int start, int count, float* dots) const {
    dot_products(queries_ + static_cast<int64_t>(start) * head_dim_, count, keys_, head_dim_, dots);
  }
  void load_values(const TileRows& tile, Fetch& fetch) {
    tile_ = &tile, fetch_ = &fetch;
    finite_ = direct_ || pack_values<Code>(tile, fetch, head_dim_, values_);
  }
  void set_weights(int r, const TileOfWeights& x) const {
    for (int i = 0; i < kTile / kLanes; ++i) store(weights_ + r * kTile + i * kLanes, x[i]);
  }

  void prefetch_next(int, const float*) const {}

  // Add the weighted values of the tile; visible(r) tells which keys row r sees.
  template <class Visible>
  void add_values(int start, int, const Visible& visible, float* all_sums, bool) const {
    float* sums = all_sums + static_cast<int64_t>(start) * padded(head_dim_);
    if (direct_) return weigh_direct<Code>(weights_, rows_, *tile_, *fetch_, head_dim_, sums);
    if (finite_ || single_)
      return weigh(weights_, rows_, values_, head_dim_, tile_->first, tile_->end, sums);
    // A value that is no finite number must not reach rows that do not see it.
    for (int r = 0; r < rows_; ++r) {
      const KeyRange keys = visible(start + r);
      weigh(weights_ + r * kTile, 1, values_, head_dim_, keys.first, keys.end,
            sums + static_cast<int64_t>(r) * padded(head_dim_));
    }
  }

 private:
  int head_dim_, rows_ = 0;
  bool single_ = false, direct_ = false, finite_ = false;
  const TileRows* tile_ = nullptr;
  Fetch* fetch_ = nullptr;
  float* queries_;  // [R, D]
  float* keys_;     // a packed tile
  float* values_;   // a packed tile
  float* weights_;  // [R, kTile]
};

}  // namespace kv8::KV8_ISA
