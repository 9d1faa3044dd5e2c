// Failures of CUDA calls. The library throws them; a handler turns them into an ffi::Error (handler.h).
#ifndef JAXFERRY_CUDA_ERRORS_H_
#define JAXFERRY_CUDA_ERRORS_H_

#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

namespace jaxferry::cuda {

struct Failure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// A failure caused by the caller's argument.
struct BadArgument : Failure {
  using Failure::Failure;
};

inline void Check(cudaError_t status, const char* what) {
  if (status == cudaSuccess) return;
  // Clears the error, which the next unrelated call would report again.
  cudaGetLastError();
  throw Failure(std::string(what) + " failed: " + cudaGetErrorString(status));
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_ERRORS_H_
