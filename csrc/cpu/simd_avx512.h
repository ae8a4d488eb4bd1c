// AVX-512 with VBMI: FP8 codes are looked up in registers. Part of simd.h.
#pragma once

namespace kv8::KV8_ISA {

constexpr int kLanes = 16, kRows = 6, kColumns = 4;
using F32 = __m512;
using U32 = __m512i;

KV8_INLINE F32 load(const float* p) { return _mm512_loadu_ps(p); }
KV8_INLINE U32 load_words(const void* p) { return _mm512_loadu_si512(p); }
KV8_INLINE void store(float* p, F32 x) { _mm512_storeu_ps(p, x); }
KV8_INLINE void store_words(void* p, U32 x) { _mm512_storeu_si512(p, x); }
KV8_INLINE F32 splat(float x) { return _mm512_set1_ps(x); }
KV8_INLINE U32 splat_word(uint32_t x) { return _mm512_set1_epi32(static_cast<int>(x)); }
KV8_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm512_fmadd_ps(a, b, c); }
KV8_INLINE F32 max(F32 a, F32 b) { return _mm512_max_ps(a, b); }
KV8_INLINE float reduce_max(F32 x) { return _mm512_reduce_max_ps(x); }

// What x has beyond the largest whole number not above it.
KV8_INLINE F32 fraction(F32 x) { return _mm512_reduce_ps(x, 9); }

