// Rows of values of any format, a vector of words at a time. Where a word holds two values, the
// first of each make one float32 vector and the second another: the order in which words widen.
// Arithmetic value by value need not know.
#pragma once

#include "simd.h"

namespace kv8::KV8_ISA {

template <class Code>
struct Values {
  static constexpr int kParts = Code::kCodesPerWord;
  static constexpr int kCount = kParts * kLanes;
  F32 part[kParts];
};

// Values that memory holds for a whole vector.
template <class Code>
struct WholeVector {
  using Bits = typename Code::Code;
  KV8_INLINE U32 words(const Bits* from) const { return load_words(from); }
  KV8_INLINE void put(Bits* to, U32 words) const { store_words(to, words); }
  KV8_INLINE int64_t count() const { return Values<Code>::kCount; }
};

// The last values of a row, fewer than fill a vector; zeros stand for the rest.
template <class Code>
struct PartOfVector {
  using Bits = typename Code::Code;
  int64_t bytes;
  KV8_INLINE U32 words(const Bits* from) const { return load_bytes(from, bytes); }
  KV8_INLINE void put(Bits* to, U32 words) const { store_bytes(to, words, bytes); }
  KV8_INLINE int64_t count() const { return bytes / static_cast<int64_t>(sizeof(Bits)); }
};

template <class Code, class Vector>
KV8_INLINE Values<Code> load_values(const Vector& vector, const typename Code::Code* from) {
  Values<Code> values;
  Widen<Code>()(vector.words(from), values.part);
  return values;
}

// Rounded, as Code::encode does it.
template <class Code, class Vector>
KV8_INLINE void store_values(const Vector& vector, typename Code::Code* to,
                             const Values<Code>& values) {
  vector.put(to, Round<Code>().words(values.part));
}

// function(a, b, ...) for each value.
template <class Code, class Function, class... More>
KV8_INLINE Values<Code> for_each(const Function& function, const Values<Code>& a,
                                 const More&... more) {
  Values<Code> result;
  for (int i = 0; i < Values<Code>::kParts; ++i)
    result.part[i] = function(a.part[i], more.part[i]...);
  return result;
}

// work(i, vector) for the values from each i on that are one vector, and for the rest.
template <class Code, class Work>
KV8_INLINE void in_vectors(int64_t count, const Work& work) {
  int64_t i = 0;
  for (; i + Values<Code>::kCount <= count; i += Values<Code>::kCount)
    work(i, WholeVector<Code>());
  if (i < count)
    work(i, PartOfVector<Code>{(count - i) * static_cast<int64_t>(sizeof(typename Code::Code))});
}

}  // namespace kv8::KV8_ISA
