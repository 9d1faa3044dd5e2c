// The common frame of all handlers.
#ifndef JAXFERRY_CUDA_HANDLER_H_
#define JAXFERRY_CUDA_HANDLER_H_

#include <cuda_runtime_api.h>

#include <initializer_list>
#include <string>

#include "common/checks.h"
#include "common/exports.h"
#include "cuda/device.h"
#include "cuda/errors.h"

// Every handler gets the stream that XLA runs the program on, and the device's ordinal.
#define JAXFERRY_BIND() ffi::Ffi::Bind().Ctx<ffi::PlatformStream<cudaStream_t>>().Ctx<ffi::DeviceOrdinal>()

namespace jaxferry::cuda {

struct Named {
  const char* name;
  ffi::AnyBuffer buffer;
};

inline std::string DescribeAll(std::initializer_list<Named> buffers) {
  std::string text;
  for (const Named& named : buffers) {
    text += (text.empty() ? " (" : ", ") + std::string(named.name) + " " + Describe(named.buffer);
  }
  return text.empty() ? text : text + ")";
}

// Calls `body(device)` with the device current and locked. Turns a failure into an error that names the operation and
// the shapes of its arguments.
template <typename Body>
ffi::Error RunOn(const char* operation, int ordinal, std::initializer_list<Named> buffers, Body&& body) {
  try {
    const CurrentDevice current(ordinal);
    Device& device = Device::Get(ordinal);
    std::lock_guard<std::mutex> lock(device.mutex);
    body(device);
    return ffi::Error::Success();
  } catch (const BadArgument& failure) {
    return Invalid(operation, failure.what() + DescribeAll(buffers));
  } catch (const Failure& failure) {
    return ffi::Error::Internal(std::string(operation) + ": " + failure.what() + DescribeAll(buffers));
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_HANDLER_H_
