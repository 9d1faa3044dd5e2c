// Where operands lie. A kernel that dereferences what it cannot reach makes the device unusable for the process, so
// operations check before they queue anything.
#ifndef JAXFERRY_CUDA_LOCATION_H_
#define JAXFERRY_CUDA_LOCATION_H_

#include <cuda_runtime_api.h>

#include <string>

#include "common/calls.h"
#include "cuda/errors.h"

namespace jaxferry::cuda {

inline cudaPointerAttributes AttributesOf(const void* data) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, data) != cudaSuccess) {
    cudaGetLastError();
    attributes.type = cudaMemoryTypeUnregistered;
  }
  return attributes;
}

inline const char* LocationOf(const cudaPointerAttributes& attributes) {
  switch (attributes.type) {
    case cudaMemoryTypeDevice:
      return "device memory";
    case cudaMemoryTypeHost:
      return "pinned host memory";
    case cudaMemoryTypeManaged:
      return "managed memory";
    default:
      return "host memory that is not pinned";
  }
}

// Throws BadArgument unless the data, if there are any, lie in device memory.
inline void CheckOnDevice(const void* data, int64_t bytes, const char* name) {
  if (bytes == 0) return;
  const cudaPointerAttributes found = AttributesOf(data);
  if (found.type == cudaMemoryTypeDevice || found.type == cudaMemoryTypeManaged) return;
  throw BadArgument(std::string(name) + " must lie in device memory, but lies in " + LocationOf(found));
}

// Throws BadArgument unless the data, if there are any, lie in pinned host memory.
inline void CheckPinned(const void* data, int64_t bytes, const char* name) {
  if (bytes == 0) return;
  const cudaPointerAttributes found = AttributesOf(data);
  if (found.type == cudaMemoryTypeHost || found.type == cudaMemoryTypeManaged) return;
  throw BadArgument(std::string(name) + " must lie in pinned host memory, but lies in " + LocationOf(found));
}

// Likewise, and kernels must reach the data by their host address. Memory that was pinned after its allocation
// (cudaHostRegister, as for NUMA) has another address on devices without cudaDevAttrCanUseHostPointerForRegisteredMem.
inline void CheckReachable(const void* data, int64_t bytes, const char* name) {
  CheckPinned(data, bytes, name);
  if (bytes == 0 || AttributesOf(data).devicePointer == data) return;
  throw BadArgument(std::string(name) + " lies in pinned host memory that the device cannot reach by its host address");
}

inline void CheckLoads(const Copies& copies) {
  for (const Copy& copy : copies) {
    CheckPinned(copy.source, copy.bytes, "the host vector");
    CheckOnDevice(copy.destination, copy.bytes, "the array");
  }
}

inline void CheckStores(const Copies& copies) {
  for (const Copy& copy : copies) {
    CheckOnDevice(copy.source, copy.bytes, "the array");
    if (copy.add) {
      CheckReachable(copy.destination, copy.bytes, "the host vector");
    } else {
      CheckPinned(copy.destination, copy.bytes, "the host vector");
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_LOCATION_H_
