#include "cuda/copy.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace jaxferry::cuda {

void CopyTogether(const Copies& copies, cudaStream_t stream) {
  CopyArguments arguments;
  int num_parts = 0;
  for (size_t i = 0; i < copies.size(); ++i) {
    arguments.parts[num_parts++] = {copies[i].source, copies[i].destination, copies[i].bytes};
    if (num_parts < kPartsTogether && i + 1 < copies.size()) continue;
    Launch("the kernel that copies small arrays", CopyKernel, num_parts, kCopyThreads, stream, arguments);
    num_parts = 0;
  }
}

}  // namespace jaxferry::cuda
