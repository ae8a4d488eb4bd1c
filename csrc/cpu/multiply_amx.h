// Products of rows with a tile on the matrix unit (AMX).
#pragma once

#include "amx.h"
#include "blocks.h"

namespace kv8::KV8_ISA {

class Multiplier {
 public:
  static constexpr int kBlockRows = 16;
  struct Session {
    Session() = default;
    Session(const Session&) = delete;
    Session& operator=(const Session&) = delete;
    ~Session() { amx::release(); }
  };

  // Rows go through in blocks; what lies in rows of `a` and `sums` beyond the last is computed with,
  // and of no consequence.
  void begin() { amx::configure(); }

  // As in multiply_vectors.h.
  void multiply(const uint32_t* a, int64_t a_stride, int parts, int, const uint32_t* b, int groups,
                int pairs, float* sums, int64_t stride, bool add) const {
    with_count<3>(parts, [&](auto num_parts) {
      for (int g = 0; g < groups; g += kColumns) {
        with_count<kColumns>(groups - g, [&](auto num_columns) {
          constexpr int n = num_parts, m = num_columns;
          block<n, m>(a, 4 * a_stride, b + g * pairs * kLanes, pairs, sums + g * kLanes, stride, add);
        });
      }
    });
  }

 private:
  // Tiles 0 to 3 are sums, 4 holds columns, 5 to 7 rows.
  template <int n, int m>
  static void block(const uint32_t* a, int64_t a_bytes, const uint32_t* b, int pairs, float* sums,
                    int64_t stride, bool add) {
    for_each<m>([&](auto c) {
      if (add) amx::load<c>(sums + c * kLanes, 4 * stride);
      else amx::zero<c>();
    });
    for (int pair = 0; pair < pairs; pair += 16) {
      for_each<n>([&](auto part) { amx::load<5 + part>(a + part * pairs + pair, a_bytes); });
      for_each<m>([&](auto c) {
        amx::load<4>(b + (c * pairs + pair) * kLanes, 64);
        for_each<n>([&](auto part) { amx::multiply<c, 5 + part, 4>(); });
      });
    }
    for_each<m>([&](auto c) { amx::store<c>(sums + c * kLanes, 4 * stride); });
  }
};

}  // namespace kv8::KV8_ISA
