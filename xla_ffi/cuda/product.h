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

// A row-major matrix in device memory, the transpose of which is meant if `transpose`. `pitch`: numbers from row to
// row.
struct Matrix {
  const void* data;
  int64_t pitch;
  bool transpose;
};

// c[m, n] = a[m, k] @ b[k, n]. `c_pitch`: numbers from row to row of c.
struct Product {
  Matrix a, b;
  void* c;
  int64_t c_pitch, m, n, k;
  Dtype dtype, c_dtype;
};

// Sums are in fp32. fp32 operands are multiplied as TF32, as JAX does at its default precision on GPUs that have it
// (jax.lax.Precision); NVIDIA_TF32_OVERRIDE=0 forbids it to cuBLAS.
//
// The same shapes and dtypes are multiplied by the same algorithm, one that splits no sum over k.
class Multiplier {
 public:
  // Puts a product onto the stream. The caller holds the device's lock.
  void Multiply(const Product& product, cudaStream_t stream);

 private:
  struct Plan;
  // m, n, k, pitches of a, b, c, transposes of a and b, dtypes, alignment.
  using Key = std::tuple<int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, bool, bool, Dtype, Dtype, uint32_t>;

  const Plan& FindPlan(const Product& product);
  void* Workspace(const Plan& plan, cudaStream_t stream);

  cublaslt::Handle handle_ = nullptr;
  std::map<Key, std::shared_ptr<const Plan>> plans_;
  std::map<cudaStream_t, std::unique_ptr<DeviceBuffer>> workspaces_;
};

}  // namespace jaxferry::cuda

#endif  // JAXFERRY_CUDA_PRODUCT_H_
