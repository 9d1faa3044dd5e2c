#include "cuda/direct.cuh"
#include "cuda/kernels.h"
#include "cuda/launch.h"

namespace jaxferry::cuda {

namespace {

constexpr int kFewRows = 4;
constexpr int kMostRows = 16;
// A block has 16 KiB in flight; a fast link needs about 128 KiB, its transfer in one or two microseconds.
constexpr int64_t kEnoughBlocks = 8;
constexpr int64_t kSmallBytes = int64_t{256} << 10;

int64_t PitchBytes(const Matmul& call) { return (call.transpose ? call.k : call.n) * ItemSize(call.w_dtype); }

bool IsAligned16(const Matmul& call) {
  return PitchBytes(call) % kVectorBytes == 0 && reinterpret_cast<uintptr_t>(call.w) % kVectorBytes == 0;
}

template <Dtype kDtype, int kRows, bool kAligned>
void LaunchDirect(const DirectArguments& arguments, bool transpose, cudaStream_t stream) {
  const char* what = "the kernel that multiplies with host memory";
  const int64_t per_block = transpose ? kWeightRowsOfBlock : kColumnsOfBlock<kDtype>;
  const int64_t num_blocks = (arguments.n + per_block - 1) / per_block;
  if (transpose) {
    Launch(what, DirectRows<kDtype, kRows, kAligned>, num_blocks, kDirectThreads, stream, arguments);
  } else {
    Launch(what, DirectColumns<kDtype, kRows, kAligned>, num_blocks, kDirectThreads, stream, arguments);
  }
}

template <Dtype kDtype>
void LaunchDirectOf(const DirectArguments& arguments, bool transpose, bool is_aligned, cudaStream_t stream) {
  if (!is_aligned) {
    LaunchDirect<kDtype, kMostRows, false>(arguments, transpose, stream);
  } else if (arguments.m <= kFewRows) {
    LaunchDirect<kDtype, kFewRows, true>(arguments, transpose, stream);
  } else {
    LaunchDirect<kDtype, kMostRows, true>(arguments, transpose, stream);
  }
}

}  // namespace

// Unaligned rows are read number by number, and few blocks have few reads in flight: correct, but too slow to saturate
// a link. Small weights arrive before a copy engine would start.
bool IsBestDirectly(const Matmul& call) {
  const int64_t num_vectors = kVectorBytes / ItemSize(call.w_dtype);
  const int64_t per_block = call.transpose ? kWeightRowsOfBlock : kColumnLanes * num_vectors;
  const bool is_small = call.k * call.n * ItemSize(call.w_dtype) <= kSmallBytes;
  return call.m <= kMostRows && IsAligned16(call) && (is_small || call.n >= kEnoughBlocks * per_block);
}

void DirectMatmul(const Matmul& call, cudaStream_t stream) {
  if (call.m > kMostRows) {
    throw BadArgument("method 2 is for at most " + std::to_string(kMostRows) + " rows of x, got " +
                      std::to_string(call.m) + "; use method 0 or 1");
  }
  if (call.m == 0 || call.n == 0) return;
  // float32 represents every 16-bit weight exactly.
  const bool is_exact = call.x_dtype == call.w_dtype || call.x_dtype == Dtype::kFloat32;
  const Dtype round_to = is_exact ? Dtype::kFloat32 : call.x_dtype;
  const DirectArguments arguments = {call.x, call.w,       call.y,       call.m,  call.k,
                                     call.n, call.x_dtype, call.y_dtype, round_to};
  const bool is_aligned = IsAligned16(call);
  switch (call.w_dtype) {
    case Dtype::kFloat32:
      return LaunchDirectOf<Dtype::kFloat32>(arguments, call.transpose, is_aligned, stream);
    case Dtype::kBfloat16:
      return LaunchDirectOf<Dtype::kBfloat16>(arguments, call.transpose, is_aligned, stream);
    case Dtype::kFloat16:
      return LaunchDirectOf<Dtype::kFloat16>(arguments, call.transpose, is_aligned, stream);
  }
}

}  // namespace jaxferry::cuda
