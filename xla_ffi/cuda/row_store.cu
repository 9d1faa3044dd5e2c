// Adds rows, such as the gradient of a lookup, to those of a table in host memory.
#include "cuda/kernels.h"
#include "cuda/launch.h"
#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

namespace {

constexpr int kThreads = 256;

// Neighbouring threads take neighbouring columns. No index occurs twice, so no two threads meet.
__global__ void __launch_bounds__(kThreads) RowStoreKernel(RowStore call) {
  const int64_t size = call.num_indices * call.columns;
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < size; i += stride) {
    const int64_t row = i / call.columns;
    const int64_t index = call.indices[row];
    if (index < 0 || index >= call.rows) continue;
    const int64_t place = index * call.columns + (i - row * call.columns);
    const float before = LoadNumber(call.destination, call.destination_dtype, place);
    StoreNumber(call.destination, call.destination_dtype, place, before + LoadNumber(call.added, call.dtype, i));
  }
}

}  // namespace

void AddRows(const RowStore& call, cudaStream_t stream) {
  if (call.num_indices == 0 || call.columns == 0) return;
  const int64_t num_blocks = NumBlocks(call.num_indices * call.columns, kThreads, kBlocksOfDevice);
  Launch("the kernel that adds rows", RowStoreKernel, num_blocks, kThreads, stream, call);
}

}  // namespace jaxferry::cuda
