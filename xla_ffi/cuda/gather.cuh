// Rows of a table in host memory. The kernels copy bits: the only arithmetic is the NaN of an index outside the table.
//
// Each distinct row crosses the link once: the first position that names it reads the table, all others copy that
// position's row of the result.
#ifndef JAXFERRY_CUDA_GATHER_CUH_
#define JAXFERRY_CUDA_GATHER_CUH_

#include <cstdint>

#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

// A row is `row_words` words of type Word. A warp copies kGatherUnroll * 32 words of a row, a stretch, at once, and
// kGatherStretches of them together: all their loads are in flight before the first is used, because a link's latency
// is long.
inline constexpr int kGatherUnroll = 4;
inline constexpr int kGatherStretches = 2;
inline constexpr int kGatherThreads = 512;

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
//
// Each lane looks up one of the next stretches of its warp, so that the warp waits once for the indices of many.
template <typename Word, bool kRepeated>
__global__ void __launch_bounds__(kGatherThreads) GatherKernel(GatherArguments<Word> a) {
  constexpr int kStretch = kGatherUnroll * kWarpSize;
  constexpr unsigned kAllLanes = 0xffffffffu;
  constexpr int32_t kOutside = -1;
  const int lane = threadIdx.x % kWarpSize;
  const int64_t warp = (int64_t{blockIdx.x} * blockDim.x + threadIdx.x) / kWarpSize;
  const int64_t num_warps = int64_t{gridDim.x} * blockDim.x / kWarpSize;
  const int64_t row_stretches = (a.row_words + kStretch - 1) / kStretch;
  const int64_t num_stretches = a.num_indices * row_stretches;
  const int64_t share = (num_stretches + num_warps - 1) / num_warps;
  // Fewer than there are lanes where other warps would have none.
  const int64_t per_step = share < kWarpSize ? share : kWarpSize;
  for (int64_t next = warp * per_step; next < num_stretches; next += num_warps * per_step) {
    const int64_t stretch = next + lane;
    const bool is_any = lane < per_step && stretch < num_stretches;
    const int64_t row = is_any ? stretch / row_stretches : 0;
    const int32_t index = is_any ? a.indices[row] : kOutside;
    const bool is_inside = index >= 0 && index < a.rows;
    const int64_t first = is_inside ? a.first[index] : row;
    // The row of the result or of the table that is copied.
    const int32_t origin = !is_inside ? kOutside : kRepeated ? static_cast<int32_t>(first) : index;
    unsigned chosen = __ballot_sync(kAllLanes, is_any && (first != row) == kRepeated);
    while (chosen != 0) {
      Word words[kGatherStretches][kGatherUnroll];
      Word* target[kGatherStretches];
      int64_t num_words[kGatherStretches];
#pragma unroll
      for (int s = 0; s < kGatherStretches; ++s) {
        const bool is_one = chosen != 0;
        const int owner = is_one ? __ffs(static_cast<int>(chosen)) - 1 : 0;
        chosen &= chosen - 1;
        const int64_t its_row = __shfl_sync(kAllLanes, static_cast<int32_t>(row), owner);
        const int32_t its_origin = __shfl_sync(kAllLanes, origin, owner);
        const int64_t begin = (next + owner - its_row * row_stretches) * kStretch + lane;
        target[s] = a.result + its_row * a.row_words + begin;
        num_words[s] = is_one ? a.row_words - begin : 0;
        const int64_t source_row = its_origin == kOutside ? 0 : its_origin;
        const Word* source = (kRepeated ? a.result : a.table) + source_row * a.row_words + begin;
#pragma unroll
        for (int u = 0; u < kGatherUnroll; ++u) {
          const int place = u * kWarpSize;
          words[s][u] = its_origin != kOutside && place < num_words[s] ? source[place] : a.nan;
        }
      }
#pragma unroll
      for (int s = 0; s < kGatherStretches; ++s) {
#pragma unroll
        for (int u = 0; u < kGatherUnroll; ++u) {
          if (u * kWarpSize < num_words[s]) target[s][u * kWarpSize] = words[s][u];
        }
      }
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_GATHER_CUH_
