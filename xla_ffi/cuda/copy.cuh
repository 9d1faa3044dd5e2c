// Copies many small ranges of host memory in one kernel.
#ifndef JAXFERRY_CUDA_COPY_CUH_
#define JAXFERRY_CUDA_COPY_CUH_

#include <cstdint>

#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

// Kernel parameters are limited to 4 KiB.
inline constexpr int kPartsTogether = 128;
inline constexpr int kCopyThreads = 256;

struct CopyPart {
  const void* source;
  void* destination;
  int64_t bytes;
};

struct CopyArguments {
  CopyPart parts[kPartsTogether];
};

// One block per part. Sizes and addresses are even: every supported dtype has at least two bytes.
__global__ void __launch_bounds__(kCopyThreads) CopyKernel(CopyArguments a) {
  const CopyPart part = a.parts[blockIdx.x];
  const auto* source = static_cast<const unsigned char*>(part.source);
  auto* destination = static_cast<unsigned char*>(part.destination);
  int64_t vector_bytes = 0;
  if (IsAligned(source) && IsAligned(destination)) vector_bytes = part.bytes / kVectorBytes * kVectorBytes;
  for (int64_t i = int64_t{threadIdx.x} * kVectorBytes; i < vector_bytes; i += kCopyThreads * kVectorBytes) {
    *reinterpret_cast<uint4*>(destination + i) = *reinterpret_cast<const uint4*>(source + i);
  }
  for (int64_t i = vector_bytes + threadIdx.x * 2; i < part.bytes; i += kCopyThreads * 2) {
    *reinterpret_cast<uint16_t*>(destination + i) = *reinterpret_cast<const uint16_t*>(source + i);
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_COPY_CUH_
