// What the bits of a stored value mean: FP8 codes, bfloat16, float16, float32; one value at a time.
//
// Everything here is plain C++ that a compiler can vectorize. It sits in a namespace of its own for
// each instruction set (KV8_ISA), so that no build links to code compiled for another one.
#pragma once

#include <cstdint>
#include <cstring>

namespace kv8::KV8_ISA {

// Values of kv8_format in kernels.h.
enum class Format : int32_t { kFloat32 = 0, kBFloat16 = 1, kFloat16 = 2, kE4M3 = 3, kE5M2 = 4 };

inline uint32_t bits_of(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

inline float float_of(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// A floating-point format narrower than float32: sign, exponent, mantissa, from the top bit down.
//
// kHasInfinity: the largest exponent holds infinity and NaN; without it, only the all-ones code is
// NaN. The code before the first of these is the largest finite value.
template <typename Bits, int kExponentBits, int kMantissaBits, bool kHasInfinity>
struct Narrow {
  using Code = Bits;
  static constexpr int kBias = (1 << (kExponentBits - 1)) - 1;
  static constexpr int kDropped = 23 - kMantissaBits;
  static constexpr int kSignShift = 32 - 8 * static_cast<int>(sizeof(Bits));
  static constexpr uint32_t kMagnitude = (1u << (kExponentBits + kMantissaBits)) - 1;
  static constexpr uint32_t kInfinity = kMagnitude & ~((1u << kMantissaBits) - 1);
  static constexpr uint32_t kLargest = kHasInfinity ? kInfinity - 1 : kMagnitude - 1;
  // What float32 calls the same number: the exponent moves by the difference of the biases.
  static constexpr uint32_t kRebias = static_cast<uint32_t>(127 - kBias) << 23;
  static constexpr uint32_t kLargestBits = (kLargest << kDropped) + kRebias;
  static constexpr uint32_t kSmallestNormalBits = static_cast<uint32_t>(128 - kBias) << 23;
  // A power of two whose float32 neighbours are as far apart as this format's subnormals.
  static constexpr uint32_t kSubnormalGridBits =
      static_cast<uint32_t>(128 - kBias + kDropped) << 23;

  // Clamp to the finite range, then round to nearest even. NaN keeps its sign.
  static uint32_t encode_saturating(float value) {
    const uint32_t all = bits_of(value);
    uint32_t magnitude = all & 0x7fffffffu;
    const bool is_nan = magnitude > 0x7f800000u;
    magnitude = magnitude > kLargestBits ? kLargestBits : magnitude;
    const uint32_t odd = (magnitude >> kDropped) & 1;
    const uint32_t normal =
        (magnitude - kRebias + ((1u << (kDropped - 1)) - 1) + odd) >> kDropped;
    const uint32_t subnormal =
        bits_of(float_of(magnitude) + float_of(kSubnormalGridBits)) - kSubnormalGridBits;
    uint32_t code = magnitude < kSmallestNormalBits ? subnormal : normal;
    code = is_nan ? (kHasInfinity ? kNaN : kMagnitude) : code;
    return code | ((all & 0x80000000u) >> kSignShift);
  }

  // As above, but what rounds beyond the finite range becomes an infinity.
  static uint32_t encode(float value) {
    static_assert(kHasInfinity, "a format without infinity has nothing to round to");
    const uint32_t all = bits_of(value), magnitude = all & 0x7fffffffu;
    const bool beyond =
        magnitude >= kLargestBits + (1u << (kDropped - 1)) && magnitude <= 0x7f800000u;
    return beyond ? kInfinity | ((all & 0x80000000u) >> kSignShift) : encode_saturating(value);
  }

  static float decode(uint32_t code) {
    const uint32_t sign = (code << kSignShift) & 0x80000000u;
    const uint32_t magnitude = code & kMagnitude;
    // The low bits as a number of subnormal steps: exact for every exponent that holds them.
    const float steps = static_cast<float>(static_cast<int32_t>(magnitude));
    const float step = float_of(kSubnormalGridBits - (23u << 23));
    const uint32_t subnormal = bits_of(steps * step);
    const uint32_t normal = (magnitude << kDropped) + kRebias;
    uint32_t bits = magnitude < (1u << kMantissaBits) ? subnormal : normal;
    if (kHasInfinity) {
      bits = magnitude >= kInfinity ? (magnitude << kDropped) | 0x7f800000u : bits;
    } else {
      bits = magnitude == kMagnitude ? 0x7fc00000u : bits;
    }
    return float_of(bits | sign);
  }

 private:
  static constexpr uint32_t kNaN =
      sizeof(Bits) == 1 ? kMagnitude : kInfinity | (1u << (kMantissaBits - 1));
};

// Each format under one interface: Code, encode_saturating, decode, kCodesPerWord (codes in 32 bits).
struct E4M3 : Narrow<uint8_t, 4, 3, false> {
  static constexpr int kCodesPerWord = 4;
};
struct E5M2 : Narrow<uint8_t, 5, 2, true> {
  static constexpr int kCodesPerWord = 4;
};
struct Float16 : Narrow<uint16_t, 5, 10, true> {
  static constexpr int kCodesPerWord = 2;
};

// bfloat16 shares float32's exponent, so that its rounding needs no case for subnormals.
struct BFloat16 {
  using Code = uint16_t;
  static constexpr int kCodesPerWord = 2;
  static constexpr uint32_t kMagnitude = 0x7fffu;
  static constexpr uint32_t kLargestBits = 0x7f7f0000u;

  static uint32_t encode(float value) {
    const uint32_t all = bits_of(value);
    const uint32_t rounded = (all + 0x7fffu + ((all >> 16) & 1)) >> 16;
    return (all & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u | ((all >> 16) & 0x8000u) : rounded;
  }

  static uint32_t encode_saturating(float value) {
    const uint32_t all = bits_of(value), magnitude = all & 0x7fffffffu;
    const bool beyond = magnitude > kLargestBits && magnitude <= 0x7f800000u;
    return beyond ? (all >> 16 & 0x8000u) | (kLargestBits >> 16) : encode(value);
  }

  static float decode(uint32_t code) { return float_of(code << 16); }
};

struct Float32 {
  using Code = uint32_t;
  static constexpr int kCodesPerWord = 1;
  static uint32_t encode(float value) { return bits_of(value); }
  static uint32_t encode_saturating(float value) { return bits_of(value); }
  static float decode(uint32_t code) { return float_of(code); }
};

// Call `work` with the format as a type.
template <typename Work>
inline void with_format(Format format, Work&& work) {
  switch (format) {
    case Format::kFloat32: return work(Float32{});
    case Format::kBFloat16: return work(BFloat16{});
    case Format::kFloat16: return work(Float16{});
    case Format::kE4M3: return work(E4M3{});
    case Format::kE5M2: return work(E5M2{});
  }
}

inline int bytes_per_code(Format format) {
  return format == Format::kFloat32 ? 4 : format >= Format::kE4M3 ? 1 : 2;
}

}  // namespace kv8::KV8_ISA
