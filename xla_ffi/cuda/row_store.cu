#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/row_store.cuh"

namespace jaxferry::cuda {

namespace {

template <Dtype kTo, Dtype kFrom>
void LaunchRowStore(const RowStore& call, cudaStream_t stream) {
  const int64_t row_bytes = call.columns * ItemSize(kTo);
  const bool is_aligned =
      reinterpret_cast<uintptr_t>(call.destination) % kVectorBytes == 0 && row_bytes % kVectorBytes == 0;
  const int64_t row_items = is_aligned ? row_bytes / kVectorBytes : call.columns;
  const int64_t tasks = call.num_indices * ((row_items + kRowStretch - 1) / kRowStretch);
  const int64_t num_blocks = NumBlocks(tasks, kRowStoreThreads / kWarpSize, kBlocksOfDevice);
  Launch("the kernel that adds rows", RowStoreKernel<kTo, kFrom>, num_blocks, kRowStoreThreads, stream, call,
         is_aligned);
}

template <Dtype kTo>
void LaunchRowStoreTo(const RowStore& call, cudaStream_t stream) {
  switch (call.dtype) {
    case Dtype::kFloat32:
      return LaunchRowStore<kTo, Dtype::kFloat32>(call, stream);
    case Dtype::kBfloat16:
      return LaunchRowStore<kTo, Dtype::kBfloat16>(call, stream);
    case Dtype::kFloat16:
      return LaunchRowStore<kTo, Dtype::kFloat16>(call, stream);
  }
}

}  // namespace

void AddRows(const RowStore& call, cudaStream_t stream) {
  if (call.num_indices == 0 || call.columns == 0) return;
  switch (call.destination_dtype) {
    case Dtype::kFloat32:
      return LaunchRowStoreTo<Dtype::kFloat32>(call, stream);
    case Dtype::kBfloat16:
      return LaunchRowStoreTo<Dtype::kBfloat16>(call, stream);
    case Dtype::kFloat16:
      return LaunchRowStoreTo<Dtype::kFloat16>(call, stream);
  }
}

}  // namespace jaxferry::cuda
