// Launches kernels, and sizes their grids.
#ifndef JAXFERRY_CUDA_LAUNCH_H_
#define JAXFERRY_CUDA_LAUNCH_H_

#include <cuda_runtime.h>

#include <algorithm>
#include <cstdint>

#include "cuda/errors.h"

namespace jaxferry::cuda {

template <typename... Parameters, typename... Arguments>
void Launch(const char* what, void (*kernel)(Parameters...), int64_t num_blocks, int num_threads, cudaStream_t stream,
            Arguments... arguments) {
  cudaLaunchConfig_t config = {};
  config.gridDim = dim3(static_cast<unsigned>(num_blocks));
  config.blockDim = dim3(static_cast<unsigned>(num_threads));
  config.stream = stream;
  Check(cudaLaunchKernelEx(&config, kernel, static_cast<Parameters>(arguments)...), what);
}

// Returns the number of blocks for `num_items` items of work, `per_block` per block: at least one, at most `most`.
inline int64_t NumBlocks(int64_t num_items, int64_t per_block, int64_t most) {
  return std::max<int64_t>(1, std::min((num_items + per_block - 1) / per_block, most));
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_LAUNCH_H_
