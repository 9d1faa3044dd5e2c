// The CUDA library's handlers for programs on the CPU: each returns when the program's stream would have come past it,
// which is when XLA lets the program go on. Other streams may lag behind.
#include <mutex>

#include "common/exports.h"

namespace emulation {

std::unique_lock<std::mutex> Lock();
void DrainProgram();

static XLA_FFI_Error* Call(XLA_FFI_Error* (*handler)(XLA_FFI_CallFrame*), XLA_FFI_CallFrame* frame) {
  const auto lock = Lock();
  XLA_FFI_Error* error = handler(frame);
  // XLA asks each handler what it is before it calls it.
  DrainProgram();
  return error;
}

}  // namespace emulation

#define EMULATE(name)                                                                                 \
  extern "C" __attribute__((visibility("default"))) XLA_FFI_Error* emulated_##name(XLA_FFI_CallFrame* frame) { \
    return emulation::Call(jaxferry::jaxferry_##name, frame);                                          \
  }

EMULATE(scratch)
EMULATE(dha_gather)
EMULATE(dha_matmul)
EMULATE(dha_read)
EMULATE(gradient_store)
EMULATE(dha_matmul_gradient)
EMULATE(ferry_load)
EMULATE(ferry_store)
EMULATE(ferry_wait)

extern "C" __attribute__((visibility("default"))) void emulation_synchronize() {
  const auto lock = emulation::Lock();
  jaxferry_ferry_synchronize();
}
