// Products of some rows with a bfloat16 weight on the tile unit that newer x86 servers have (AMX).
#pragma once

#include "step.h"

namespace kv8::amx {

// Whether the machine has the unit, the system lets us use it, and the product suits it.
bool available();
bool takes(const kv8_linear& l);
void linear(const kv8_linear& l, int64_t num_rows, int num_threads);
// The same results for many rows, faster from kManyRows on: there packing the weight pays.
constexpr int64_t kManyRows = 192;
void linear_many(const kv8_linear& l, int64_t num_rows, int num_threads);

}  // namespace kv8::amx
