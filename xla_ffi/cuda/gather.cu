#include "cuda/gather.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace jaxferry::cuda {

namespace {

// Returns four bytes of NaN: two numbers for 16-bit dtypes.
constexpr uint32_t NanPair(Dtype dtype) {
  return dtype == Dtype::kFloat32 ? 0x7fc00000u : dtype == Dtype::kBfloat16 ? 0x7fc07fc0u : 0x7e007e00u;
}

template <typename Word>
void LaunchGather(const Gather& call, Word nan, cudaStream_t stream) {
  const int64_t row_words = call.columns * ItemSize(call.dtype) / static_cast<int64_t>(sizeof(Word));
  const GatherArguments<Word> arguments = {static_cast<const Word*>(call.table),
                                           call.indices,
                                           static_cast<Word*>(call.result),
                                           call.num_indices,
                                           call.rows,
                                           row_words,
                                           nan};
  constexpr int64_t kStretch = kGatherUnroll * kWarpSize;
  const int64_t items = call.num_indices * ((row_words + kStretch - 1) / kStretch);
  const int64_t num_blocks = NumBlocks(items, kGatherThreads / kWarpSize, kBlocksOfDevice);
  Launch("the kernel that gathers rows", GatherKernel<Word>, num_blocks, kGatherThreads, stream, arguments);
}

}  // namespace

void GatherRows(const Gather& call, cudaStream_t stream) {
  if (call.num_indices == 0 || call.columns == 0) return;
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
