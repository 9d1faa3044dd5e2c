#include "cuda/rows.cuh"

#include "cuda/launch.h"

namespace jaxferry::cuda {

void ReadRows(const HostRows& rows, cudaStream_t stream) {
  if (rows.num_rows == 0 || rows.row_bytes == 0) return;
  const auto places = reinterpret_cast<uintptr_t>(rows.source) | reinterpret_cast<uintptr_t>(rows.destination) |
                      static_cast<uintptr_t>(rows.row_bytes | rows.source_pitch | rows.destination_pitch);
  const bool is_aligned = places % kVectorBytes == 0;
  // A row that starts inside a vector lies in one more.
  const int64_t num_vectors = (rows.row_bytes + kVectorBytes - 1) / kVectorBytes + (is_aligned ? 0 : 1);
  int lanes = 1;
  while (lanes < kWarpSize && lanes < num_vectors) lanes *= 2;
  const RowsArguments arguments = {rows, lanes, static_cast<uint32_t>((num_vectors + lanes - 1) / lanes)};
  const int64_t items_of_block = int64_t{kRowsThreads} / lanes * kRowsUnroll;
  const int64_t num_blocks = NumBlocks(rows.num_rows * arguments.stretches, items_of_block, kBlocksOfRows);
  const char* what = "the kernel that reads rows of host memory";
  if (is_aligned) {
    Launch(what, ReadRowsKernel<true>, num_blocks, kRowsThreads, stream, arguments);
  } else {
    Launch(what, ReadRowsKernel<false>, num_blocks, kRowsThreads, stream, arguments);
  }
}

}  // namespace jaxferry::cuda
