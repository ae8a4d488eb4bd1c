// Attention over stored codes: decode, chunked prefill and any mixture, by pieces (plan.h) that
// threads take one by one (attention.h). Compiled once for each instruction set.
#include "attention.h"
#include "handout.h"

#if defined(_OPENMP)
#include <omp.h>
#endif

namespace kv8::KV8_ISA {
namespace {

int thread_number() {
#if defined(_OPENMP)
  return omp_get_thread_num();
#else
  return 0;
#endif
}

// Everything a call writes but its output, laid out in the scratch memory.
template <class Code>
struct Scratch {
  int64_t workspace_bytes;  // of one thread
  uint8_t* workspaces;
  Piece* pieces;
  float* records;        // Sums of each split whose sums are merged at the end
  float* piece_maxima;   // [pieces, R], FP8 attention only
  float* group_maxima;   // the same, over a piece's whole group
  int64_t bytes;

  Scratch(uint8_t* memory, const Plan& plan, Parts parts, int64_t record_floats,
          int num_threads, bool maxima) {
    const int rows = plan.max_rows;
    Arena counted{nullptr}, arena{memory};
    (void)Workspace<Code>(counted, rows, *plan.attend.cache, parts);
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
  const int rows = plan.max_rows;
  // FP8 attention rounds a row's weights relative to its maximum, which must be the final one.
  const bool maxima_first = attend.q_scale != nullptr;
  const Parts parts = Attention<Code>::parts(attend);
  const Scratch<Code> scratch(static_cast<uint8_t*>(attend.scratch), plan, parts,
                              attention.record_floats(), num_threads, maxima_first);
  if (scratch.bytes > attend.scratch_bytes) return scratch.bytes;
  const Piece* pieces = scratch.pieces;
  plan.make(scratch.pieces);
  auto records_of = [&](const Piece& piece) {
    return scratch.records + piece.first_record * attention.record_floats();
  };

  auto piece = [&](int64_t i) { return i < plan.num_pieces ? pieces[i] : Piece{}; };
  Handout first_pass, second_pass;

#pragma omp parallel num_threads(num_threads) if (num_threads > 1)
  {
    Arena arena{scratch.workspaces + scratch.workspace_bytes * thread_number()};
    Workspace<Code> work(arena, rows, *attend.cache, parts);
    if (maxima_first) {
      take_ahead(first_pass, first_pass.take(), plan.num_pieces, [&](int64_t i, int64_t next) {
        attention.find_maxima(pieces[i], piece(next), work, scratch.piece_maxima + i * rows);
      });
#pragma omp barrier
#pragma omp for schedule(static)
      for (int64_t i = 0; i < plan.num_pieces; ++i) {
        const int64_t stride = static_cast<int64_t>(rows) * pieces[i].next_piece;
        const float* of_pieces = scratch.piece_maxima + pieces[i].first_of_group * rows;
        for (int r = 0; r < plan.num_rows(pieces[i]); ++r) {
          float largest = kNoMaximum;
          for (int j = 0; j < pieces[i].num_pieces; ++j)
            if (of_pieces[j * stride + r] > largest) largest = of_pieces[j * stride + r];
          scratch.group_maxima[i * rows + r] = largest;
        }
      }
    }
    take_ahead(second_pass, second_pass.take(), plan.num_pieces, [&](int64_t i, int64_t next) {
      float* records = pieces[i].num_records == 0 ? nullptr : records_of(pieces[i]);
      attention.attend(pieces[i], piece(next), work, records,
                       maxima_first ? scratch.group_maxima + i * rows : nullptr);
    });
#pragma omp barrier
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
