// Products of few rows with a tile on the matrix unit, fetching meanwhile.
//
// Keys are the rows of a product and queries its columns. So keys need not be turned, and those stored
// as bfloat16 are read where they lie; what is turned instead are the dot products, of which there are
// few. All sums are formed in the same order as those of many rows (multiply_amx.h), to the bit.
#pragma once

#include "amx.h"
#include "pair_keys.h"

namespace kv8::KV8_ISA {

template <class Code>
class FewRows {
  static constexpr int kPairs = PairOrder<Code>::kPairs, kKeyPairs = kTile / 2;

 public:
  static constexpr bool kThere = true;

  FewRows(const PairOrder<Code>& order, uint32_t* memory) : order_(order), memory_(memory) {}

  // This many rows follow: their queries as columns [parts][pairs][rows]. Tiles 0 and 1 are dot
  // products, 2 holds queries, 3 keys or values, 4 and 5 are sums, 7 holds weights.
  void begin(int rows) {
    rows_ = rows;
    amx::Shapes shapes;
    for (int i = 0; i < 8; ++i) {
      if (i < 3) shapes.set(i, 16, rows);
      else shapes.set(i, i == 3 ? 16 : rows, 16);
    }
    amx::configure(shapes);
    if (order_.pairs > order_.words * kPairs)
      std::memset(memory_, 0, sizeof(uint32_t) * static_cast<size_t>(kTile * order_.pairs));
  }

  void pack_keys(const TileRows& tile, Fetch& fetch) {
    alignas(64) uint8_t spare[kMostRunBytes];
    for (int i = 0; i < kRuns; ++i) {
      Run& run = runs_[i];
      if (kPairs == 1 && order_.head_dim % 32 == 0 && tile.k.runs[i] != nullptr) {
        run = {tile.k.runs[i], tile.k.row_bytes};
        for (int step = 0; step < 4; ++step) fetch.step();
        continue;
      }
      uint32_t* out = memory_ + i * kRunRows * order_.pairs;
      run = {reinterpret_cast<const uint8_t*>(out), order_.pairs * 4};
      const uint8_t* rows = tile.k.run(i, spare);
      with_vectors(tile.k.row_bytes, [&](auto vectors) { widen<vectors>(rows, out, fetch); });
    }
  }

  // Dot products with `queries`, [rows][kTile].
  void multiply_keys(const uint32_t* queries, int parts, float* dots, Fetch& fetch) const {
    alignas(64) float products[kTile * kLanes];
    const int stride = rows_ <= 4 ? 4 : kLanes;
    with_vectors(order_.row_bytes(), [&](auto vectors) {
      if (vectors > 0 && parts == 1) dot_products<vectors, 1>(queries, 1, products, stride, fetch);
      else dot_products<0, 0>(queries, parts, products, stride, fetch);
    });
    for (int key = 0; key < kTile; key += kRunRows) {
      if (stride == 4) turn_quads(products + key * stride, dots + key);
      else turn(products + key * stride, dots + key);
    }
  }

  // Add the first `parts` of `weights` [rows][all parts][pairs of keys] times `values` [groups]
  // [pairs of keys][16] to `sums` [rows][stride].
  void add_values(const uint32_t* weights, int parts, int all_parts, const uint32_t* values,
                  int groups, float* sums, int64_t stride, Fetch& fetch) const {
    for (int g = 0; g < groups; g += 2, values += 2 * kKeyPairs * kLanes, sums += 2 * kLanes) {
      if (all_parts == 1) add_two<1>(weights, 1, 1, values, sums, stride, fetch);
      else add_two<0>(weights, parts, all_parts, values, sums, stride, fetch);
    }
  }

 private:
  struct Run {
    const uint8_t* first;
    int64_t stride;
  };

  // Rows of so many vectors and queries of so many parts, if that is known.
  template <int kVectors, int kParts>
  void dot_products(const uint32_t* queries, int parts, float* products, int64_t stride,
                    Fetch& fetch) const {
    const int pairs = kVectors > 0 ? kVectors * kLanes * kPairs : order_.pairs;
    if (kParts > 0) parts = kParts;
    for (int i = 0; i < kRuns; i += 2) {
      const Run &a = runs_[i], &b = runs_[i + 1];
      amx::zero<0>(), amx::zero<1>();
      for (int pair = 0; pair < pairs; pair += 16) {
        for (int part = 0; part < parts; ++part) {
          amx::load<2>(queries + (part * pairs + pair) * rows_, 4 * rows_);
          amx::load<3>(a.first + 4 * pair, a.stride), amx::multiply<0, 3, 2>();
          fetch.step();
          amx::load<3>(b.first + 4 * pair, b.stride), amx::multiply<1, 3, 2>();
          fetch.step();
        }
      }
      amx::store<0>(products + i * kRunRows * stride, 4 * stride);
      amx::store<1>(products + (i + 1) * kRunRows * stride, 4 * stride);
    }
  }

