// Products of few rows with a weight in host memory; the kernels read each byte of the weight once, sixteen at once.
//
// A thread block owns columns of y, so columns (DirectColumns, w[k, n]) or rows (DirectRows, w[n, k]) of the weight. It
// reads all rows of x, one tile at a time into shared memory, as fp32. The next tile of the weight is in flight while
// the current one is multiplied. The order of sums does not depend on the number of blocks.
#ifndef JAXFERRY_CUDA_DIRECT_CUH_
#define JAXFERRY_CUDA_DIRECT_CUH_

#include <cstdint>

#include "cuda/numbers.cuh"

namespace jaxferry::cuda {

inline constexpr int kDirectThreads = 256;
inline constexpr int kDirectWarps = kDirectThreads / kWarpSize;
// The number of tiles' vectors, or of rows of the weight, that a thread reads at once.
inline constexpr int kDirectUnroll = 4;

struct DirectArguments {
  const void* x;
  const void* w;
  void* y;
  int64_t m, k, n;
  Dtype x_dtype, y_dtype;
  // The dtype that the weight is rounded to before the product: that of x, or float32 if that represents every weight.
  Dtype round_to;
};

// Loads `count` numbers from `data`, padded with zeros. kAligned: every row of the weight starts at a multiple of
// sixteen bytes, so a vector lies entirely inside or outside. A template parameter, because a branch at each load would
// make the thread wait for one load before issuing the next.
template <Dtype kDtype, bool kAligned>
__device__ __forceinline__ uint4 LoadWeights(const BitsOf<kDtype>* data, int64_t count) {
  if constexpr (kAligned) {
    return count > 0 ? *reinterpret_cast<const uint4*>(data) : make_uint4(0, 0, 0, 0);
  } else {
    return LoadVector<kDtype>(data, count, false);
  }
}

// DirectColumns: eight lanes read 128 bytes of a row of the weight; the other lanes and warps read the rows below.
inline constexpr int kColumnLanes = 8;
inline constexpr int kRowsAtOnce = kDirectThreads / kColumnLanes;
inline constexpr int kColumnsTile = kRowsAtOnce * kDirectUnroll;

template <Dtype kDtype>
inline constexpr int kColumnsOfBlock = kColumnLanes * kVector<kDtype>;

template <Dtype kDtype>
__device__ __forceinline__ void UnpackWeight(uint4 packed, Dtype round_to, float (&values)[kVector<kDtype>]) {
  Unpack<kDtype>(packed, values);
  if (round_to == Dtype::kFloat32) return;
#pragma unroll
  for (int i = 0; i < kVector<kDtype>; ++i) values[i] = Round(values[i], round_to);
}

// Loads this thread's row and columns of each 32 rows in [begin, begin + 32 u) of the weight; zeros below the last row.
template <Dtype kDtype, bool kAligned>
__device__ __forceinline__ void LoadColumns(const DirectArguments& a, int64_t begin, int64_t column,
                                            uint4 (&vectors)[kDirectUnroll]) {
  const auto* w = static_cast<const BitsOf<kDtype>*>(a.w);
#pragma unroll
  for (int u = 0; u < kDirectUnroll; ++u) {
    const int64_t row = begin + u * kRowsAtOnce + threadIdx.x / kColumnLanes;
    const int64_t count = row < a.k ? a.n - column : 0;
    vectors[u] = LoadWeights<kDtype, kAligned>(w + row * a.n + column, count);
  }
}

// Loads x[:, begin : begin + kColumnsTile], transposed, padded with zeros.
template <int kRows>
__device__ __forceinline__ void LoadTransposed(const DirectArguments& a, int64_t begin,
                                               float (&tile)[kColumnsTile][kRows]) {
  for (int i = threadIdx.x; i < kColumnsTile * kRows; i += kDirectThreads) {
    const int row = i / kColumnsTile;
    const int64_t column = begin + i % kColumnsTile;
    const bool is_inside = row < a.m && column < a.k;
    tile[i % kColumnsTile][row] = is_inside ? LoadNumber(a.x, a.x_dtype, row * a.k + column) : 0.0f;
  }
}

template <Dtype kDtype, int kRows>
__device__ __forceinline__ void SumColumns(const DirectArguments& a, int64_t first_column,
                                           const float (&partial)[kRows][kVector<kDtype>]) {
  __shared__ float sums[kDirectWarps][kRows][kColumnsOfBlock<kDtype>];
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int i = 0; i < kVector<kDtype>; ++i) {
      float sum = partial[row][i];
      sum += __shfl_xor_sync(0xffffffffu, sum, 8);
      sum += __shfl_xor_sync(0xffffffffu, sum, 16);
      if (lane < kColumnLanes) sums[threadIdx.x / kWarpSize][row][lane * kVector<kDtype> + i] = sum;
    }
  }
  __syncthreads();
  for (int i = threadIdx.x; i < kRows * kColumnsOfBlock<kDtype>; i += kDirectThreads) {
    const int row = i / kColumnsOfBlock<kDtype>;
    const int64_t column = i % kColumnsOfBlock<kDtype>;
    if (row >= a.m || first_column + column >= a.n) continue;
    float sum = 0.0f;
    for (int warp = 0; warp < kDirectWarps; ++warp) sum += sums[warp][row][column];
    StoreNumber(a.y, a.y_dtype, row * a.n + first_column + column, sum);
  }
}

