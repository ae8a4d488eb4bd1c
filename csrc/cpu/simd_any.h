// AVX2, and the compiler's own vectors for any machine (ARM included). Part of simd.h.
#pragma once

namespace kv8::KV8_ISA {

#if defined(__AVX2__)
constexpr int kLanes = 8, kRows = 4, kColumns = 2;
#else
constexpr int kLanes = 4, kRows = 4, kColumns = 2;
#endif
typedef float F32 __attribute__((vector_size(4 * kLanes)));
typedef uint32_t U32 __attribute__((vector_size(4 * kLanes)));
typedef int32_t I32 __attribute__((vector_size(4 * kLanes)));

template <class Vector>
KV8_INLINE Vector load_any(const void* p) {
  Vector x;
  std::memcpy(&x, p, sizeof x);
  return x;
}
KV8_INLINE F32 load(const float* p) { return load_any<F32>(p); }
KV8_INLINE U32 load_words(const void* p) { return load_any<U32>(p); }
KV8_INLINE void store(float* p, F32 x) { std::memcpy(p, &x, sizeof x); }
KV8_INLINE void store_words(void* p, U32 x) { std::memcpy(p, &x, sizeof x); }
KV8_INLINE F32 splat(float x) { return x - F32{}; }
KV8_INLINE U32 splat_word(uint32_t x) { return x - U32{}; }
KV8_INLINE U32 bits_of(F32 x) { return (U32)x; }  // casts between vectors keep their bits
KV8_INLINE F32 float_of(U32 x) { return (F32)x; }
KV8_INLINE F32 select(I32 where, F32 a, F32 b) {
  const U32 mask = (U32)where;
  return float_of((bits_of(a) & mask) | (bits_of(b) & ~mask));
}
KV8_INLINE F32 max(F32 a, F32 b) { return select(a > b, a, b); }

KV8_INLINE float reduce_max(F32 x) {
  float largest = x[0];
  for (int i = 1; i < kLanes; ++i) largest = x[i] > largest ? x[i] : largest;
  return largest;
}

KV8_INLINE I32 lane_numbers() {
  I32 lane;
  for (int i = 0; i < kLanes; ++i) lane[i] = i;
  return lane;
}

KV8_INLINE F32 keep_lanes(F32 x, int first, int end, F32 other) {
  const I32 lane = lane_numbers();
  return select((lane >= first) & (lane < end), x, other);
}

KV8_INLINE U32 load_some(const void* p, int words) {
  if (words >= kLanes) return load_words(p);
  U32 x{};
  std::memcpy(&x, p, 4 * static_cast<size_t>(words));
  return x;
}

// Word by word, which takes less time than memory written in parts and read as a whole.
KV8_INLINE U32 load_bytes(const void* p, int64_t bytes) {
  const auto* from = static_cast<const uint8_t*>(p);
  U32 x{};
  for (int i = 0; i < kLanes && 4 * i < bytes; ++i) {
    uint32_t word = 0;
    if (4 * i + 4 <= bytes) std::memcpy(&word, from + 4 * i, 4);
    else std::memcpy(&word, from + 4 * i, 2);
    x[i] = word;
  }
  return x;
}

KV8_INLINE void store_bytes(void* p, U32 x, int64_t bytes) {
  auto* to = static_cast<uint8_t*>(p);
  for (int i = 0; i < kLanes && 4 * i < bytes; ++i) {
    const uint32_t word = x[i];
    if (4 * i + 4 <= bytes) std::memcpy(to + 4 * i, &word, 4);
    else std::memcpy(to + 4 * i, &word, 2);
  }
}

KV8_INLINE F32 scale_by_power(F32 x, F32 e) {
  const I32 counts = ~(e < -100.0f);
  // 2**128 is infinity. Where e is NaN it does not matter what comes of it: x is NaN too.
  const F32 below = select(e < 128.0f, e, splat(128.0f));
  const F32 exponent = max(splat(-100.0f), below);
  const U32 biased = (U32)__builtin_convertvector(exponent, I32) + 127u;
  return select(counts, x * float_of(biased << 23), splat(0.0f));
}

KV8_INLINE F32 floor(F32 x) {
  // Numbers this large are whole; adding one drops the fraction of smaller ones.
  const F32 large = splat(12582912.0f);  // 1.5 * 2**23
  const I32 small = (x < 4194304.0f) & (x > -4194304.0f);
  const F32 nearest = (x + large) - large;
  return select(small, nearest - select(nearest > x, splat(1.0f), splat(0.0f)), x);
}

KV8_INLINE F32 fraction(F32 x) { return x - floor(x); }
KV8_INLINE F32 scale_by_difference(F32 p, F32 x, F32 m) { return scale_by_power(p, floor(x) - m); }

KV8_INLINE void load_transposed(const uint8_t* const* p, int words, U32 (&r)[kLanes]) {
  for (int i = 0; i < kLanes; ++i) {
    const U32 row = load_some(p[i], words);
    for (int j = 0; j < kLanes; ++j) r[j][i] = row[j];
  }
}

KV8_INLINE F32 row_maxima(const F32 (&rows)[kLanes]) {
  F32 maxima;
  for (int i = 0; i < kLanes; ++i) maxima[i] = reduce_max(rows[i]);
  return maxima;
}
KV8_INLINE F32 ceiling(F32 x) {
  for (int i = 0; i < kLanes; ++i) x[i] = __builtin_ceilf(x[i]);
  return x;
}
KV8_INLINE bool any_greater(F32 a, F32 b) {
  const I32 greater = a > b;
  int32_t any = 0;
  for (int i = 0; i < kLanes; ++i) any |= greater[i];
  return any != 0;
}

#if defined(__AVX2__)
KV8_INLINE F32 fma(F32 a, F32 b, F32 c) { return _mm256_fmadd_ps(a, b, c); }
KV8_INLINE F32 lookup(const float* table, U32 index) {
  return _mm256_i32gather_ps(table, (__m256i)index, 4);
}
#else
KV8_INLINE F32 fma(F32 a, F32 b, F32 c) { return a * b + c; }
KV8_INLINE F32 lookup(const float* table, U32 index) {
  F32 x;
  for (int i = 0; i < kLanes; ++i) x[i] = table[index[i]];
  return x;
}
#endif

template <class Code>
struct Widen {
  const float* value = ValueTable<Code>::get().value;
  KV8_INLINE void operator()(U32 word, F32* out) const {
    for (int i = 0; i < 4; ++i) out[i] = lookup(value, (word >> (8 * i)) & 0xffu);
  }
};

template <>
struct Widen<BFloat16> {
  KV8_INLINE void operator()(U32 word, F32* out) const {
    out[0] = float_of(word << 16);
    out[1] = float_of(word & 0xffff0000u);
  }
};

template <>
struct Round<BFloat16> {
  KV8_INLINE F32 operator()(F32 x) const { return float_of(nearest(x) & 0xffff0000u); }
  KV8_INLINE U32 words(const F32* values) const {
    return code(values[0]) >> 16 | (code(values[1]) & 0xffff0000u);
  }

