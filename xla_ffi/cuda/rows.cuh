// Rows of a matrix in host memory, copied to the device: narrow parts of long rows, which a copy engine reads slowly.
#ifndef JAXFERRY_CUDA_ROWS_CUH_
#define JAXFERRY_CUDA_ROWS_CUH_

#include <cstdint>

#include "cuda/kernels.h"
#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

inline constexpr int kRowsThreads = 512;
// Vectors that a thread has in flight, because a link's latency is long.
inline constexpr int kRowsUnroll = 4;

// `lanes` threads, a power of two up to a warp, read one row's vectors; a row of more vectors has several stretches of
// so many.
struct RowsArguments {
  HostRows rows;
  int lanes;
  uint32_t stretches;
};

// Copies what lies in the row of a vector of host memory, two bytes at a time.
__device__ __forceinline__ void StoreVectorOfRow(const uint4& vector, int64_t begin, int64_t row_bytes,
                                                 unsigned char* row) {
  const uint32_t words[4] = {vector.x, vector.y, vector.z, vector.w};
#pragma unroll
  for (int i = 0; i < kVectorBytes / 2; ++i) {
    const int64_t place = begin + 2 * i;
    if (place < 0 || place >= row_bytes) continue;
    *reinterpret_cast<uint16_t*>(row + place) = static_cast<uint16_t>(words[i / 2] >> (i % 2 * 16));
  }
}

// Loads the bytes of a vector that lie in [begin, end).
__device__ __forceinline__ uint4 LoadPartOfVector(const unsigned char* vector, const unsigned char* begin,
                                                  const unsigned char* end) {
  uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
  for (int i = 0; i < kVectorBytes / 2; ++i) {
    const unsigned char* place = vector + 2 * i;
    if (place < begin || place >= end) continue;
    words[i / 2] |= uint32_t{*reinterpret_cast<const uint16_t*>(place)} << (i % 2 * 16);
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

// kAligned: rows of both sides start and end at multiples of sixteen bytes. Otherwise each row is read by the aligned
// vectors that it lies in: neighbours' bytes are dropped. Rows have even addresses, since every dtype has.
template <bool kAligned>
__global__ void __launch_bounds__(kRowsThreads) ReadRowsKernel(RowsArguments a) {
  const auto* source = static_cast<const unsigned char*>(a.rows.source);
  auto* destination = static_cast<unsigned char*>(a.rows.destination);
  const unsigned char* end = source + (a.rows.num_rows - 1) * a.rows.source_pitch + a.rows.row_bytes;
  const int64_t thread = int64_t{blockIdx.x} * blockDim.x + threadIdx.x;
  const int64_t num_groups = int64_t{gridDim.x} * blockDim.x / a.lanes;
  const int64_t lane = thread % a.lanes;
  const int64_t num_items = a.rows.num_rows * a.stretches;
  for (int64_t first = thread / a.lanes; first < num_items; first += num_groups * kRowsUnroll) {
    uint4 vectors[kRowsUnroll];
    int64_t row[kRowsUnroll], place[kRowsUnroll];
    bool is_inside[kRowsUnroll], is_whole[kRowsUnroll];
    // All loads are in flight before the first is used: none is in a branch.
#pragma unroll
    for (int u = 0; u < kRowsUnroll; ++u) {
      const int64_t item = first + u * num_groups;
      row[u] = a.stretches == 1 ? item : static_cast<uint32_t>(item) / a.stretches;
      const unsigned char* start = source + row[u] * a.rows.source_pitch;
      const int64_t skipped = kAligned ? 0 : static_cast<int64_t>(reinterpret_cast<uintptr_t>(start) % kVectorBytes);
      place[u] = ((item - row[u] * a.stretches) * a.lanes + lane) * kVectorBytes - skipped;
      const unsigned char* vector = start + place[u];
      is_inside[u] = item < num_items && place[u] < a.rows.row_bytes;
      is_whole[u] = is_inside[u] && (kAligned || (vector >= source && vector + kVectorBytes <= end));
      vectors[u] = is_whole[u] ? *reinterpret_cast<const uint4*>(vector) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int u = 0; u < kRowsUnroll; ++u) {
      if (!is_inside[u]) continue;
      unsigned char* start = destination + row[u] * a.rows.destination_pitch;
      if constexpr (kAligned) {
        *reinterpret_cast<uint4*>(start + place[u]) = vectors[u];
      } else {
        const unsigned char* vector = source + row[u] * a.rows.source_pitch + place[u];
        const uint4 part = is_whole[u] ? vectors[u] : LoadPartOfVector(vector, source, end);
        StoreVectorOfRow(part, place[u], a.rows.row_bytes, start);
      }
    }
  }
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_ROWS_CUH_
