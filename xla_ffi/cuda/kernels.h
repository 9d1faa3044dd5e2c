// Functions that launch kernels on a stream. No XLA types. All throw Failure.
#ifndef JAXFERRY_CUDA_KERNELS_H_
#define JAXFERRY_CUDA_KERNELS_H_

#include <cuda_runtime_api.h>

#include <cstdint>

#include "common/calls.h"

namespace jaxferry::cuda {

void GatherRows(const Gather& call, cudaStream_t stream);

void AddRows(const RowStore& call, cudaStream_t stream);

// Rows of a matrix in host memory; pitches are bytes between the starts of rows.
struct HostRows {
  const void* source;
  void* destination;
  int64_t num_rows, row_bytes, source_pitch, destination_pitch;
};

// Copies the rows to the device by few multiprocessors.
void ReadRows(const HostRows& rows, cudaStream_t stream);

// Runs copies that are too small for a copy engine in one kernel.
void CopyTogether(const Copies& copies, cudaStream_t stream);

// destination[i] = (or +=, to accumulate) source[i], rounded through `round_to`; either may be in host memory.
struct Conversion {
  Dtype dtype, destination_dtype;
  const void* source;
  void* destination;
  int64_t size;
  bool accumulate;
  Dtype round_to = Dtype::kFloat32;
};

// Whether it is a plain copy of bytes, which a copy engine can run without occupying multiprocessors.
inline bool IsCopy(const Conversion& conversion) {
  return conversion.dtype == conversion.destination_dtype && !conversion.accumulate &&
         (conversion.round_to == Dtype::kFloat32 || conversion.round_to == conversion.dtype);
}

void Convert(const Conversion& conversion, int64_t most_blocks, cudaStream_t stream);

// Enough blocks to saturate a link, few enough to leave room for a concurrent product.
inline constexpr int64_t kBlocksOfLink = 32;
// Enough blocks of `ReadRows` to saturate a link (measured on an H200: more read no faster).
inline constexpr int64_t kBlocksOfRows = 8;
// Enough blocks to fill a device.
inline constexpr int64_t kBlocksOfDevice = 1024;

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_KERNELS_H_
