// Adds rows, such as the gradient of a lookup, to those of a table in host memory.
#ifndef JAXFERRY_CUDA_ROW_STORE_CUH_
#define JAXFERRY_CUDA_ROW_STORE_CUH_

#include <cstdint>

#include "common/calls.h"
#include "cuda/convert.cuh"

namespace jaxferry::cuda {

inline constexpr int kRowStoreThreads = 256;

// A warp takes a stretch of a row at a time, in vectors of the destination where all its rows are aligned, else in
// numbers; all reads of host memory are under way before the first is used. No index occurs twice: no two warps meet.
template <Dtype kTo, Dtype kFrom>
__global__ void __launch_bounds__(kRowStoreThreads) RowStoreKernel(RowStore call, bool is_aligned) {
  constexpr int kStretch = kConvertUnroll * kWarpSize;
  const ConvertArguments adding = {nullptr, nullptr, 0, true, Dtype::kFloat32};
  const int64_t item = is_aligned ? kVector<kTo> : 1;
  const int64_t row_items = call.columns / item;
  const int64_t stretches = (row_items + kStretch - 1) / kStretch;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarpSize;
  int64_t task = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpSize;
  for (; task < call.num_indices * stretches; task += num_warps) {
    const int64_t row = task / stretches;
    const int64_t begin = (task - row * stretches) * kStretch + threadIdx.x % kWarpSize;
    const int64_t index = call.indices[row];
    if (index < 0 || index >= call.rows) continue;
    auto* destination = static_cast<BitsOf<kTo>*>(call.destination) + index * call.columns;
    const auto* added = static_cast<const BitsOf<kFrom>*>(call.added) + row * call.columns;
    const bool is_added_aligned = IsAligned(added);
    uint4 old[kConvertUnroll];
#pragma unroll
    for (int u = 0; u < kConvertUnroll; ++u) {
      const int64_t i = begin + u * kWarpSize;
      old[u] = make_uint4(0, 0, 0, 0);
      if (i >= row_items) continue;
      if (is_aligned) {
        old[u] = reinterpret_cast<const uint4*>(destination)[i];
      } else {
        old[u].x = destination[i];
      }
    }
#pragma unroll
    for (int u = 0; u < kConvertUnroll; ++u) {
      const int64_t i = begin + u * kWarpSize;
      if (i >= row_items) continue;
      if (is_aligned) {
        const uint4 sum = ConvertVector<kTo, kFrom>(added + i * item, is_added_aligned, old[u], adding);
        reinterpret_cast<uint4*>(destination)[i] = sum;
      } else {
        destination[i] = ConvertOne<kTo, kFrom>(added[i], static_cast<BitsOf<kTo>>(old[u].x), adding);
      }
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_ROW_STORE_CUH_