// x * 2**e for whole numbers e; zero from 2**-100 down, so that nothing gets to be subnormal.
KV8_INLINE F32 scale_by_power(F32 x, F32 e) {
  const __mmask16 counts = _mm512_cmp_ps_mask(e, splat(-100.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, x, e);
}

// x * 2**e for the largest whole e not above a - m, where m is whole; zero from 2**-100 down.
KV8_INLINE F32 scale_by_difference(F32 x, F32 a, F32 m) {
  // Rounded down, so that it does not get to the next whole number; scalef leaves out fractions.
  const F32 e = _mm512_sub_round_ps(a, m, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
  const __mmask16 counts = _mm512_cmp_ps_mask(e, splat(-100.0f), _CMP_NLT_UQ);
  return _mm512_maskz_scalef_ps(counts, x, e);
}

// Lanes first <= i < end of x, `other` elsewhere.
KV8_INLINE F32 keep_lanes(F32 x, int first, int end, F32 other) {
  const U32 lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
  const __mmask16 kept = _mm512_cmpge_epi32_mask(lane, splat_word(static_cast<uint32_t>(first))) &
                         _mm512_cmplt_epi32_mask(lane, splat_word(static_cast<uint32_t>(end)));
  return _mm512_mask_blend_ps(kept, other, x);
}

// The first `words` words at p, zeros after them.
KV8_INLINE U32 load_some(const void* p, int words) {
  if (words >= kLanes) return load_words(p);
  return _mm512_maskz_loadu_epi32(static_cast<__mmask16>((1u << words) - 1), p);
}

// The first `bytes` bytes at p, fewer than a vector's, zeros after them; and back.
KV8_INLINE __mmask64 first_bytes(int64_t bytes) { return (uint64_t{1} << bytes) - 1; }
KV8_INLINE U32 load_bytes(const void* p, int64_t bytes) {
  return _mm512_maskz_loadu_epi8(first_bytes(bytes), p);
}
KV8_INLINE void store_bytes(void* p, U32 x, int64_t bytes) {
  _mm512_mask_storeu_epi8(p, first_bytes(bytes), x);
}

KV8_INLINE U32 bits_of(F32 x) { return _mm512_castps_si512(x); }
KV8_INLINE F32 float_of(U32 x) { return _mm512_castsi512_ps(x); }

KV8_INLINE F32 lookup(const float* table, U32 index) {
  return _mm512_i32gather_ps(index, table, 4);
}

// Word j of r[i] becomes word i of r[j].
KV8_INLINE void transpose(U32 (&r)[kLanes]) {
  U32 t[kLanes];
  for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  for (int i = 0; i < 16; i += 4) {
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  for (int i = 0; i < 4; ++i) {
    const U32 a = _mm512_shuffle_i32x4(r[i], r[i + 4], 0x88);
    const U32 b = _mm512_shuffle_i32x4(r[i], r[i + 4], 0xdd);
    const U32 c = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0x88);
    const U32 d = _mm512_shuffle_i32x4(r[i + 8], r[i + 12], 0xdd);
    t[i] = _mm512_shuffle_i32x4(a, c, 0x88), t[i + 8] = _mm512_shuffle_i32x4(a, c, 0xdd);
    t[i + 4] = _mm512_shuffle_i32x4(b, d, 0x88), t[i + 12] = _mm512_shuffle_i32x4(b, d, 0xdd);
  }
  for (int i = 0; i < 16; ++i) r[i] = t[i];
}

// Word j of the first `words` words at p[i] becomes word i of r[j].
KV8_INLINE void load_transposed(const uint8_t* const* p, int words, U32 (&r)[kLanes]) {
  for (int i = 0; i < 16; ++i) r[i] = load_some(p[i], words);
  transpose(r);
}

// The largest lane of each vector, in the vectors' order.
KV8_INLINE F32 row_maxima(const F32 (&rows)[kLanes]) {
  F32 quarters[4], eighths[2];
  for (int i = 0; i < 4; ++i) {
    F32 halves[2];
    for (int j = 0; j < 2; ++j) {
      const F32 a = rows[i + 8 * j], b = rows[i + 8 * j + 4];
      halves[j] = max(_mm512_shuffle_f32x4(a, b, 0x44), _mm512_shuffle_f32x4(a, b, 0xee));
    }
    quarters[i] = max(_mm512_shuffle_f32x4(halves[0], halves[1], 0x88),
                      _mm512_shuffle_f32x4(halves[0], halves[1], 0xdd));
  }
  for (int i = 0; i < 2; ++i) {
    const F32 a = quarters[2 * i], b = quarters[2 * i + 1];
    eighths[i] = max(_mm512_shuffle_ps(a, b, 0x88), _mm512_shuffle_ps(a, b, 0xdd));
  }
  return max(_mm512_shuffle_ps(eighths[0], eighths[1], 0x88),
             _mm512_shuffle_ps(eighths[0], eighths[1], 0xdd));
}

KV8_INLINE F32 ceiling(F32 x) { return _mm512_roundscale_ps(x, 10); }
KV8_INLINE bool any_greater(F32 a, F32 b) {
  return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ) != 0;
}

// Upper and lower bytes of the bfloat16 that each FP8 code without its sign stands for.
template <class Code>
struct ByteTable {
  alignas(64) uint8_t upper[128];
  alignas(64) uint8_t lower[128];
  ByteTable() {
    for (uint32_t code = 0; code < 128; ++code) {
      const uint32_t bits = kv8::KV8_ISA::bits_of(Code::decode(code));
      upper[code] = static_cast<uint8_t>(bits >> 24);
      lower[code] = static_cast<uint8_t>(bits >> 16);
    }
  }
  static const ByteTable& get() {
    static const ByteTable table;
    return table;
  }
};

// A word of four FP8 codes as pairs of bfloat16, exact: codes 0 and 2, then 1 and 3.
template <class Code>
struct CodePairs {
  U32 upper0, upper1, lower0, lower1;
  CodePairs() {
    const ByteTable<Code>& table = ByteTable<Code>::get();
    upper0 = load_words(table.upper), upper1 = load_words(table.upper + 64);
    lower0 = load_words(table.lower), lower1 = load_words(table.lower + 64);
  }
  KV8_INLINE void operator()(U32 word, U32* out) const {
    pin(word);
    const U32 sign = _mm512_set1_epi8(static_cast<char>(0x80));
    const U32 low_bytes = _mm512_set1_epi16(0x00ff);
    const U32 lower = _mm512_permutex2var_epi8(lower0, word, lower1);
    U32 upper = _mm512_permutex2var_epi8(upper0, word, upper1);
    upper = _mm512_ternarylogic_epi64(upper, word, sign, 0xf8);  // upper | (word & sign)
    // (a & low_bytes) | (b & ~low_bytes)
    out[0] = _mm512_ternarylogic_epi64(lower, _mm512_slli_epi16(upper, 8), low_bytes, 0xe4);
    out[1] = _mm512_ternarylogic_epi64(_mm512_srli_epi16(lower, 8), upper, low_bytes, 0xe4);
  }
};

// Codes to float32, exact: one vector for each code of a word, in their order.
template <class Code>
struct Widen {
  CodePairs<Code> to_pairs;
  KV8_INLINE void operator()(U32 word, F32* out) const {
    const U32 upper_half = splat_word(0xffff0000u);
    U32 pairs[2];
    to_pairs(word, pairs);
    out[0] = float_of(_mm512_slli_epi32(pairs[0], 16));
    out[1] = float_of(_mm512_slli_epi32(pairs[1], 16));
    out[2] = float_of(_mm512_and_si512(pairs[0], upper_half));
    out[3] = float_of(_mm512_and_si512(pairs[1], upper_half));
  }
};

template <>
struct Widen<BFloat16> {
  KV8_INLINE void operator()(U32 word, F32* out) const {
    out[0] = float_of(_mm512_slli_epi32(word, 16));
    out[1] = float_of(_mm512_and_si512(word, splat_word(0xffff0000u)));
  }
};

template <>
struct Widen<Float16> {
  KV8_INLINE void operator()(U32 word, F32* out) const {
    out[0] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(word));
    out[1] = _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(word, 16)));
  }
};

