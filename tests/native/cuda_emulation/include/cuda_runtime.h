// The language of kernels, on the CPU.
#ifndef EMULATION_CUDA_RUNTIME_H_
#define EMULATION_CUDA_RUNTIME_H_

#include <cuda_runtime_api.h>

#include <cstring>

#define __global__
#define __device__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __align__(bytes) __attribute__((aligned(bytes)))
// Blocks run one after the other.
#define __shared__ static

struct alignas(16) uint4 {
  uint32_t x, y, z, w;
};

inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w) { return {x, y, z, w}; }

inline float __uint_as_float(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof(value));
  return value;
}

inline uint32_t __float_as_uint(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof(bits));
  return bits;
}

// Those of the thread whose turn it is.
extern dim3 threadIdx, blockIdx, blockDim, gridDim;

// Threads take turns.
inline void atomicMin(int32_t* place, int32_t value) {
  if (value < *place) *place = value;
}
void __syncthreads();
float __shfl_xor_sync(unsigned mask, float value, int lane_mask);
int __shfl_sync(unsigned mask, int value, int lane);
unsigned __ballot_sync(unsigned mask, int predicate);
inline int __ffs(int value) { return __builtin_ffs(value); }

struct cudaLaunchConfig_t {
  dim3 gridDim, blockDim;
  size_t dynamicSmemBytes = 0;
  cudaStream_t stream = nullptr;
};

template <typename... Parameters, typename... Arguments>
cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t* config, void (*kernel)(Parameters...),
                               Arguments... arguments) {
  if (config->gridDim.x == 0 || config->blockDim.x == 0 || emulation::Fails()) return cudaErrorInvalidValue;
  const unsigned num_blocks = config->gridDim.x;
  const unsigned num_threads = config->blockDim.x;
  emulation::Enqueue(config->stream,
                     [=] { emulation::RunGrid(num_blocks, num_threads, [&] { kernel(arguments...); }); });
  return cudaSuccess;
}

#endif  // EMULATION_CUDA_RUNTIME_H_
