// The C interface of what a decoder layer does besides attention: products with weights, norms,
// rotary embedding, gated activation. Raw pointers and strides, as in kernels.h. A list of
// operations may hold attention, too, so that many layers are one call.
//
// All tensors of one operation are float32, bfloat16 or float16 alike; sums and functions are
// float32. Results are rounded to the tensors' type wherever transformers' own modules round.
// A row's result does not depend on how many rows there are. Strides are in values.
#pragma once

#include "kernels.h"

extern "C" {

// out = x weight^T (+ bias), then out = residual + out * multiplier.
struct kv8_linear {
  const void* x;         // [T, K]
  const void* weight;    // [N, K], contiguous; K * bytes of a value is a multiple of 4
  const void* bias;      // [N] or null
  const void* residual;  // [T, N] or null
  void* out;             // [T, N]; may be the residual
  int64_t x_stride;
  int64_t residual_stride;
  int64_t out_stride;
  int64_t num_inputs;    // K
  int64_t num_outputs;   // N
  float* scratch;        // kv8_linear_scratch floats, 64-byte aligned
  float multiplier;
  kv8_format dtype;
};

// The order in which a norm multiplies by its weight w and rounds, with n = x / rms(x) in float32:
//   0  w * round(n)      1  round(n * (1 + w))      2  round(w * n)
// and then out = residual + the result, if there is a residual.
struct kv8_norm {
  const void* x;         // [T, heads, D]: one norm for each head
  const void* weight;    // [D]
  const void* residual;  // [T, heads, D] or null
  void* out;             // [T, heads, D]; may be x or the residual
  int64_t x_stride;      // from token to token; heads are contiguous
  int64_t residual_stride;
  int64_t out_stride;
  int64_t num_heads;
  int64_t size;        // D
  float epsilon;
  int32_t order;
  kv8_format dtype;
};

// x * cos + rotate_half(x) * sin, in place, on the first `rotary` values of each head. The products
// are of the angles' type: x's, or float32.
struct kv8_rotary {
  void* x;          // [T, heads, D]
  const void* cos;  // [T, rotary], contiguous
  const void* sin;
  int64_t x_stride;
  int64_t num_heads;
  int64_t size;     // D
  int64_t rotary;
  kv8_format dtype;
  kv8_format angle_dtype;
};

// out = round(f(gate)) * up, with f: 0 silu, 1 gelu by tanh.
struct kv8_gate {
  const void* gate;  // [T, I]
  const void* up;    // [T, I]
  void* out;         // [T, I]
  int64_t in_stride;
  int64_t out_stride;
  int64_t size;      // I
  int32_t function;
  kv8_format dtype;
};

// A product whose outputs are gate and up side by side, N = 2 I, and what comes of them. Whether
// they are written to memory in between is left open: `both.out` must have room for them.
struct kv8_gated {
  kv8_linear both;
  kv8_gate gate;
};

// One operation of a list: 0 linear, 1 norm, 2 rotary, 3 gate, 6 gated; 4 kv8_store, 5 kv8_attend,
// which have counts of their own.
struct kv8_operation {
  const void* arguments;
  int64_t kind;
};

// Floats of scratch a product of T rows needs; the list's operations may share it.
KV8_EXPORT int64_t kv8_linear_scratch(int64_t num_rows, int64_t num_inputs);
// Run a list in order over T rows. Returns 0; or, where an operation could not be run, what
// kv8_store_run or kv8_attend_run returned. `done` then has the number of operations before it, so
// that the rest of the list can be run once the cause is removed.
KV8_EXPORT int64_t kv8_operations_run(const kv8_operation* list, int64_t count, int64_t num_rows,
                                      int32_t num_threads, int64_t* done);
// Ask for large pages for memory that nobody has written to yet; without effect where there are
// none.
KV8_EXPORT void kv8_prefer_large_pages(void* memory, int64_t bytes);
}
