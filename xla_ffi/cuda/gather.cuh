// Rows of a table in host memory. The kernels copy bits: the only arithmetic is the NaN of an index outside the table.
//
// Each distinct row crosses the link once: the first position that names it reads the table, all others copy that
// position's row of the result.
#ifndef JAXFERRY_CUDA_GATHER_CUH_
#define JAXFERRY_CUDA_GATHER_CUH_

#include <cstdint>

#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

// A row is `row_words` words of type Word. A warp takes kGatherUnroll * 32 words of one row at a time; all their loads
// are in flight before the first is used, because a link's latency is long.
inline constexpr int kGatherUnroll = 4;
inline constexpr int kGatherThreads = 256;

template <typename Word>
struct GatherArguments {
  const Word* table;
  const int32_t* indices;
  Word* result;
  // The first position that names each row of the table.
  const int32_t* first;
  int64_t num_indices, rows, row_words;
  Word nan;
};

// Each `first` must hold a number above all positions.
__global__ void __launch_bounds__(kGatherThreads)
    FirstPositionKernel(const int32_t* indices, int32_t* first, int64_t num_indices, int64_t rows) {
  const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < num_indices; i += num_threads) {
    const int64_t index = indices[i];
    if (index >= 0 && index < rows) atomicMin(first + index, static_cast<int32_t>(i));
  }
}

// kRepeated: copies the rows of positions that are not their row's first, else reads the others from the table.
template <typename Word, bool kRepeated>
__global__ void __launch_bounds__(kGatherThreads) GatherKernel(GatherArguments<Word> a) {
  constexpr int kStretch = kGatherUnroll * kWarpSize;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpSize;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarpSize;
  const int64_t stretches = (a.row_words + kStretch - 1) / kStretch;
  for (int64_t item = warp; item < a.num_indices * stretches; item += num_warps) {
    const int64_t row = item / stretches;
    const int64_t begin = (item - row * stretches) * kStretch + lane;
    const int64_t index = a.indices[row];
    const bool is_inside = index >= 0 && index < a.rows;
    const int64_t first = is_inside ? a.first[index] : row;
    if ((first != row) != kRepeated) continue;
    const Word* source = kRepeated ? a.result + first * a.row_words : a.table + (is_inside ? index : 0) * a.row_words;
    Word words[kGatherUnroll];
#pragma unroll
    for (int u = 0; u < kGatherUnroll; ++u) {
      const int64_t position = begin + u * kWarpSize;
      words[u] = is_inside && position < a.row_words ? source[position] : a.nan;
    }
#pragma unroll
    for (int u = 0; u < kGatherUnroll; ++u) {
      const int64_t position = begin + u * kWarpSize;
      if (position < a.row_words) a.result[row * a.row_words + position] = words[u];
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_GATHER_CUH_
