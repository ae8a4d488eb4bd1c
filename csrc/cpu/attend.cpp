// Attention over stored codes: decode, chunked prefill and any mixture, by pieces (plan.h) of tiles
// (tile.h). Compiled once for each instruction set.
#include "plan.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kv8::KV8_ISA {
namespace {

alignas(64) const uint8_t kZeros[4 * kMaxHeadDim] = {};

int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Hands out 64-byte aligned parts of a memory; counts only if there is none.
struct Arena {
  uint8_t* memory;
  int64_t used = 0;

  template <class T>
  T* take(int64_t count) {
    T* taken = memory == nullptr ? nullptr : reinterpret_cast<T*>(memory + used);
    used += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
    return taken;
  }
};

// One thread's memory for a piece of up to R rows.
struct Workspace {
  float* queries;      // [R, D]
  float* multipliers;  // [R], from a dot product to a logit
  float* keys;         // a packed tile
  float* values;       // a packed tile
  float* dots;         // [R, kTile], then softmax weights
  float* part;         // Sums of the current split
  float* total;        // Sums of all splits before it

  Workspace(Arena& arena, int rows, int head_dim)
      : queries(arena.take<float>(static_cast<int64_t>(rows) * head_dim)),
        multipliers(arena.take<float>(rows)),
        keys(arena.take<float>(static_cast<int64_t>(kTile) * head_dim)),
        values(arena.take<float>(static_cast<int64_t>(kTile) * padded(head_dim))),
        dots(arena.take<float>(static_cast<int64_t>(kTile) * rows)),
        part(arena.take<float>(Sums::floats(rows, head_dim))),
        total(arena.take<float>(Sums::floats(rows, head_dim))) {}
};

template <class Code>
class Attention {
 public:
  Attention(const kv8_attend& attend, const Plan& plan)
      : a_(attend), cache_(*attend.cache), plan_(plan), head_dim_(attend.cache->head_dim) {
    logits_.round_weights = attend.q_scale != nullptr;
    logits_.cap = attend.softcap * kLog2E;
  }

  // What a piece's rows sum up to: split by split into `records` if other pieces have their share,
  // else finished to the output. `maxima` [R] are the rows' known maxima, or null.
  void attend(const Piece& piece, const Workspace& work, float* records, const float* maxima) const {
    const int rows = num_rows(piece);
    const bool alone = records == nullptr;
    pack_queries(piece, work);
    Sums part(alone ? work.part : records, rows, head_dim_);
    const Sums total(work.total, rows, head_dim_);
    start_sums(part, rows, maxima);
    if (alone) start_sums(total, rows, maxima);
    for_tiles(piece, [&](int first_key, const TileRows& tile, const TileRows& next) {
      add_tile(piece, work, first_key, tile, next, part);
      const int end_key = first_key + kTile;
      if (end_key % kSplit != 0 || end_key >= piece.end_key) return;
      if (alone) {
        merge(total, part, rows, head_dim_);
      } else {
        records += record_floats();
        part = Sums(records, rows, head_dim_);
      }
      start_sums(part, rows, maxima);
    });
    if (alone) {
      merge(total, part, rows, head_dim_);
      finish(piece, total);
    }
  }

  // The maxima of a piece's rows over its keys, whole numbers; [R].
  void find_maxima(const Piece& piece, const Workspace& work, float* maxima) const {
    const int rows = num_rows(piece);
    pack_queries(piece, work);
    for (int r = 0; r < rows; ++r) maxima[r] = kNoMaximum;
    for_tiles(piece, [&](int first_key, const TileRows& tile, const TileRows& next) {
      multiply_keys(piece, work, tile, next);
      for (int r = 0; r < rows; ++r) {
        const Visible visible = visible_to(piece, r, first_key, tile);
        F32 unused[kTile / kLanes];
        const float largest = __builtin_ceilf(
            row_logits(work.dots + r * kTile, work.multipliers[r], logits_, visible.first,
                       visible.end, unused));
        if (largest > maxima[r]) maxima[r] = largest;
      }
    });
  }