// The bits of x; where it is NaN, those of the one that formats agree on, with its sign.
KV8_INLINE U32 without_payload(F32 x) {
  const __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
  const U32 nan = _mm512_ternarylogic_epi32(bits_of(x), splat_word(0x80000000u),
                                            splat_word(0x7fc00000u), 0xea);  // (x & sign) | quiet
  return _mm512_mask_mov_epi32(bits_of(x), is_nan, nan);
}

template <>
struct Round<BFloat16> {
  KV8_INLINE F32 operator()(F32 x) const {
    return float_of(_mm512_and_si512(nearest(bits_of(x)), splat_word(0xffff0000u)));
  }
  KV8_INLINE U32 words(const F32* values) const {
    const U32 lower = bits_of(values[0]), upper = bits_of(values[1]);
    const U32 codes = merge(nearest(lower), nearest(upper));
    if (__builtin_expect(_mm512_cmp_ps_mask(values[0], values[1], _CMP_UNORD_Q), 0))
      return merge(nearest(without_payload(values[0])), nearest(without_payload(values[1])));
    return codes;
  }

 private:
  // The code in the upper half. The CPU's own conversion takes subnormal numbers for zero.
  static KV8_INLINE U32 nearest(U32 bits) {
    const __mmask16 odd = _mm512_test_epi32_mask(bits, splat_word(0x10000u));
    const U32 sum = _mm512_add_epi32(bits, splat_word(0x7fffu));
    return _mm512_mask_add_epi32(sum, odd, sum, splat_word(1));
  }
  static KV8_INLINE U32 merge(U32 lower, U32 upper) {
    // (upper & mask) | lower code
    return _mm512_ternarylogic_epi32(upper, splat_word(0xffff0000u), _mm512_srli_epi32(lower, 16),
                                     0xea);
  }
};

// Sixteen bfloat16 codes side by side to float32, and back, rounded.
KV8_INLINE F32 widen_halves(const uint16_t* codes) {
  return float_of(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(
      reinterpret_cast<const __m256i*>(codes))), 16));
}
KV8_INLINE void store_halves(uint16_t* codes, F32 x) {
  const F32 same[2] = {x, x};
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes),
                      _mm512_cvtepi32_epi16(Round<BFloat16>().words(same)));
}

template <>
struct Round<Float16> {
  KV8_INLINE F32 operator()(F32 x) const { return _mm512_cvtph_ps(code(x)); }
  KV8_INLINE U32 words(const F32* values) const {
    const U32 lower = _mm512_cvtepu16_epi32(code(values[0]));
    return _mm512_or_si512(lower, _mm512_slli_epi32(_mm512_cvtepu16_epi32(code(values[1])), 16));
  }

 private:
  static KV8_INLINE __m256i code(F32 x) {
    return _mm512_cvtps_ph(float_of(without_payload(x)), _MM_FROUND_TO_NEAREST_INT);
  }
};

}  // namespace kv8::KV8_ISA
