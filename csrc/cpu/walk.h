// The tiles of a piece, one after the other, and what is fetched meanwhile.
#pragma once

#include "fetch.h"
#include "plan.h"

namespace kv8::KV8_ISA {

struct Tile {
  int first_key;  // position of its first
  int head;       // which of the piece's KV heads
  TileRows rows;
};

// Keys of a tile that a row sees, counted from the tile's first.
inline KeyRange visible_in(const KeyRange& row, const Tile& tile) {
  return {max(row.first - tile.first_key, tile.rows.first),
          min(row.end - tile.first_key, tile.rows.end)};
}

// Whether none of these rows, of which later ones see later keys, sees one.
inline bool sees_none(const KeyRange* rows, int count, const Tile& tile) {
  return visible_in(rows[count - 1], tile).end <= tile.rows.first ||
         visible_in(rows[0], tile).first >= tile.rows.end;
}

class Walk {
 public:
  Walk(const kv8_attend& attend, int row_bytes)
      : a_(attend),
        cache_(*attend.cache),
        row_bytes_(row_bytes),
        head_bytes_(static_cast<int64_t>(cache_.block_size) * row_bytes) {}

  // Call work for a piece's tiles, head by head, and fetch those of all heads to come meanwhile; at
  // last the first of the next piece, if that has keys.
  template <class Work>
  void for_tiles(const Piece& piece, const Piece& next_piece, Fetch& fetch, Work&& work) const {
    const int ahead = piece.num_kv_heads > 1 ? kTile : 2 * kTile;
    for (int key = first_of_tile(piece.first_key); key < piece.end_key; key += kTile) {
      start(fetch, piece, next_piece, key + ahead);
      Tile tile;
      locate(piece, key, tile);
      for (int h = 0; h < piece.num_kv_heads; ++h) {
        if (h > 0) to_next_head(tile);
        fetch.begin_tile();
        work(tile);
        fetch.end_tile();
      }
    }
  }

 private:
  static int first_of_tile(int key) { return key / kTile * kTile; }

  // Begin to fetch the tile at `key`; beyond the piece's end, one of the next piece.
  void start(Fetch& fetch, const Piece& piece, const Piece& next_piece, int key) const {
    if (key < piece.end_key) return start(fetch, piece, key);
    start(fetch, next_piece,
          first_of_tile(next_piece.first_key) + key - round_up(piece.end_key, kTile));
  }
  void start(Fetch& fetch, const Piece& piece, int key) const {
    fetch.start(table(piece), max(key, piece.first_key), min(key + kTile, piece.end_key),
                piece.kv_head, piece.num_kv_heads);
  }

  // The tile of a piece's first head.
  void locate(const Piece& piece, int first_key, Tile& tile) const {
    TileRows& rows = tile.rows;
    tile.first_key = first_key, tile.head = 0;
    rows.first = max(piece.first_key - first_key, 0);
    rows.end = min(piece.end_key - first_key, kTile);
    rows.k.row_bytes = rows.v.row_bytes = row_bytes_;
    int block = first_key / cache_.block_size, offset = first_key - block * cache_.block_size;
    for (int run = 0; run < kRuns; ++run) {
      const int key = run * kRunRows;
      if (rows.first <= key && key + kRunRows <= rows.end &&
          offset + kRunRows <= cache_.block_size) {
        point_to(piece, block, offset, rows.k.runs[run], rows.v.runs[run]);
        if ((offset += kRunRows) == cache_.block_size) ++block, offset = 0;
        continue;
      }
      rows.k.runs[run] = rows.v.runs[run] = nullptr;
      for (int i = key; i < key + kRunRows; ++i) {
        rows.k.rows[i] = rows.v.rows[i] = kZeros;
        if (rows.first <= i && i < rows.end)
          point_to(piece, block, offset, rows.k.rows[i], rows.v.rows[i]);
        if (++offset == cache_.block_size) ++block, offset = 0;
      }
    }
  }

  // To the key and the value at `offset` of a sequence's block, of the piece's first head.
  void point_to(const Piece& piece, int block, int offset, const uint8_t*& k,
                const uint8_t*& v) const {
    const int64_t number = table(piece)[block];
    const int64_t in_block = piece.kv_head * head_bytes_ + static_cast<int64_t>(offset) * row_bytes_;
    k = static_cast<const uint8_t*>(cache_.k_codes) + number * cache_.k_block_stride + in_block;
    v = static_cast<const uint8_t*>(cache_.v_codes) + number * cache_.v_block_stride + in_block;
  }

  void to_next_head(Tile& tile) const {
    ++tile.head;
    Rows* sides[] = {&tile.rows.k, &tile.rows.v};
    for (Rows* side : sides) {
      for (int run = 0; run < kRuns; ++run) {
        if (side->runs[run] != nullptr) {
          side->runs[run] += head_bytes_;
          continue;
        }
        for (int i = run * kRunRows; i < (run + 1) * kRunRows; ++i)
          if (tile.rows.first <= i && i < tile.rows.end) side->rows[i] += head_bytes_;
      }
    }
  }

  const int32_t* table(const Piece& piece) const {
    return a_.block_table + piece.sequence * a_.table_width;
  }

  const kv8_attend& a_;
  const kv8_cache& cache_;
  const int row_bytes_;
  const int64_t head_bytes_;  // of a block
};

}  // namespace kv8::KV8_ISA