  // Merge the records of a group in the order of their keys, and write the output.
  void finish_group(const Piece& first, float* records, const Workspace& work) const {
    const int rows = num_rows(first);
    const Sums total(work.total, rows, head_dim_);
    total.clear(rows, head_dim_);
    for (int i = 0; i < first.num_records; ++i)
      merge(total, Sums(records + i * record_floats(), rows, head_dim_), rows, head_dim_);
    finish(first, total);
  }

  int64_t record_floats() const { return (Sums::floats(plan_.max_rows(), head_dim_) + 15) / 16 * 16; }
  int num_rows(const Piece& piece) const { return piece.num_tokens * plan_.queries_per_kv; }

 private:
  struct Visible {
    int first, end;
  };

  // Row r of a piece: token r / G, head r % G of its kv head.
  int64_t token_row(const Piece& piece, int r) const {
    return a_.query_starts[piece.sequence] + piece.first_token + r / plan_.queries_per_kv;
  }
  int head(const Piece& piece, int r) const {
    return piece.kv_head * plan_.queries_per_kv + r % plan_.queries_per_kv;
  }

  // Keys of a tile that row r sees, counted from the tile's first.
  Visible visible_to(const Piece& piece, int r, int first_key, const TileRows& tile) const {
    const int position =
        plan_.position(piece.sequence, piece.first_token + r / plan_.queries_per_kv);
    const int first = plan_.first_visible(position) - first_key, end = position + 1 - first_key;
    return {first > tile.first ? first : tile.first, end < tile.end ? end : tile.end};
  }

  void start_sums(const Sums& sums, int rows, const float* maxima) const {
    sums.clear(rows, head_dim_);
    if (maxima != nullptr) std::memcpy(sums.maxima, maxima, sizeof(float) * static_cast<size_t>(rows));
  }

