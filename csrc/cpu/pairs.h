// Vectors of pairs of bfloat16: codes widened to them, float32 rounded to them. AVX-512 with bfloat16
// only. The unit that multiplies counts subnormal bfloat16 numbers as zero; no FP8 code becomes one.
#pragma once

#include "simd.h"

namespace kv8::KV8_ISA {

// a rounded to the lower halves of the first eight words and so on: element i of (a, b) in order.
KV8_INLINE U32 to_pairs(F32 a, F32 b) { return (U32)_mm512_cvtne2ps_pbh(b, a); }

// x to eight bits of mantissa, as float32; ties away from zero. x minus that is exact.
KV8_INLINE F32 upper_part(F32 x) {
  return float_of(_mm512_and_si512(_mm512_add_epi32(bits_of(x), splat_word(0x8000u)),
                                   splat_word(0xffff0000u)));
}

// Half words of two rows in turns, within each quarter q of a vector: [a, b][4 q + 0..1] and so on.
KV8_INLINE void interleave(U32 a, U32 b, U32 (&out)[2]) {
  out[0] = _mm512_unpacklo_epi16(a, b);
  out[1] = _mm512_unpackhi_epi16(a, b);
}

// A word of codes to its pairs: (0, 2) and (1, 3) of four FP8 codes, (0, 1) of two bfloat16. And the
// largest magnitude of codes that went by, to find those that are no finite number.
template <class Code>
struct ToPairs : CodePairs<Code> {
  static constexpr int kPairs = 2;  // of a word
  static constexpr uint8_t kFinite = Code::kLargest;
  static KV8_INLINE U32 larger(U32 largest, U32 codes) {
    return _mm512_max_epu8(largest, codes | _mm512_set1_epi8(static_cast<char>(0x80)));
  }
  static KV8_INLINE bool finite(U32 largest) {
    return _mm512_cmpgt_epu8_mask(largest, _mm512_set1_epi8(static_cast<char>(0x80 | kFinite))) == 0;
  }
};

template <>
struct ToPairs<BFloat16> {
  static constexpr int kPairs = 1;
  KV8_INLINE void operator()(U32 word, U32* out) const { out[0] = word; }
  static KV8_INLINE U32 larger(U32 largest, U32 codes) {
    return _mm512_max_epu16(largest, codes | _mm512_set1_epi16(static_cast<short>(0x8000)));
  }
  static KV8_INLINE bool finite(U32 largest) {
    return _mm512_cmpge_epu16_mask(largest, _mm512_set1_epi16(static_cast<short>(0xff80))) == 0;
  }
};

}  // namespace kv8::KV8_ISA
