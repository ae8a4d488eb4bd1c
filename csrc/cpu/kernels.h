// The C interface of the CPU kernels: raw pointers, strides and counts, nothing of the engine.
//
// All strides are in bytes and 64 bits wide. Letters as in docs/architecture.md. Tensors named
// here are described by src/kv8/attention/{layer,batch,backend}.py.
#pragma once

#include <cstdint>

#if defined(_WIN32)
#define KV8_EXPORT __declspec(dllexport)
#else
#define KV8_EXPORT __attribute__((visibility("default")))
#endif

extern "C" {

// Numbers of the formats: 0 float32, 1 bfloat16, 2 float16, 3 e4m3, 4 e5m2.
typedef int32_t kv8_format;

struct kv8_cache {
  void* k_codes;           // [N, K, B, D], all but dimension 0 contiguous
  void* v_codes;
  int64_t k_block_stride;  // from one block to the next
  int64_t v_block_stride;
  const float* k_scale;    // [K], or null when the format is not quantized
  const float* v_scale;
  int64_t num_blocks;      // N
  int32_t block_size;      // B
  int32_t num_kv_heads;    // K
  int32_t head_dim;        // D, a multiple of 4
  kv8_format format;
};

// A float32, bfloat16 or float16 tensor [T, heads, D] whose last dimension is contiguous.
struct kv8_rows {
  void* data;
  int64_t token_stride;
  int64_t head_stride;
  kv8_format dtype;
};

struct kv8_store {
  const kv8_cache* cache;
  kv8_rows key;
  kv8_rows value;
  const int64_t* slots;  // [T]
  int64_t num_tokens;    // T
  int64_t* k_counts;     // [4] stored, saturated, underflowed, NaN: added to; or null
  int64_t* v_counts;
};

struct kv8_attend {
  const kv8_cache* cache;
  kv8_rows query;               // [T, H, D]
  kv8_rows output;              // [T, H, D]
  const int32_t* query_starts;  // [S + 1]
  const int32_t* context_lens;  // [S]
  const int32_t* block_table;   // [S, M]
  int64_t table_width;          // M
  int64_t num_sequences;        // S
  int64_t num_tokens;           // T
  const float* q_scale;         // [H], or null: FP8 attention
  const float* sinks;           // [H], or null
  float softmax_scale;
  float softcap;                // 0 for none
  int32_t num_heads;            // H
  int32_t window;               // tokens a query sees, itself included; 0 for all
  void* scratch;                // any content, 64-byte aligned
  int64_t scratch_bytes;
};

// Return 0, or what is wrong with the arguments (and then nothing was read or written):
// -1 a slot or block number is outside the cache, -2 lengths that do not fit together.
// kv8_attend_run may also return how many bytes of scratch it needs, if it got fewer.
KV8_EXPORT int64_t kv8_store_run(const kv8_store* store, int32_t num_threads);
KV8_EXPORT int64_t kv8_attend_run(const kv8_attend* attend, int32_t num_threads);

// The build in use: 0 plain C++, 1 AVX2, 2 AVX-512 with VBMI, 3 that and bfloat16 dot products, 4 that
// and AMX. kv8_use_isa chooses another one, for tests; it returns what is in use, which differs where
// the CPU or the compiler cannot.
KV8_EXPORT int32_t kv8_isa(void);
KV8_EXPORT int32_t kv8_use_isa(int32_t isa);
}
