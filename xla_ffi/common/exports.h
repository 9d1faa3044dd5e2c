// Everything that a library exports, under the same names on each platform; documented in README.md.
#ifndef JAXFERRY_COMMON_EXPORTS_H_
#define JAXFERRY_COMMON_EXPORTS_H_

#include <cstdint>

#include "xla/ffi/api/c_api.h"

#define JAXFERRY_ABI 9

#pragma GCC visibility push(default)

namespace jaxferry {
extern "C" {

XLA_FFI_Error* jaxferry_scratch(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_dha_gather(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_dha_matmul(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_dha_read(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_gradient_store(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_dha_matmul_gradient(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_row_store(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_ferry_load(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_ferry_store(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_ferry_wait(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_ferry_vacate(XLA_FFI_CallFrame*);
XLA_FFI_Error* jaxferry_mark(XLA_FFI_CallFrame*);

}  // extern "C"
}  // namespace jaxferry

extern "C" {

const char* jaxferry_build_info();
int jaxferry_abi();
void jaxferry_ferry_synchronize();
int jaxferry_ferry_wait_for(int64_t count, const void* const* data, const int64_t* bytes);
void jaxferry_marks_open(const void* token, int64_t capacity);
void jaxferry_marks_close(const void* token);
void jaxferry_marks_read(int64_t count, const void* const* tokens, const int64_t* numbers, double* starts_s,
                         double* ends_s);

// CUDA's library alone. Finds cuBLASLt's algorithms for a product's panels before it runs; `sizes` are as in
// matmul_handlers.cc. Returns how many algorithms the device knows, or -1 if it fails.
int64_t jaxferry_plan_product(int ordinal, int is_gradient, const int64_t* sizes);

// The CPU's library alone.
void jaxferry_ferry_set_bandwidth(int direction, double bytes_per_s);
void jaxferry_ferry_set_delay(double seconds, unsigned seed);
void jaxferry_set_blas(void* sgemm);
int64_t jaxferry_set_host_threads(int64_t count);
int jaxferry_set_host_simd(int simd);
int jaxferry_host_update(const void* record);
int64_t jaxferry_host_step_bytes();
int jaxferry_host_split(const void* masters, const void* copy, int64_t size, void* rest);
void jaxferry_host_join(const void* copy, const void* low, const void* up, int64_t size, void* masters);
void jaxferry_host_clear(void* destination, int64_t num_bytes);
void jaxferry_host_add(int from, const void* source, int to, void* destination, int64_t size, int adds);
void jaxferry_host_add_rows(int from, const void* rows, const int32_t* indices, int64_t num_rows, int64_t columns,
                            int to, void* table, int64_t start, int64_t stop);

}  // extern "C"

#pragma GCC visibility pop

#endif  // JAXFERRY_COMMON_EXPORTS_H_
