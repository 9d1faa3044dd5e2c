// XLA's, with a stream for programs on the CPU.
#ifndef EMULATION_FFI_H_
#define EMULATION_FFI_H_

#include <cuda_runtime_api.h>

#include_next "xla/ffi/api/ffi.h"

namespace emulation {

// The stream that programs run on.
cudaStream_t ProgramStream();

}  // namespace emulation

namespace xla::ffi {

template <>
struct CtxDecoding<PlatformStream<cudaStream_t>> {
  using Type = cudaStream_t;

  static std::optional<Type> Decode(const XLA_FFI_Api*, XLA_FFI_ExecutionContext*, DiagnosticEngine&) {
    return emulation::ProgramStream();
  }
};

}  // namespace xla::ffi

#endif  // EMULATION_FFI_H_
