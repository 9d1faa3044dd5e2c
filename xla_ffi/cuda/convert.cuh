// Casts numbers, or adds them to the destination, from device or host memory to device or host memory.
#ifndef JAXFERRY_CUDA_CONVERT_CUH_
#define JAXFERRY_CUDA_CONVERT_CUH_

#include <cstdint>

#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

inline constexpr int kConvertThreads = 512;
inline constexpr int kConvertUnroll = 4;

struct ConvertArguments {
  void* destination;
  const void* source;
  int64_t size;
  bool accumulate;
  Dtype round_to;
};

template <Dtype kTo, Dtype kFrom>
__device__ __forceinline__ BitsOf<kTo> ConvertOne(BitsOf<kFrom> from, BitsOf<kTo> old, const ConvertArguments& a) {
  float value = Round(Number<kFrom>::Decode(from), a.round_to);
  if (a.accumulate) value += Number<kTo>::Decode(old);
  return Number<kTo>::Encode(value);
}

// Makes one 16-byte vector of the destination from the same count of numbers in the source.
template <Dtype kTo, Dtype kFrom>
__device__ __forceinline__ uint4 ConvertVector(const BitsOf<kFrom>* source, bool is_aligned, uint4 old,
                                               const ConvertArguments& a) {
  constexpr int kCount = kVector<kTo>;
  float values[kCount];
  if constexpr (kVector<kFrom> == kCount) {
    Unpack<kFrom>(LoadVector<kFrom>(source, kCount, is_aligned), values);
  } else if constexpr (kVector<kFrom> < kCount) {
    float low[4], high[4];
    Unpack<kFrom>(LoadVector<kFrom>(source, 4, is_aligned), low);
    Unpack<kFrom>(LoadVector<kFrom>(source + 4, 4, is_aligned), high);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      values[i] = low[i];
      values[i + 4] = high[i];
    }
  } else {
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] = Number<kFrom>::Decode(source[i]);
  }
#pragma unroll
  for (int i = 0; i < kCount; ++i) values[i] = Round(values[i], a.round_to);
  if (a.accumulate) {
    float before[kCount];
    Unpack<kTo>(old, before);
#pragma unroll
    for (int i = 0; i < kCount; ++i) values[i] += before[i];
  }
  return Pack<kTo>(values);
}

template <Dtype kTo, Dtype kFrom>
__global__ void __launch_bounds__(kConvertThreads) ConvertKernel(ConvertArguments a) {
  constexpr int kCount = kVector<kTo>;
  auto* destination = static_cast<BitsOf<kTo>*>(a.destination);
  const auto* source = static_cast<const BitsOf<kFrom>*>(a.source);
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_threads = int64_t{gridDim.x} * blockDim.x;

  // Vectors start where the destination is aligned: only whole-vector writes saturate a link.
  const auto misaligned = reinterpret_cast<uintptr_t>(destination) % kVectorBytes / sizeof(BitsOf<kTo>);
  int64_t head = misaligned == 0 ? 0 : kCount - static_cast<int64_t>(misaligned);
  if (head > a.size) head = a.size;
  const int64_t num_vectors = (a.size - head) / kCount;
  const int64_t tail = head + num_vectors * kCount;
  auto* vectors = reinterpret_cast<uint4*>(destination + head);
  const bool is_aligned = IsAligned(source + head);

  for (int64_t first = thread; first < num_vectors; first += num_threads * kConvertUnroll) {
    uint4 old[kConvertUnroll];
    // All reads of host memory are in flight before the first is used.
#pragma unroll
    for (int u = 0; u < kConvertUnroll; ++u) {
      const int64_t i = first + u * num_threads;
      old[u] = a.accumulate && i < num_vectors ? vectors[i] : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kConvertUnroll; ++u) {
      const int64_t i = first + u * num_threads;
      if (i < num_vectors) {
        vectors[i] = ConvertVector<kTo, kFrom>(source + head + i * kCount, is_aligned, old[u], a);
      }
    }
  }

  const int64_t num_single = head + (a.size - tail);
  for (int64_t single = thread; single < num_single; single += num_threads) {
    const int64_t i = single < head ? single : tail + (single - head);
    const BitsOf<kTo> old = a.accumulate ? destination[i] : BitsOf<kTo>{0};
    destination[i] = ConvertOne<kTo, kFrom>(source[i], old, a);
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_CONVERT_CUH_
