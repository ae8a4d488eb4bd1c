// The C interface of step.h, on the build in use.
#include "step.h"

#if defined(KV8_AMX)
#include "linear_amx.h"
#endif

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

int64_t kv8_linear_most_rows(void) {
#if defined(KV8_AMX)
  if (kv8_isa() == 2 && kv8::amx::available()) return 64;
#endif
  return 8;
}

int64_t kv8_linear_scratch(int64_t num_rows, int64_t num_inputs) {
  num_rows = (num_rows + 15) / 16 * 16;  // tiles of 16 rows
  return num_rows * ((num_inputs + 31) / 32 * 32);  // the widest vectors: 16 lanes of 2 values
}

void kv8_operations_run(const kv8_operation* list, int64_t count, int64_t num_rows,
                        int32_t num_threads) {
  auto run = kv8::plain::operation;
#if defined(KV8_X86)
  if (kv8_isa() == 2) run = kv8::avx512::operation;
  if (kv8_isa() == 1) run = kv8::avx2::operation;
#endif
  for (int64_t i = 0; i < count; ++i) run(list[i], num_rows, num_threads);
}
}