  // Widen a piece's query rows, rounded to e4m3 codes in FP8 attention.
  void pack_queries(const Piece& piece, const Workspace& work) const {
    for (int r = 0; r < num_rows(piece); ++r) {
      const int h = head(piece, r);
      const uint8_t* row = static_cast<const uint8_t*>(a_.query.data) +
                           token_row(piece, r) * a_.query.token_stride + h * a_.query.head_stride;
      float multiplier = a_.softmax_scale;
      if (cache_.k_scale != nullptr) multiplier *= cache_.k_scale[piece.kv_head];
      if (a_.q_scale != nullptr) multiplier *= a_.q_scale[h];
      work.multipliers[r] = a_.softcap != 0.0f ? multiplier / a_.softcap : multiplier * kLog2E;
      float* out = work.queries + static_cast<int64_t>(r) * head_dim_;
      widen_row(row, out);
      if (a_.q_scale == nullptr) continue;
      for (int d = 0; d < head_dim_; ++d)
        out[d] = E4M3::decode(E4M3::encode_saturating(out[d] / a_.q_scale[h]));
    }
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

  // Call work(position of the tile's first key, the tile, the one after it) for a piece's tiles.
  template <class Work>
  void for_tiles(const Piece& piece, Work&& work) const {
    TileRows tiles[2];
    const int first = piece.first_key / kTile, last = (piece.end_key - 1) / kTile;
    locate(piece, first * kTile, tiles[first & 1]);
    for (int t = first; t <= last; ++t) {
      if (t < last) locate(piece, (t + 1) * kTile, tiles[(t + 1) & 1]);
      work(t * kTile, tiles[t & 1], tiles[(t < last ? t + 1 : t) & 1]);
    }
  }

  void locate(const Piece& piece, int first_key, TileRows& tile) const {
    const int32_t* table = a_.block_table + piece.sequence * a_.table_width;
    const int64_t row_bytes = head_dim_ * static_cast<int64_t>(sizeof(typename Code::Code));
    tile.first = piece.first_key > first_key ? piece.first_key - first_key : 0;
    tile.end = piece.end_key - first_key < kTile ? piece.end_key - first_key : kTile;
    for (int i = 0; i < tile.first; ++i) tile.k[i] = tile.v[i] = kZeros;
    for (int i = tile.end; i < kTile; ++i) tile.k[i] = tile.v[i] = kZeros;
    int i = tile.first;
    while (i < tile.end) {
      const int64_t block = table[(first_key + i) / cache_.block_size];
      int offset = (first_key + i) % cache_.block_size;
      const int64_t in_block =
          (static_cast<int64_t>(piece.kv_head) * cache_.block_size + offset) * row_bytes;
      const uint8_t* k =
          static_cast<const uint8_t*>(cache_.k_codes) + block * cache_.k_block_stride + in_block;
      const uint8_t* v =
          static_cast<const uint8_t*>(cache_.v_codes) + block * cache_.v_block_stride + in_block;
      for (; offset < cache_.block_size && i < tile.end; ++offset, ++i) {
        tile.k[i] = k, tile.v[i] = v;
        k += row_bytes, v += row_bytes;
      }
    }
  }

  void multiply_keys(const Piece& piece, const Workspace& work, const TileRows& tile,
                     const TileRows& next) const {
    pack_keys<Code>(tile, next, head_dim_, work.keys);
    dot_products(work.queries, num_rows(piece), work.keys, head_dim_, work.dots);
  }

  void add_tile(const Piece& piece, const Workspace& work, int first_key, const TileRows& tile,
                const TileRows& next, const Sums& sums) const {
    const int rows = num_rows(piece);
    multiply_keys(piece, work, tile, next);
    for (int r = 0; r < rows; ++r) {
      const Visible visible = visible_to(piece, r, first_key, tile);
      soften(work.dots + r * kTile, work.multipliers[r], logits_, visible.first, visible.end, sums,
             r, head_dim_);
    }
    if (piece.num_tokens == 1 && rows <= kDirectRows) {
      weigh_direct<Code>(work.dots, rows, tile, next, head_dim_, sums.values);
    } else if (pack_values<Code>(tile, next, head_dim_, work.values) || piece.num_tokens == 1) {
      weigh(work.dots, rows, work.values, head_dim_, tile.first, tile.end, sums.values);
    } else {
      // A value that is no finite number must not reach rows that do not see it.
      for (int r = 0; r < rows; ++r) {
        const Visible visible = visible_to(piece, r, first_key, tile);
        weigh(work.dots + r * kTile, 1, work.values, head_dim_, visible.first, visible.end,
              sums.values + static_cast<int64_t>(r) * padded(head_dim_));
      }
    }
  }

  // Divide by the softmax's denominator, put values in order, and write them.
  void finish(const Piece& piece, const Sums& sums) const {
    for (int r = 0; r < num_rows(piece); ++r) {
      const int h = head(piece, r);
      float weight = 0.0f;
      for (int i = 0; i < kLanes; ++i) weight += sums.weights[r * kLanes + i];
      if (a_.sinks != nullptr) weight += __builtin_exp2f(a_.sinks[h] * kLog2E - sums.maxima[r]);
      if (logits_.round_weights) weight *= kWeightSteps;
      const float v_scale = cache_.v_scale == nullptr ? 1.0f : cache_.v_scale[piece.kv_head];
      const float* row = sums.values + static_cast<int64_t>(r) * padded(head_dim_);
      float values[kMaxHeadDim];
      for (int d = 0; d < head_dim_; ++d)
        values[d] = row[lane_of(d, Code::kCodesPerWord)] / weight * v_scale;
      write(values, static_cast<uint8_t*>(a_.output.data) +
                        token_row(piece, r) * a_.output.token_stride + h * a_.output.head_stride);
    }
  }

  void write(const float* values, uint8_t* out) const {
    switch (static_cast<Format>(a_.output.dtype)) {
      case Format::kBFloat16: return write_as<BFloat16>(values, out);
      case Format::kFloat16: return write_as<Float16>(values, out);
      default: return write_as<Float32>(values, out);
    }
  }

  template <class To>
  void write_as(const float* values, uint8_t* out) const {
    for (int d = 0; d < head_dim_; ++d) {
      const auto code = static_cast<typename To::Code>(To::encode(values[d]));
      std::memcpy(out + d * sizeof code, &code, sizeof code);
    }
  }

  const kv8_attend& a_;
  const kv8_cache& cache_;
  const Plan& plan_;
  const int head_dim_;
  Logits logits_;
};

// Everything a call writes but its output, laid out in the scratch memory.
struct Scratch {
  int64_t workspace_bytes;  // of one thread
  uint8_t* workspaces;
  Piece* pieces;
  float* records;        // Sums of each split whose sums are merged at the end
  float* piece_maxima;   // [pieces, R], FP8 attention only
  float* group_maxima;   // the same, over a piece's whole group
  int64_t bytes;

