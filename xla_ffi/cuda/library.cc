// The library's description, and the scratch operation.
#include "cuda/handler.h"
#include "cuda/operations.h"

// Variadic, because lists contain commas.
#define JAXFERRY_QUOTE_(...) #__VA_ARGS__
#define JAXFERRY_QUOTE(...) JAXFERRY_QUOTE_(__VA_ARGS__)

#ifndef JAXFERRY_JAXLIB_VERSION
#define JAXFERRY_JAXLIB_VERSION "unknown"
#endif
#ifndef JAXFERRY_NVCC_VERSION
#define JAXFERRY_NVCC_VERSION "unknown"
#endif
// Comma-separated numbers: 80, 90.
#ifndef JAXFERRY_ARCHITECTURES
#define JAXFERRY_ARCHITECTURES
#endif

#ifdef __clang__
#define JAXFERRY_COMPILER __VERSION__
#else
#define JAXFERRY_COMPILER "GCC " __VERSION__
#endif

namespace jaxferry {

static ffi::Error Scratch(ffi::Result<ffi::AnyBuffer>) { return ffi::Error::Success(); }

XLA_FFI_DEFINE_HANDLER_SYMBOL(jaxferry_scratch, Scratch, ffi::Ffi::Bind().Ret<ffi::AnyBuffer>());

}  // namespace jaxferry

const char* jaxferry_build_info() {
  return "{\"platform\": \"CUDA\", \"compiler\": \"" JAXFERRY_COMPILER "\", \"jaxlib\": \"" JAXFERRY_JAXLIB_VERSION
         "\", \"ffi_major\": " JAXFERRY_QUOTE(XLA_FFI_API_MAJOR) ", \"ffi_minor\": " JAXFERRY_QUOTE(
             XLA_FFI_API_MINOR) ", \"nvcc\": \"" JAXFERRY_NVCC_VERSION
                                "\", \"architectures\": [" JAXFERRY_QUOTE(JAXFERRY_ARCHITECTURES) "]}";
}

int jaxferry_abi() { return JAXFERRY_ABI; }

// Cannot report a failed device; the next operation on that device does.
void jaxferry_ferry_synchronize() {
  try {
    jaxferry::cuda::SynchronizeFerry();
  } catch (const std::exception&) {
  }
}

int jaxferry_ferry_wait_for(int64_t count, const void* const* data, const int64_t* bytes) {
  try {
    jaxferry::cuda::AwaitFerry(jaxferry::RangesOf(count, data, bytes));
    return 0;
  } catch (const std::exception&) {
    return 1;
  }
}
