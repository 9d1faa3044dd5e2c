// Instructions that convert 16-bit numbers (PTX ISA, "cvt"). CUDA's own headers for them need another package.
#ifndef JAXFERRY_CUDA_BITS_CUH_
#define JAXFERRY_CUDA_BITS_CUH_

#include <cstdint>

namespace jaxferry::cuda {

__device__ __forceinline__ float Float16ToFloat(uint16_t bits) {
  float value;
  asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
  return value;
}

__device__ __forceinline__ uint16_t FloatToFloat16(float value) {
  uint16_t bits;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

__device__ __forceinline__ uint16_t FloatToBfloat16(float value) {
  uint16_t bits;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
  return bits;
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_BITS_CUH_
