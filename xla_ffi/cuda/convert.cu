#include "cuda/convert.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace jaxferry::cuda {

namespace {

template <Dtype kTo, Dtype kFrom>
void LaunchConvert(const Conversion& c, int64_t most_blocks, cudaStream_t stream) {
  constexpr int64_t kPerBlock = int64_t{kConvertThreads} * kConvertUnroll * kVector<kTo>;
  const ConvertArguments arguments = {c.destination, c.source, c.size, c.accumulate, c.round_to};
  Launch("the kernel that converts numbers", ConvertKernel<kTo, kFrom>, NumBlocks(c.size, kPerBlock, most_blocks),
         kConvertThreads, stream, arguments);
}

template <Dtype kTo>
void LaunchConvertTo(const Conversion& c, int64_t most_blocks, cudaStream_t stream) {
  switch (c.dtype) {
    case Dtype::kFloat32:
      return LaunchConvert<kTo, Dtype::kFloat32>(c, most_blocks, stream);
    case Dtype::kBfloat16:
      return LaunchConvert<kTo, Dtype::kBfloat16>(c, most_blocks, stream);
    case Dtype::kFloat16:
      return LaunchConvert<kTo, Dtype::kFloat16>(c, most_blocks, stream);
  }
}

}  // namespace

void Convert(const Conversion& conversion, int64_t most_blocks, cudaStream_t stream) {
  if (conversion.size == 0) return;
  switch (conversion.destination_dtype) {
    case Dtype::kFloat32:
      return LaunchConvertTo<Dtype::kFloat32>(conversion, most_blocks, stream);
    case Dtype::kBfloat16:
      return LaunchConvertTo<Dtype::kBfloat16>(conversion, most_blocks, stream);
    case Dtype::kFloat16:
      return LaunchConvertTo<Dtype::kFloat16>(conversion, most_blocks, stream);
  }
}

}  // namespace jaxferry::cuda
