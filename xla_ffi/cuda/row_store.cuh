// Adds rows, such as the gradient of a lookup, to a table in host memory.
#ifndef JAXFERRY_CUDA_ROW_STORE_CUH_
#define JAXFERRY_CUDA_ROW_STORE_CUH_

#include <cstdint>

#include "common/calls.h"
#include "cuda/convert.cuh"

namespace jaxferry::cuda {

inline constexpr int kRowStoreThreads = 256;

inline constexpr int kRowStretch = kConvertUnroll * kWarpSize;

// Adds this thread's items of a row, starting at `begin`: vectors of the destination if all its rows are aligned, else
// single numbers. All reads of host memory are in flight before the first is used.
template <Dtype kTo, Dtype kFrom>
__device__ __forceinline__ void AddVectors(uint4* destination, const BitsOf<kFrom>* added, int64_t begin, int64_t end,
                                           const ConvertArguments& adding) {
  const bool is_added_aligned = IsAligned(added);
  uint4 old[kConvertUnroll];
#pragma unroll
  for (int u = 0; u < kConvertUnroll; ++u) {
    const int64_t i = begin + u * kWarpSize;
    old[u] = i < end ? destination[i] : make_uint4(0, 0, 0, 0);
  }
#pragma unroll
  for (int u = 0; u < kConvertUnroll; ++u) {
    const int64_t i = begin + u * kWarpSize;
    if (i >= end) continue;
    destination[i] = ConvertVector<kTo, kFrom>(added + i * kVector<kTo>, is_added_aligned, old[u], adding);
  }
}

template <Dtype kTo, Dtype kFrom>
__device__ __forceinline__ void AddNumbers(BitsOf<kTo>* destination, const BitsOf<kFrom>* added, int64_t begin,
                                           int64_t end, const ConvertArguments& adding) {
  BitsOf<kTo> old[kConvertUnroll];
#pragma unroll
  for (int u = 0; u < kConvertUnroll; ++u) {
    const int64_t i = begin + u * kWarpSize;
    old[u] = i < end ? destination[i] : BitsOf<kTo>{0};
  }
#pragma unroll
  for (int u = 0; u < kConvertUnroll; ++u) {
    const int64_t i = begin + u * kWarpSize;
    if (i < end) destination[i] = ConvertOne<kTo, kFrom>(added[i], old[u], adding);
  }
}

// A warp takes part of a row at a time. Indices are distinct, so warps never write the same row.
template <Dtype kTo, Dtype kFrom>
__global__ void __launch_bounds__(kRowStoreThreads) RowStoreKernel(RowStore call, bool is_aligned) {
  const ConvertArguments adding = {nullptr, nullptr, 0, true, Dtype::kFloat32};
  const int64_t row_items = is_aligned ? call.columns / kVector<kTo> : call.columns;
  const int64_t stretches = (row_items + kRowStretch - 1) / kRowStretch;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarpSize;
  int64_t task = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpSize;
  for (; task < call.num_indices * stretches; task += num_warps) {
    const int64_t row = task / stretches;
    const int64_t begin = (task - row * stretches) * kRowStretch + threadIdx.x % kWarpSize;
    const int64_t index = call.indices[row];
    if (index < 0 || index >= call.rows) continue;
    auto* destination = static_cast<BitsOf<kTo>*>(call.destination) + index * call.columns;
    const auto* added = static_cast<const BitsOf<kFrom>*>(call.added) + row * call.columns;
    if (is_aligned) {
      AddVectors<kTo, kFrom>(reinterpret_cast<uint4*>(destination), added, begin, row_items, adding);
    } else {
      AddNumbers<kTo, kFrom>(destination, added, begin, row_items, adding);
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_ROW_STORE_CUH_