  template <int kParts>
  static void add_two(const uint32_t* weights, int parts, int all_parts, const uint32_t* values,
                      float* sums, int64_t stride, Fetch& fetch) {
    if (kParts > 0) parts = all_parts = kParts;
    const int64_t row_bytes = static_cast<int64_t>(all_parts) * kKeyPairs * 4;
    amx::load<4>(sums, 4 * stride), amx::load<5>(sums + kLanes, 4 * stride);
    for (int pair = 0; pair < kKeyPairs; pair += 16) {
      amx::load<3>(values + pair * kLanes, 64);
      for (int part = 0; part < parts; ++part) {
        amx::load<7>(weights + part * kKeyPairs + pair, row_bytes), amx::multiply<4, 7, 3>();
        fetch.step();
      }
      amx::load<3>(values + (kKeyPairs + pair) * kLanes, 64);
      for (int part = 0; part < parts; ++part) {
        amx::load<7>(weights + part * kKeyPairs + pair, row_bytes), amx::multiply<5, 7, 3>();
        fetch.step();
      }
    }
    amx::store<4>(sums, 4 * stride), amx::store<5>(sums + kLanes, 4 * stride);
  }

  // Sixteen rows of so many vectors, if that is known, to pairs.
  template <int kVectors>
  void widen(const uint8_t* row, uint32_t* out, Fetch& fetch) const {
    const ToPairs<Code> to_pairs;
    const int words = kVectors > 0 ? kVectors * kLanes : order_.words;
    const int pairs = kVectors > 0 ? words * kPairs : order_.pairs, whole = words / kLanes * kLanes;
    for (int i = 0; i < kRunRows; ++i, row += words * 4, out += pairs) {
      if (i % 4 == 0) fetch.step();
      U32 two[kPairs];
      for (int word = 0; word < whole; word += kLanes) {
        to_pairs(load_words(row + 4 * word), two);
        for (int j = 0; j < kPairs; ++j) store_words(out + word * kPairs + j * kLanes, two[j]);
      }
      if (whole == words) continue;
      // What these leave beyond the row's end is zeros, and the next row's begin, written later.
      to_pairs(load_some(row + 4 * whole, words - whole), two);
      for (int j = 0; j < kPairs; ++j)
        store_words(out + whole * kPairs + j * (words - whole), two[j]);
    }
  }

  // Products [16 keys][4] to dots [query][kTile] of four queries, whether there are as many or not.
  static void turn_quads(const float* products, float* dots) {
    const U32 order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    F32 x[4], queries[4];
    for (int i = 0; i < 4; ++i) x[i] = load(products + i * kLanes);
    for (int i = 0; i < 4; i += 2) {
      queries[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
      queries[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
    }
    for (int r = 0; r < 4; ++r) {
      const __m512d a = _mm512_castps_pd(queries[r / 2]), b = _mm512_castps_pd(queries[r / 2 + 2]);
      const __m512d both = r % 2 == 0 ? _mm512_unpacklo_pd(a, b) : _mm512_unpackhi_pd(a, b);
      store(dots + r * kTile, _mm512_permutexvar_ps(order, _mm512_castpd_ps(both)));
    }
  }

  // Products [16 keys][16] to dots [query][kTile].
  void turn(const float* products, float* dots) const {
    const uint8_t* from[kLanes];
    for (int i = 0; i < kLanes; ++i)
      from[i] = reinterpret_cast<const uint8_t*>(products + i * kLanes);
    U32 turned[kLanes];
    load_transposed(from, rows_, turned);
    for (int r = 0; r < rows_; ++r) store(dots + r * kTile, float_of(turned[r]));
  }

  const PairOrder<Code> order_;
  uint32_t* memory_;  // widened rows [kTile][pairs], and room for a vector
  int rows_ = 0;
  Run runs_[kRuns] = {};
};

}  // namespace kv8::KV8_ISA
