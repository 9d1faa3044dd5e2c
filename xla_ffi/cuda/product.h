// Products of device matrices by cuBLASLt.
#ifndef JAXFERRY_CUDA_PRODUCT_H_
#define JAXFERRY_CUDA_PRODUCT_H_

#include <cuda_runtime_api.h>

#include <cstdint>
#include <map>
#include <memory>
#include <tuple>

#include "common/dtypes.h"
#include "cuda/cublaslt_api.h"
#include "cuda/owners.h"

namespace jaxferry::cuda {

// A row-major matrix in device memory, or its transpose if `transpose`. `pitch`: elements between the starts of rows.
struct Matrix {
  const void* data;
  int64_t pitch;
  bool transpose;
};

// c[m, n] = a[m, k] @ b[k, n]. `c_pitch`: elements between the starts of rows of c.
struct Product {
  Matrix a, b;
  void* c;
  int64_t c_pitch, m, n, k;
  Dtype dtype, c_dtype;
};

// Accumulates in fp32. Multiplies fp32 operands as TF32, like JAX's default precision on GPUs that support it
// (jax.lax.Precision); NVIDIA_TF32_OVERRIDE=0 disables TF32 in cuBLAS.
//
// Equal shapes and dtypes use the same algorithm, which splits no sum over k.
class Multiplier {
 public:
  // Issues a product to the stream. The caller holds the device's lock.
  void Multiply(const Product& product, cudaStream_t stream);
  // Finds the algorithm of a product, by the alignment of its pointers, and takes the memory that it needs.
  void Prepare(const Product& product);
  int64_t num_plans() const { return static_cast<int64_t>(plans_.size()); }

 private:
  struct Plan;
  // m, n, k, pitches of a, b, c, transposes of a and b, dtypes, alignment.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, Dtype, Dtype, uint32_t>;

  // Returns null for an empty sum.
  const Plan* FindPlan(const Product& product);
  void* Workspace(const Plan& plan, cudaStream_t stream);

  cublaslt::Handle handle_ = nullptr;
  std::map<Key, std::shared_ptr<const Plan>> plans_;
  std::map<cudaStream_t, std::unique_ptr<DeviceBuffer>> workspaces_;
  // For the first stream.
  std::unique_ptr<DeviceBuffer> spare_workspace_;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_PRODUCT_H_
