// In place of xla_ffi/cuda/bits.cuh, which is instructions of GPUs.
#ifndef JAXFERRY_CUDA_BITS_CUH_
#define JAXFERRY_CUDA_BITS_CUH_

#include <cuda_runtime.h>

#include <algorithm>
#include <cmath>
#include <cstdint>

namespace jaxferry::cuda {

inline float Float16ToFloat(uint16_t bits) {
  const float sign = bits >> 15 ? -1.0f : 1.0f;
  const int exponent = bits >> 10 & 31;
  const int fraction = bits & 1023;
  if (exponent == 31) return fraction != 0 ? NAN : sign * INFINITY;
  if (exponent == 0) return sign * std::ldexp(static_cast<float>(fraction), -24);
  return sign * std::ldexp(static_cast<float>(1024 + fraction), exponent - 25);
}

inline uint16_t FloatToFloat16(float value) {
  const auto sign = static_cast<uint16_t>(std::signbit(value) ? 0x8000 : 0);
  if (std::isnan(value)) return sign | 0x7e00;
  const float magnitude = std::fabs(value);
  // 65520 is half-way between the largest number and the next power of two.
  if (magnitude >= 65520.0f) return sign | 0x7c00;
  if (magnitude == 0.0f) return sign;
  int exponent = 0;
  std::frexp(magnitude, &exponent);
  const int shift = std::max(exponent - 11, -24);
  const auto steps = static_cast<int>(std::nearbyint(std::ldexp(magnitude, -shift)));
  // A carry out of the fraction goes into the exponent, as it should.
  return sign | static_cast<uint16_t>(((shift + 24) << 10) + steps);
}

inline uint16_t FloatToBfloat16(float value) {
  if (std::isnan(value)) return 0x7fff;
  const uint32_t bits = __float_as_uint(value);
  return static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_BITS_CUH_
