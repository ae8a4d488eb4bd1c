// The attention of one piece (plan.h) of a batch: its queries, its tiles, its output.
#pragma once

#include "walk.h"
#include "workspace.h"
#include "write_values.h"

namespace kv8::KV8_ISA {

template <class Code>
class Attention {
 public:
  // Rows of a head that is read together with others go through a tile in one block, or sums computed
  // beyond its last row would be those of the next head.
  static_assert(kFewRows <= Products<Code>::kBlockRows);

  Attention(const kv8_attend& attend, const Plan& plan)
      : a_(attend), cache_(*attend.cache), plan_(plan), head_dim_(attend.cache->head_dim),
        walk_(attend, Workspace<Code>::row_bytes(*attend.cache)) {
    logits_.rounding = attend.q_scale != nullptr ? Rounding::kE4M3
                       : Products<Code>::kTakesParts && parts(attend).weight == 1
                           ? Rounding::kBFloat16
                           : Rounding::kNone;
    logits_.cap = attend.softcap * kLog2E;
    order_values(static_cast<Format>(attend.output.dtype), head_dim_, Products<Code>::lane_of,
                 lanes_);
  }

  // As many as the query's type has digits for, which is the output's, too; what was rounded to e4m3
  // is one bfloat16 number.
  static Parts parts(const kv8_attend& attend) {
    if (attend.q_scale != nullptr) return {1, 1};
    switch (static_cast<Format>(attend.query.dtype)) {
      case Format::kBFloat16: return {1, 1};
      case Format::kFloat16: return {2, 2};
      default: return {3, 3};
    }
  }

  // What a piece's rows sum up to: split by split into `records` if other pieces have their share,
  // else finished to the output. `maxima` [R] are the rows' known maxima, or null.
  void attend(const Piece& piece, const Piece& next_piece, Workspace<Code>& work, float* records,
              const float* maxima) const {
    const int rows = plan_.num_rows(piece);
    const bool alone = records == nullptr;
    pack_queries(piece, work);
    Sums part(alone ? work.part : records, rows, head_dim_);
    const Sums total(work.total, rows, head_dim_);
    start_sums(work, part, rows, maxima);
    if (alone) {
      total.clear(rows, head_dim_);
      set_maxima(total, rows, maxima);
    }
    auto end_tile = [&](const Tile& tile) {
      const int end_key = tile.first_key + kTile;
      if (tile.head + 1 < piece.num_kv_heads || end_key % kSplit != 0 || end_key >= piece.end_key)
        return;
      if (alone) {
        merge(total, part, rows, head_dim_);
      } else {
        records += record_floats();
        part = Sums(records, rows, head_dim_);
      }
      start_sums(work, part, rows, maxima);
    };
    walk_.for_tiles(piece, next_piece, work.fetch, [&](const Tile& tile) {
      add_tile(piece, work, tile, part);
      end_tile(tile);
    });
    if (alone) {
      merge(total, part, rows, head_dim_);
      finish(piece, total);
    }
  }

  // The maxima of a piece's rows over its keys, whole numbers; [R].
  void find_maxima(const Piece& piece, const Piece& next_piece, Workspace<Code>& work,
                   float* maxima) const {
    const int rows = plan_.num_rows(piece);
    pack_queries(piece, work);
    for (int r = 0; r < rows; ++r) maxima[r] = kNoMaximum;
    walk_.for_tiles(piece, next_piece, work.fetch, [&](const Tile& tile) {
      work.products.load_keys(tile.rows, work.fetch);
      const int of_head = plan_.rows_of_head(piece);
      for_blocks(tile.head * of_head, of_head, [&](int start, int count) {
        if (sees_none(work.visible + start, count, tile)) return;
        work.products.multiply_keys(start, count, work.dots);
        const bool as_they_are = plain(work, start, count, tile);
        for_maxima(work, start, count, tile, as_they_are, [&](int r, int some, F32 vector) {
          float largest[kLanes];
          store(largest, ceiling(vector));
          for (int i = 0; i < some; ++i)
            if (largest[i] > maxima[r + i]) maxima[r + i] = largest[i];
        });
      });
    });
  }

  // Merge the records of a group in the order of their keys, and write the output.
  void finish_group(const Piece& first, float* records, Workspace<Code>& work) const {
    const int rows = plan_.num_rows(first);
    const Sums total(work.total, rows, head_dim_);
    total.clear(rows, head_dim_);
    for (int i = 0; i < first.num_records; ++i)
      merge(total, Sums(records + i * record_floats(), rows, head_dim_), rows, head_dim_);
    finish(first, total);
  }

  int64_t record_floats() const { return (Sums::floats(plan_.max_rows, head_dim_) + 15) / 16 * 16; }

