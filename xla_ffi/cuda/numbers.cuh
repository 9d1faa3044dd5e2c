// Loads and stores float32, bfloat16 and float16 numbers, singly or sixteen bytes at once; registers hold fp32.
#ifndef JAXFERRY_CUDA_NUMBERS_CUH_
#define JAXFERRY_CUDA_NUMBERS_CUH_

#include <cuda_runtime.h>

#include <cstdint>

#include "common/dtypes.h"
#include "cuda/bits.cuh"

namespace jaxferry::cuda {

inline constexpr int kWarpSize = 32;
inline constexpr int kVectorBytes = 16;

template <Dtype kDtype>
struct Number;

template <>
struct Number<Dtype::kFloat32> {
  using Bits = uint32_t;
  static __device__ __forceinline__ float Decode(Bits bits) { return __uint_as_float(bits); }
  static __device__ __forceinline__ Bits Encode(float value) { return __float_as_uint(value); }
};

template <>
struct Number<Dtype::kBfloat16> {
  using Bits = uint16_t;
  static __device__ __forceinline__ float Decode(Bits bits) { return __uint_as_float(uint32_t{bits} << 16); }
  static __device__ __forceinline__ Bits Encode(float value) { return FloatToBfloat16(value); }
};

template <>
struct Number<Dtype::kFloat16> {
  using Bits = uint16_t;
  static __device__ __forceinline__ float Decode(Bits bits) { return Float16ToFloat(bits); }
  static __device__ __forceinline__ Bits Encode(float value) { return FloatToFloat16(value); }
};

template <Dtype kDtype>
using BitsOf = typename Number<kDtype>::Bits;

// The count of numbers in sixteen bytes.
template <Dtype kDtype>
inline constexpr int kVector = kVectorBytes / static_cast<int>(sizeof(BitsOf<kDtype>));

template <Dtype kDtype>
__device__ __forceinline__ void Unpack(uint4 packed, float (&values)[kVector<kDtype>]) {
  const uint32_t words[4] = {packed.x, packed.y, packed.z, packed.w};
  if constexpr (kDtype == Dtype::kFloat32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) values[i] = Number<kDtype>::Decode(words[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[2 * i] = Number<kDtype>::Decode(static_cast<uint16_t>(words[i] & 0xffffu));
      values[2 * i + 1] = Number<kDtype>::Decode(static_cast<uint16_t>(words[i] >> 16));
    }
  }
}

template <Dtype kDtype>
__device__ __forceinline__ uint4 Pack(const float (&values)[kVector<kDtype>]) {
  uint32_t words[4];
  if constexpr (kDtype == Dtype::kFloat32) {
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] = Number<kDtype>::Encode(values[i]);
  } else {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      words[i] =
          uint32_t{Number<kDtype>::Encode(values[2 * i])} | (uint32_t{Number<kDtype>::Encode(values[2 * i + 1])} << 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

__device__ __forceinline__ bool IsAligned(const void* data) {
  return reinterpret_cast<uintptr_t>(data) % kVectorBytes == 0;
}

// Loads `count` numbers, padded with zeros to sixteen bytes; `is_aligned`: `data` is aligned to sixteen bytes.
template <Dtype kDtype>
__device__ __forceinline__ uint4 LoadVector(const BitsOf<kDtype>* data, int64_t count, bool is_aligned) {
  if (is_aligned && count >= kVector<kDtype>) return *reinterpret_cast<const uint4*>(data);
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kVector<kDtype>; ++i) {
    const uint32_t bits = i < count ? data[i] : 0;
    if constexpr (kDtype == Dtype::kFloat32) {
      words[i] = bits;
    } else {
      words[i / 2] |= bits << (i % 2 * 16);
    }
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// For dtypes that are uniform over all threads but known only at run time.
__device__ __forceinline__ float LoadNumber(const void* data, Dtype dtype, int64_t index) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(data)[index];
  const uint16_t bits = static_cast<const uint16_t*>(data)[index];
  return dtype == Dtype::kBfloat16 ? Number<Dtype::kBfloat16>::Decode(bits) : Number<Dtype::kFloat16>::Decode(bits);
}

__device__ __forceinline__ void StoreNumber(void* data, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::kFloat32) {
    static_cast<float*>(data)[index] = value;
  } else {
    static_cast<uint16_t*>(data)[index] =
        dtype == Dtype::kBfloat16 ? Number<Dtype::kBfloat16>::Encode(value) : Number<Dtype::kFloat16>::Encode(value);
  }
}

// Rounds a value to a dtype.
__device__ __forceinline__ float Round(float value, Dtype dtype) {
  if (dtype == Dtype::kBfloat16) {
    return Number<Dtype::kBfloat16>::Decode(Number<Dtype::kBfloat16>::Encode(value));
  }
  if (dtype == Dtype::kFloat16) return Number<Dtype::kFloat16>::Decode(Number<Dtype::kFloat16>::Encode(value));
  return value;
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_NUMBERS_CUH_
