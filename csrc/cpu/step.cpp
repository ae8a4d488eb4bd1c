// The C interface of step.h, on the build in use.
#include "step.h"

#define KV8_DECLARE(isa)                                                            \
  namespace kv8::isa {                                                              \
  void operation(const kv8_operation& operation, int64_t num_rows, int num_threads); \
  }
KV8_DECLARE(plain)
#if defined(KV8_X86)
KV8_DECLARE(avx2)
KV8_DECLARE(avx512)
#endif

extern "C" {

int64_t kv8_linear_scratch(int64_t num_rows, int64_t num_inputs) {
  // Tiles of 16 rows; vectors of at most 16 words of two values.
  return (num_rows + 15) / 16 * 16 * ((num_inputs + 31) / 32 * 32);
}

void kv8_operations_run(const kv8_operation* list, int64_t count, int64_t num_rows,
                        int32_t num_threads) {
  auto run = kv8::plain::operation;
#if defined(KV8_X86)
  if (kv8_isa() == 1) run = kv8::avx2::operation;
  if (kv8_isa() >= 2) run = kv8::avx512::operation;
#endif
  for (int64_t i = 0; i < count; ++i) run(list[i], num_rows, num_threads);
}
}