 private:
  static KV8_INLINE U32 nearest(F32 x) {
    const U32 bits = bits_of(x);
    return bits + 0x7fffu + ((bits >> 16) & 1u);
  }
  static KV8_INLINE U32 code(F32 x) {
    const U32 nan = (bits_of(x) & 0x80000000u) | 0x7fc00000u;
    return bits_of(select(x == x, float_of(nearest(x)), float_of(nan)));
  }
};

// Float16::decode and Float16::encode, lane by lane: compilers do not vectorize the originals.
KV8_INLINE F32 decode_float16(U32 code) {
  const U32 sign = (code << 16) & 0x80000000u, magnitude = code & Float16::kMagnitude;
  const F32 subnormal = __builtin_convertvector((I32)magnitude, F32) * 0x1p-24f;
  const F32 normal = float_of((magnitude << Float16::kDropped) + Float16::kRebias);
  const F32 no_number = float_of((magnitude << Float16::kDropped) | 0x7f800000u);
  F32 value = select((I32)magnitude < 1 << 10, subnormal, normal);
  value = select((I32)magnitude < int{Float16::kInfinity}, value, no_number);
  return float_of(bits_of(value) | sign);
}

KV8_INLINE U32 encode_float16(F32 x) {
  const U32 sign = (bits_of(x) & 0x80000000u) >> 16, magnitude = bits_of(x) & 0x7fffffffu;
  const U32 odd = (magnitude >> Float16::kDropped) & 1u;
  const U32 normal = (magnitude - Float16::kRebias + 0xfffu + odd) >> Float16::kDropped;
  const U32 grid = splat_word(Float16::kSubnormalGridBits);
  const U32 subnormal = bits_of(float_of(magnitude) + float_of(grid)) - grid;
  const I32 small = (I32)magnitude < int{Float16::kSmallestNormalBits};
  F32 code = select(small, float_of(subnormal), float_of(normal));
  const U32 infinity = splat_word(Float16::kInfinity), nan = infinity | 0x200u;
  code = select((I32)bits_of(code) < (I32)infinity, code, float_of(infinity));
  return bits_of(select(x == x, code, float_of(nan))) | sign;
}

template <>
struct Widen<Float16> {
  KV8_INLINE void operator()(U32 word, F32* out) const {
    out[0] = decode_float16(word & 0xffffu);
    out[1] = decode_float16(word >> 16);
  }
};

template <>
struct Round<Float16> {
  KV8_INLINE F32 operator()(F32 x) const { return decode_float16(encode_float16(x)); }
  KV8_INLINE U32 words(const F32* values) const {
    return encode_float16(values[0]) | encode_float16(values[1]) << 16;
  }
};

}  // namespace kv8::KV8_ISA
