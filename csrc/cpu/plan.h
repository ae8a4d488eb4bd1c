// How the attention of a batch is cut into pieces that threads take one by one.
//
// A sequence's new tokens are cut into blocks of rows. If there is just one block (decode, short
// chunks), its context is cut too: into runs of splits, each of which leaves a record of its sums,
// to be merged in order at the end. A longer chunk has blocks enough to keep threads busy. Where
// the cuts lie does not change any result.
#pragma once

#include "kernels.h"
#include "tile.h"

namespace kv8::KV8_ISA {

constexpr int kMostSplits = 4;   // of a piece, where a sequence has several
constexpr int kBlockRows = 768;  // rows that share one widened tile of keys and values
constexpr int kFewestBlockRows = 192;  // where there are too few blocks for the threads
constexpr int kFewRows = 16;     // rows of a head so few that reading its keys is the work

struct Piece {
  int32_t sequence;
  int32_t kv_head;      // the first
  int32_t num_kv_heads;
  int32_t first_token;  // of the sequence's new tokens
  int32_t num_tokens;
  int32_t first_key;  // positions, first_key <= key < end_key; visible to at least one token
  int32_t end_key;
  int64_t first_of_group;  // number of the first piece of the same rows and heads
  int32_t num_pieces;      // of the group
  int32_t next_piece;      // of the group: so many pieces further
  int32_t num_records;     // of the group; none if there is one piece: it finishes its rows itself
  int64_t first_record;    // of this piece
};

struct Plan {
  const kv8_attend& attend;
  const int queries_per_kv;
  int block_tokens = 1;
  int splits_per_piece = 1;
  bool heads_together = false;
  int max_rows = 0;
  int64_t num_pieces = 0, num_records = 0;

  explicit Plan(const kv8_attend& a)
      : attend(a),
        queries_per_kv(a.num_heads / a.cache->num_kv_heads) {}

  int num_new(int64_t s) const { return attend.query_starts[s + 1] - attend.query_starts[s]; }
  int position(int64_t s, int token) const { return attend.context_lens[s] - num_new(s) + token; }
  int first_visible(int position) const {
    return attend.window == 0 || position < attend.window ? 0 : position - attend.window + 1;
  }

  // 0, or what is wrong; see kernels.h. Reads no table entry that attention would not read.
  int64_t check() const {
    const kv8_cache& cache = *attend.cache;
    if (attend.query_starts[0] != 0) return -2;
    if (attend.query_starts[attend.num_sequences] != attend.num_tokens) return -2;
    for (int64_t s = 0; s < attend.num_sequences; ++s) {
      const int context = attend.context_lens[s];
      if (num_new(s) < 1 || num_new(s) > context) return -2;
      if (context > attend.table_width * cache.block_size) return -2;
      const int32_t* table = attend.block_table + s * attend.table_width;
      const int last = (context - 1) / cache.block_size;
      for (int i = first_visible(position(s, 0)) / cache.block_size; i <= last; ++i)
        if (table[i] < 0 || table[i] >= cache.num_blocks) return -1;
    }
    return 0;
  }

  // Choose how long pieces are: short enough to share the work out evenly, and otherwise long. A
  // block's heads lie side by side; where there is enough to do besides, one thread reads them all
  // tile by tile, so that memory is read in long runs.
  void fit(int num_threads) {
    for (int rows = kBlockRows; rows >= kFewestBlockRows; rows /= 2) {
      block_tokens = max(rows / queries_per_kv, 1);
      if (num_blocks() >= 8 * static_cast<int64_t>(num_threads)) break;
    }
    int64_t splits = 0;
    for (int64_t s = 0; s < attend.num_sequences; ++s)
      if (num_new(s) <= block_tokens) splits += attend.context_lens[s] / kSplit + 1;
    heads_together = splits >= 2 * static_cast<int64_t>(num_threads);
    if (!heads_together) splits *= attend.cache->num_kv_heads;
    const int64_t even = splits / (16 * static_cast<int64_t>(num_threads));
    splits_per_piece = even < 1 ? 1 : even > kMostSplits ? kMostSplits : static_cast<int>(even);
  }

  // Rows of a piece: KV head by KV head, token by token, query head by query head.
  int rows_of_head(const Piece& piece) const { return piece.num_tokens * queries_per_kv; }
  int num_rows(const Piece& piece) const { return piece.num_kv_heads * rows_of_head(piece); }

  // Call work(row, KV head, token, query head) for each.
  template <class Work>
  void for_rows(const Piece& piece, Work&& work) const {
    const int end_head = piece.kv_head + piece.num_kv_heads;
    int r = 0;
    for (int kv_head = piece.kv_head; kv_head < end_head; ++kv_head)
      for (int token = piece.first_token; token < piece.first_token + piece.num_tokens; ++token)
        for (int i = 0; i < queries_per_kv; ++i)
          work(r++, kv_head, token, kv_head * queries_per_kv + i);
  }

  // Of all sequences and KV heads.
  int64_t num_blocks() const {
    int64_t blocks = 0;
    for (int64_t s = 0; s < attend.num_sequences; ++s)
      blocks += (num_new(s) + block_tokens - 1) / block_tokens;
    return blocks * attend.cache->num_kv_heads;
  }

  int heads_of_pieces(int num_tokens) const {
    const bool few = num_tokens * queries_per_kv <= kFewRows;
    return heads_together && few ? attend.cache->num_kv_heads : 1;
  }

  // Write the pieces, or only count them if `pieces` is null. The longest ones come first.
  void make(Piece* pieces) {
    num_pieces = num_records = max_rows = 0;
    for (int64_t s = 0; s < attend.num_sequences; ++s) {
      const int blocks = (num_new(s) + block_tokens - 1) / block_tokens;
      for (int block = blocks - 1; block >= 0; --block) {
        Piece piece{};
        piece.sequence = static_cast<int32_t>(s);
        piece.first_token = block * block_tokens;
        piece.num_tokens = num_new(s) - piece.first_token < block_tokens
                               ? num_new(s) - piece.first_token
                               : block_tokens;
        const int first = first_visible(position(s, piece.first_token));
        const int end = position(s, piece.first_token + piece.num_tokens - 1) + 1;
        const int first_split = first / kSplit, end_split = (end - 1) / kSplit + 1;
        const int run = blocks == 1 ? splits_per_piece : end_split - first_split;
        piece.num_pieces = (end_split - first_split + run - 1) / run;
        piece.num_records = piece.num_pieces == 1 ? 0 : end_split - first_split;
        piece.num_kv_heads = heads_of_pieces(piece.num_tokens);
        const int heads = attend.cache->num_kv_heads / piece.num_kv_heads;
        piece.next_piece = heads;
        max_rows = max(max_rows, piece.num_kv_heads * piece.num_tokens * queries_per_kv);
        const int64_t first_piece = num_pieces;
        for (int split = first_split; split < end_split; split += run) {
          piece.first_key = split == first_split ? first : split * kSplit;
          piece.end_key = end_split - split <= run ? end : (split + run) * kSplit;
          for (int i = 0; i < heads; ++i, ++num_pieces) {
            piece.kv_head = i * piece.num_kv_heads;
            piece.first_of_group = first_piece + i;
            piece.first_record =
                num_records + static_cast<int64_t>(i) * piece.num_records + split - first_split;
            if (pieces != nullptr) pieces[num_pieces] = piece;
          }
        }
        num_records += static_cast<int64_t>(heads) * piece.num_records;
      }
    }
  }
};

}  // namespace kv8::KV8_ISA
