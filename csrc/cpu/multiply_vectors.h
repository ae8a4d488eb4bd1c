// Products of rows with a tile by bfloat16 dot products of vectors (AVX512_BF16).
#pragma once

#include "blocks.h"
#include "pair_keys.h"

namespace kv8::KV8_ISA {

class Multiplier {
 public:
  static constexpr int kBlockRows = 16;
  struct Session {};

  void begin() {}

  // sums [R][stride] += a [R][a_stride] * b [groups][pairs][16], or = without `add`. Of each row of
  // a, `parts` times `pairs` words follow each other, each multiplied with all of b.
  void multiply(const uint32_t* a, int64_t a_stride, int parts, int rows, const uint32_t* b,
                int groups, int pairs, float* sums, int64_t stride, bool add) const {
    for (int g = 0; g < groups; g += kColumns) {
      with_count<kColumns>(groups - g, [&](auto num_columns) {
        in_blocks<kRows>(rows, [&](int start, auto num_rows) {
          constexpr int n = num_rows, m = num_columns;
          block<n, m>(a + start * a_stride, a_stride, parts, b + g * pairs * kLanes, pairs,
                      sums + start * stride + g * kLanes, stride, add);
        });
      });
    }
  }

 private:
  template <int n, int m>
  static void block(const uint32_t* a, int64_t a_stride, int parts, const uint32_t* b, int pairs,
                    float* sums, int64_t stride, bool add) {
    F32 sum[n][m];
    for (int r = 0; r < n; ++r)
      for (int c = 0; c < m; ++c)
        sum[r][c] = add ? load(sums + r * stride + c * kLanes) : splat(0.0f);
    for (int pair = 0; pair < pairs; ++pair) {
      U32 column[m];
      for (int c = 0; c < m; ++c)
        column[c] = load_words(b + (c * pairs + pair) * kLanes), pin(column[c]);
      for (int part = 0; part < parts; ++part)
        for (int r = 0; r < n; ++r) {
          const auto x = (__m512bh)splat_word(a[r * a_stride + part * pairs + pair]);
          for (int c = 0; c < m; ++c)
            sum[r][c] = _mm512_dpbf16_ps(sum[r][c], (__m512bh)column[c], x);
        }
    }
    for (int r = 0; r < n; ++r)
      for (int c = 0; c < m; ++c) store(sums + r * stride + c * kLanes, sum[r][c]);
  }
};

// Few rows are multiplied as many are; see few_rows_amx.h.
template <class Code>
struct FewRows {
  static constexpr bool kThere = false;
  FewRows(const PairOrder<Code>&, uint32_t*) {}
};

}  // namespace kv8::KV8_ISA
