// Hands out 64-byte aligned parts of a memory; counts only if there is none.
#pragma once

#include <cstdint>

namespace kv8::KV8_ISA {

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

}  // namespace kv8::KV8_ISA