 private:
  static constexpr int kTokensAhead = 8;  // whose queries are fetched while others are packed

  void start_sums(const Workspace<Code>& work, const Sums& sums, int rows,
                  const float* maxima) const {
    if (work.products.overwrites()) sums.clear_weights(rows);
    else sums.clear(rows, head_dim_);
    set_maxima(sums, rows, maxima);
  }
  void set_maxima(const Sums& sums, int rows, const float* maxima) const {
    if (maxima != nullptr) std::memcpy(sums.maxima, maxima, sizeof(float) * static_cast<size_t>(rows));
  }

  // Note what a piece's rows see, and widen its queries, rounded to e4m3 codes in FP8 attention.
  void pack_queries(const Piece& piece, Workspace<Code>& work) const {
    work.products.begin(plan_.rows_of_head(piece), piece.num_tokens == 1);
    plan_.for_rows(piece, [&](int r, int kv_head, int token, int head) {
      const int position = plan_.position(piece.sequence, token);
      work.visible[r] = {plan_.first_visible(position), position + 1};
      float multiplier = a_.softmax_scale;
      if (cache_.k_scale != nullptr) multiplier *= cache_.k_scale[kv_head];
      if (a_.q_scale != nullptr) multiplier *= a_.q_scale[head];
      work.multipliers[r] = a_.softcap != 0.0f ? multiplier / a_.softcap : multiplier * kLog2E;
      const uint8_t* row = row_of(a_.query, piece, token, head);
      prefetch_near(row + kTokensAhead * a_.query.token_stride);
      if constexpr (Products<Code>::kTakesParts)
        if (logits_.rounding == Rounding::kBFloat16) return work.products.copy_query(r, row);
      float out[kMaxHeadDim];
      widen_row(row, out);
      for (int d = 0; d < head_dim_ && a_.q_scale != nullptr; ++d)
        out[d] = E4M3::decode(E4M3::encode_saturating(out[d] / a_.q_scale[head]));
      work.products.set_query(r, out);
    });
  }

  void widen_row(const uint8_t* row, float* out) const {
    with_format(static_cast<Format>(a_.query.dtype), [&](auto format) {
      using From = decltype(format);
      for (int d = 0; d < head_dim_; ++d) {
        typename From::Code code;
        std::memcpy(&code, row + static_cast<size_t>(d) * sizeof code, sizeof code);
        out[d] = From::decode(code);
      }
    });
  }

  // Call work(first row, how many) for the rows that go through a tile together.
  template <class Work>
  static void for_blocks(int first, int rows, Work&& work) {
    constexpr int kMost = Products<Code>::kBlockRows;
    for (int i = 0; i < rows; i += kMost) work(first + i, min(rows - i, kMost));
  }

  // Whether logits of rows start <= r < start + count are their dot products times multipliers and
  // nothing else, and the largest are those of the largest dot products.
  bool plain(const Workspace<Code>& work, int start, int count, const Tile& tile) const {
    return logits_.cap == 0.0f && a_.softmax_scale > 0.0f &&
           visible_in(work.visible[start], tile).end >= kTile &&
           visible_in(work.visible[start + count - 1], tile).first <= 0;
  }

  // Find the largest logits of rows start <= r < start + count, and call work(first row, how many,
  // their maxima) for each vector of rows, so that they need not wait for each other. Unless they
  // are plain, the logits replace the dot products.
  template <class Work>
  void for_maxima(Workspace<Code>& work, int start, int count, const Tile& tile, bool plain,
                  Work&& each) const {
    for (int first = 0; first < count; first += kLanes) {
      const int some = min(count - first, kLanes);
      F32 largest[kLanes];
      for (int i = 0; i < some; ++i) {
        const int r = start + first + i;
        float* dots = work.dots + (first + i) * kTile;
        if (plain) {
          largest[i] = largest_of(dots);
          continue;
        }
        TileOfWeights x;
        largest[i] = logits_of(work, r, first + i, tile, x);
        for (int j = 0; j < kTile / kLanes; ++j) store(dots + j * kLanes, x[j]);
      }
      for (int i = some; i < kLanes; ++i) largest[i] = splat(kNoMaximum);
      F32 maxima = row_maxima(largest);
      if (plain) maxima = maxima * load(work.multipliers + start + first);
      each(start + first, some, maxima);
    }
  }