  Scratch(uint8_t* memory, const Plan& plan, int head_dim, int64_t record_floats, int num_threads,
          bool maxima) {
    const int rows = plan.max_rows();
    Arena counted{nullptr}, arena{memory};
    (void)Workspace(counted, rows, head_dim);
    workspace_bytes = counted.used;
    workspaces = arena.take<uint8_t>(workspace_bytes * num_threads);
    pieces = arena.take<Piece>(plan.num_pieces);
    records = arena.take<float>(plan.num_records * record_floats);
    piece_maxima = arena.take<float>(maxima ? plan.num_pieces * rows : 0);
    group_maxima = arena.take<float>(maxima ? plan.num_pieces * rows : 0);
    bytes = arena.used;
  }
};

template <class Code>
int64_t run(const kv8_attend& attend, int num_threads) {
  Plan plan(attend);
  plan.fit(num_threads);
  plan.make(nullptr);
  const Attention<Code> attention(attend, plan);
  const int rows = plan.max_rows(), head_dim = attend.cache->head_dim;
  // FP8 attention rounds a row's weights relative to its maximum, which must be the final one.
  const bool maxima_first = attend.q_scale != nullptr;
  const Scratch scratch(static_cast<uint8_t*>(attend.scratch), plan, head_dim,
                        attention.record_floats(), num_threads, maxima_first);
  if (scratch.bytes > attend.scratch_bytes) return scratch.bytes;
  const Piece* pieces = scratch.pieces;
  plan.make(scratch.pieces);
  auto records_of = [&](const Piece& piece) {
    return scratch.records + piece.first_record * attention.record_floats();
  };

#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Arena arena{scratch.workspaces + scratch.workspace_bytes * thread_number()};
    const Workspace work(arena, rows, head_dim);
    if (maxima_first) {
#pragma omp for schedule(dynamic, 1)
      for (int64_t i = 0; i < plan.num_pieces; ++i)
        attention.find_maxima(pieces[i], work, scratch.piece_maxima + i * rows);
#pragma omp for schedule(static)
      for (int64_t i = 0; i < plan.num_pieces; ++i) {
        const float* of_pieces = scratch.piece_maxima + pieces[i].first_of_group * rows;
        for (int r = 0; r < attention.num_rows(pieces[i]); ++r) {
          float largest = kNoMaximum;
          for (int j = 0; j < pieces[i].num_pieces; ++j)
            if (of_pieces[j * rows + r] > largest) largest = of_pieces[j * rows + r];
          scratch.group_maxima[i * rows + r] = largest;
        }
      }
    }
#pragma omp for schedule(dynamic, 1)
    for (int64_t i = 0; i < plan.num_pieces; ++i) {
      attention.attend(pieces[i], work, pieces[i].num_records == 0 ? nullptr : records_of(pieces[i]),
                       maxima_first ? scratch.group_maxima + i * rows : nullptr);
    }
#pragma omp for schedule(static)
    for (int64_t i = 0; i < plan.num_pieces; ++i) {
      if (pieces[i].num_records > 0 && pieces[i].first_of_group == i)
        attention.finish_group(pieces[i], records_of(pieces[i]), work);
    }
  }
  return 0;
}

}  // namespace

int64_t attend(const kv8_attend& attend, int num_threads) {
  if (attend.num_sequences == 0) return 0;
  if (const int64_t wrong = Plan(attend).check(); wrong != 0) return wrong;
  int64_t result = 0;
  with_format(static_cast<Format>(attend.cache->format), [&](auto format) {
    result = run<decltype(format)>(attend, num_threads);
  });
  return result;
}

}  // namespace kv8::KV8_ISA
