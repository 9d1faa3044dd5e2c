// What puts kernels onto a stream. No XLA types. All throw Failure.
#ifndef JAXFERRY_CUDA_KERNELS_H_
#define JAXFERRY_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/calls.h"

namespace jaxferry::cuda {

void GatherRows(const Gather& call, cudaStream_t stream);

void AddRows(const RowStore& call, cudaStream_t stream);

// Products by kernels that read the weight in host memory themselves.
void DirectMatmul(const Matmul& call, cudaStream_t stream);
bool IsBestDirectly(const Matmul& call);

// Copies that a kernel makes together, for those that are too small for a copy engine.
void CopyTogether(const Copies& copies, cudaStream_t stream);

// destination[i] = (or +=, to accumulate) source[i] by way of `round_to`; either may be in host memory.
struct Conversion {
  Dtype dtype, destination_dtype;
  const void* source;
  void* destination;
  int64_t size;
  bool accumulate;
  Dtype round_to = Dtype::kFloat32;
};

// Whether it is a copy of bytes, which a copy engine makes without taking room from kernels.
inline bool IsCopy(const Conversion& conversion) {
  return conversion.dtype == conversion.destination_dtype && !conversion.accumulate &&
         (conversion.round_to == Dtype::kFloat32 || conversion.round_to == conversion.dtype);
}

void Convert(const Conversion& conversion, int64_t most_blocks, cudaStream_t stream);

// Enough blocks to fill a link, few enough to leave room for a product that runs at the same time.
inline constexpr int64_t kBlocksOfLink = 32;
// Enough to fill a device.
inline constexpr int64_t kBlocksOfDevice = 1024;

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_KERNELS_H_