  // Add a tile to the sums of a head's rows.
  void add_tile(const Piece& piece, Workspace<Code>& work, const Tile& tile,
                const Sums& sums) const {
    auto visible = [&](int r) { return visible_in(work.visible[r], tile); };
    const bool fresh = tile.first_key % kSplit == 0 || tile.first_key <= piece.first_key;
    work.products.load_keys(tile.rows, work.fetch);
    const int first = tile.head * plan_.rows_of_head(piece);
    bool loaded = false;
    for_blocks(first, plan_.rows_of_head(piece), [&](int start, int count) {
      if (sees_none(work.visible + start, count, tile)) {
        if (fresh && work.products.overwrites()) sums.clear_values(start, count, head_dim_);
        return;
      }
      work.products.multiply_keys(start, count, work.dots);
      // Here, because a matrix unit multiplies meanwhile.
      if (!loaded) work.products.load_values(tile.rows, work.fetch);
      loaded = true;
      with_rounding(logits_.rounding, [&](auto rounding) {
        if (count <= 4) weigh_few<rounding>(work, start, count, tile, sums);
        else weigh<rounding>(work, start, count, tile, sums);
      });
      work.products.add_values(start, count, visible, sums.values, fresh);
    });
  }

  // Turn the dot products of rows start <= r < start + count into weights.
  template <Rounding kRounding>
  void weigh(Workspace<Code>& work, int start, int count, const Tile& tile, const Sums& sums) const {
    const bool as_they_are = plain(work, start, count, tile);
    for_maxima(work, start, count, tile, as_they_are, [&](int r, int some, F32 largest) {
      const F32 maxima = next_maximum<kRounding>(largest);
      if (any_greater(maxima, load(sums.maxima + r))) raise_some(sums, r, some, head_dim_, maxima);
    });
    for (int i = 0; i < count; ++i) {
      const int r = start + i;
      TileOfWeights x;
      times(work.dots + i * kTile, as_they_are ? work.multipliers[r] : 1.0f, x);
      soften<kRounding>(sums, r, x);
      work.products.set_weights(i, x);
      work.products.prefetch_next(r, sums.values);
    }
  }

  // The same for so few rows that their logits stay in registers.
  template <Rounding kRounding>
  void weigh_few(Workspace<Code>& work, int start, int count, const Tile& tile,
                 const Sums& sums) const {
    for (int i = 0; i < count; ++i) {
      TileOfWeights x;
      const float logit = reduce_max(logits_of(work, start + i, i, tile, x));
      constexpr float kStep = kMaximumStep<kRounding>;
      const float largest = kStep * __builtin_ceilf(logit / kStep);
      if (largest > sums.maxima[start + i]) raise(sums, start + i, head_dim_, largest);
      soften<kRounding>(sums, start + i, x);
      work.products.set_weights(i, x);
    }
  }

  // The logits of row r, which is row i of its block.
  KV8_INLINE F32 logits_of(const Workspace<Code>& work, int r, int i, const Tile& tile,
                           TileOfWeights& x) const {
    return row_logits(work.dots + i * kTile, work.multipliers[r], logits_,
                      visible_in(work.visible[r], tile), x);
  }

  // Divide by the softmax's denominator, put values in order, and write them.
  void finish(const Piece& piece, const Sums& sums) const {
    float weights[kLanes];
    const int rows = plan_.num_rows(piece);
    plan_.for_rows(piece, [&](int r, int kv_head, int token, int head) {
      if (r % kLanes == 0) store(weights, row_sums(sums.weights + r * kLanes, rows - r));
      float weight = weights[r % kLanes];
      if (a_.sinks != nullptr) weight += __builtin_exp2f(a_.sinks[head] * kLog2E - sums.maxima[r]);
      if (logits_.rounding == Rounding::kE4M3) weight *= kWeightSteps;
      const float v_scale = cache_.v_scale == nullptr ? 1.0f : cache_.v_scale[kv_head];
      const float* row = sums.values + static_cast<int64_t>(r) * padded(head_dim_);
      float values[kMaxHeadDim];
      for (int i = 0; i < padded(head_dim_); i += kLanes)
        store(values + i, load(row + i) / splat(weight) * splat(v_scale));
      write_values(values, lanes_, head_dim_, static_cast<Format>(a_.output.dtype),
                   row_of(a_.output, piece, token, head));
    });
  }

  // Where a token's query or output lies.
  uint8_t* row_of(const kv8_rows& rows, const Piece& piece, int token, int head) const {
    const int64_t row = a_.query_starts[piece.sequence] + token;
    return static_cast<uint8_t*>(rows.data) + row * rows.token_stride + head * rows.head_stride;
  }

  const kv8_attend& a_;
  const kv8_cache& cache_;
  const Plan& plan_;
  const int head_dim_;
  const Walk walk_;
  Logits logits_;
  int32_t lanes_[kMaxHeadDim] = {};  // where the values of a row of sums lie: write_values.h
};

}  // namespace kv8::KV8_ISA
