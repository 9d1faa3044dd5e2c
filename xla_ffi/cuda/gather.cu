#include <string>

#include "cuda/gather.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace jaxferry::cuda {

namespace {

// Four equal bytes, so that it can be set by bytes.
constexpr int32_t kNoPosition = 0x7f7f7f7f;

// Returns four bytes of NaN: two numbers for 16-bit dtypes.
constexpr uint32_t NanPair(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 0x7fc00000u : dtype == Dtype::kBfloat16 ? 0x7fc07fc0u : 0x7e007e00u;
}

template <typename Word>
void LaunchGather(const Gather& call, Word nan, cudaStream_t stream) {
  const int64_t row_words = call.columns * ItemSize(call.dtype) / static_cast<int64_t>(sizeof(Word));
  auto* first = static_cast<int32_t*>(call.scratch);
  const GatherArguments<Word> arguments = {static_cast<const Word*>(call.table),
                                           call.indices,
                                           static_cast<Word*>(call.result),
                                           first,
                                           call.num_indices,
                                           call.rows,
                                           row_words,
                                           nan};
  Check(cudaMemsetAsync(first, kNoPosition & 0xff, call.rows * sizeof(int32_t), stream),
        "clearing the first positions of rows");
  Launch("the kernel that finds the first positions of rows", FirstPositionKernel,
         NumBlocks(call.num_indices, kGatherThreads, kBlocksOfDevice), kGatherThreads, stream, call.indices, first,
         call.num_indices, call.rows);
  constexpr int64_t kStretch = kGatherUnroll * kWarpSize;
  const int64_t stretches = call.num_indices * ((row_words + kStretch - 1) / kStretch);
  constexpr int64_t kWarps = kGatherThreads / kWarpSize;
  Launch("the kernel that gathers rows", GatherKernel<Word, false>, NumBlocks(stretches, kWarps, kBlocksOfLink),
         kGatherThreads, stream, arguments);
  Launch("the kernel that repeats rows", GatherKernel<Word, true>, NumBlocks(stretches, kWarps, kBlocksOfDevice),
         kGatherThreads, stream, arguments);
}

}  // namespace

void GatherRows(const Gather& call, cudaStream_t stream) {
  if (call.num_indices == 0 || call.columns == 0) return;
  if (call.num_indices > kNoPosition) {
    throw BadArgument("a lookup has at most " + std::to_string(kNoPosition) + " indices, got " +
                      std::to_string(call.num_indices));
  }
  const uint32_t nan = NanPair(call.dtype);
  // Chooses the widest word that divides the rows of both sides.
  const uintptr_t addresses = reinterpret_cast<uintptr_t>(call.table) | reinterpret_cast<uintptr_t>(call.result) |
                              static_cast<uintptr_t>(call.columns * ItemSize(call.dtype));
  if (addresses % 16 == 0) {
    LaunchGather(call, make_uint4(nan, nan, nan, nan), stream);
  } else if (addresses % 4 == 0) {
    LaunchGather(call, nan, stream);
  } else {
    LaunchGather(call, static_cast<uint16_t>(nan), stream);
  }
}

}  // namespace jaxferry::cuda