// y[m, n] = x[m, k] @ w[k, n], for m <= kRows. One block per kColumnsOfBlock columns.
template <Dtype kDtype, int kRows, bool kAligned>
__global__ void __launch_bounds__(kDirectThreads) DirectColumns(DirectArguments a) {
  __shared__ __align__(16) float tile[kColumnsTile][kRows];
  const int64_t first_column = int64_t{blockIdx.x} * kColumnsOfBlock<kDtype>;
  const int64_t column = first_column + threadIdx.x % kColumnLanes * kVector<kDtype>;
  float partial[kRows][kVector<kDtype>] = {};
  uint4 next[kDirectUnroll];
  LoadColumns<kDtype, kAligned>(a, 0, column, next);
  for (int64_t begin = 0; begin < a.k; begin += kColumnsTile) {
    uint4 vectors[kDirectUnroll];
#pragma unroll
    for (int u = 0; u < kDirectUnroll; ++u) vectors[u] = next[u];
    LoadColumns<kDtype, kAligned>(a, begin + kColumnsTile, column, next);
    __syncthreads();
    LoadTransposed<kRows>(a, begin, tile);
    __syncthreads();
#pragma unroll
    for (int u = 0; u < kDirectUnroll; ++u) {
      float weights[kVector<kDtype>];
      UnpackWeight<kDtype>(vectors[u], a.round_to, weights);
      const float* x = tile[u * kRowsAtOnce + threadIdx.x / kColumnLanes];
#pragma unroll
      for (int row = 0; row < kRows; ++row) {
#pragma unroll
        for (int i = 0; i < kVector<kDtype>; ++i) partial[row][i] += x[row] * weights[i];
      }
    }
  }
  SumColumns<kDtype, kRows>(a, first_column, partial);
}

// DirectRows: a warp reads 512 bytes of each of kDirectUnroll rows of the weight.
inline constexpr int kWeightRowsOfBlock = kDirectWarps * kDirectUnroll;

template <Dtype kDtype>
inline constexpr int kRowsTile = kWarpSize * kVector<kDtype>;

