// Operations that copy parts of a host vector into arrays, or a gradient into a host vector.
#include <vector>

#include "cuda/errors.h"
#include "cuda/kernels.h"
#include "cuda/operations.h"

namespace jaxferry::cuda {

// A link carries about this much in the few microseconds that a copy engine takes to start.
static constexpr int64_t kLeastBytesOfEngine = int64_t{64} << 10;

void RunRead(const Copies& copies, cudaStream_t stream) {
  Copies small;
  for (const Copy& copy : copies) {
    if (copy.bytes == 0) continue;
    if (copy.bytes < kLeastBytesOfEngine) {
      small.push_back(copy);
    } else {
      Check(cudaMemcpyAsync(copy.destination, copy.source, copy.bytes, cudaMemcpyHostToDevice, stream),
            "copying from the host vector");
    }
  }
  CopyTogether(small, stream);
}

void RunStore(const Store& call, cudaStream_t stream) {
  if (call.size == 0) return;
  const Conversion conversion = {call.dtype, call.destination_dtype, call.gradient, call.destination,
                                 call.size,  call.accumulate};
  if (!IsCopy(conversion)) return Convert(conversion, kBlocksOfDevice, stream);
  Check(cudaMemcpyAsync(call.destination, call.gradient, call.size * ItemSize(call.dtype), cudaMemcpyDeviceToHost,
                        stream),
        "copying the gradient to the destination");
}

}  // namespace jaxferry::cuda
