// Products of some rows with a bfloat16 weight on the tile unit that newer x86 servers have (AMX).
#pragma once

#include "step.h"

namespace kv8::amx {

// Whether the machine has the unit, the system lets us use it, and the product suits it.
bool available();
bool takes(const kv8_linear& l);
void linear(const kv8_linear& l, int64_t num_rows, int num_threads);
// The same results for one row, with nothing to wait for.
bool takes_one(const kv8_linear& l);
void linear_one(const kv8_linear& l, int num_threads);
// The same results for many rows, faster from kManyRows on: there packing the weight pays.
constexpr int64_t kManyRows = 192;
// With `gate`, the outputs are gate and up, and what comes of them is written instead.
void linear_many(const kv8_linear& l, const kv8_gate* gate, int64_t num_rows, int num_threads);
bool takes_gated(const kv8_gated& g, int64_t num_rows);

}  // namespace kv8::amx