template <Dtype kDtype, bool kAligned>
__device__ __forceinline__ void LoadRows(const DirectArguments& a, int64_t first_row, int64_t begin,
                                         uint4 (&vectors)[kDirectUnroll]) {
  const auto* w = static_cast<const BitsOf<kDtype>*>(a.w);
  const int64_t column = begin + threadIdx.x % kWarpSize * kVector<kDtype>;
#pragma unroll
  for (int u = 0; u < kDirectUnroll; ++u) {
    const int64_t row = first_row + u;
    const int64_t count = row < a.n ? a.k - column : 0;
    vectors[u] = LoadWeights<kDtype, kAligned>(w + row * a.k + column, count);
  }
}

// Loads x[:, begin : begin + kRowsTile], padded with zeros, in groups of four that a warp's lanes read contiguously.
template <Dtype kDtype, int kRows>
__device__ __forceinline__ void LoadInFours(const DirectArguments& a, int64_t begin,
                                            float (&tile)[kRows][kVector<kDtype> / 4][kWarpSize][4]) {
  for (int i = threadIdx.x; i < kRows * kRowsTile<kDtype>; i += kDirectThreads) {
    const int row = i / kRowsTile<kDtype>;
    const int within = i % kRowsTile<kDtype>;
    const int64_t column = begin + within;
    const bool is_inside = row < a.m && column < a.k;
    tile[row][within % kVector<kDtype> / 4][within / kVector<kDtype>][within % 4] =
        is_inside ? LoadNumber(a.x, a.x_dtype, row * a.k + column) : 0.0f;
  }
}

template <int kRows>
__device__ __forceinline__ void SumRows(const DirectArguments& a, int64_t first_row,
                                        const float (&partial)[kRows][kDirectUnroll]) {
  const int lane = threadIdx.x % kWarpSize;
#pragma unroll
  for (int row = 0; row < kRows; ++row) {
#pragma unroll
    for (int u = 0; u < kDirectUnroll; ++u) {
      float sum = partial[row][u];
#pragma unroll
      for (int distance = kWarpSize / 2; distance > 0; distance /= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, distance);
      }
      // All lanes have every sum; each sum is written by another lane.
      const bool is_mine = lane == (row * kDirectUnroll + u) % kWarpSize;
      if (is_mine && row < a.m && first_row + u < a.n) {
        StoreNumber(a.y, a.y_dtype, row * a.n + first_row + u, sum);
      }
    }
  }
}

// y[m, n] = x[m, k] @ w[n, k].T, for m <= kRows. One block per kWeightRowsOfBlock rows of the weight.
template <Dtype kDtype, int kRows, bool kAligned>
__global__ void __launch_bounds__(kDirectThreads) DirectRows(DirectArguments a) {
  __shared__ __align__(16) float tile[kRows][kVector<kDtype> / 4][kWarpSize][4];
  const int lane = threadIdx.x % kWarpSize;
  const int64_t first_row = int64_t{blockIdx.x} * kWeightRowsOfBlock + threadIdx.x / kWarpSize * kDirectUnroll;
  float partial[kRows][kDirectUnroll] = {};
  uint4 next[kDirectUnroll];
  LoadRows<kDtype, kAligned>(a, first_row, 0, next);
  for (int64_t begin = 0; begin < a.k; begin += kRowsTile<kDtype>) {
    float weights[kDirectUnroll][kVector<kDtype>];
#pragma unroll
    for (int u = 0; u < kDirectUnroll; ++u) UnpackWeight<kDtype>(next[u], a.round_to, weights[u]);
    LoadRows<kDtype, kAligned>(a, first_row, begin + kRowsTile<kDtype>, next);
    __syncthreads();
    LoadInFours<kDtype, kRows>(a, begin, tile);
    __syncthreads();
#pragma unroll
    for (int row = 0; row < kRows; ++row) {
#pragma unroll
      for (int i = 0; i < kVector<kDtype>; ++i) {
        const float x = tile[row][i / 4][lane][i % 4];
#pragma unroll
        for (int u = 0; u < kDirectUnroll; ++u) partial[row][u] += x * weights[u][i];
      }
    }
  }
  SumRows<kRows>(a, first_row, partial);
}

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_DIRECT_CUH_
