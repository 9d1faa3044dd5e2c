// Declares the part of cuBLASLt used here, so that the build needs no cuBLAS headers.
//
// Types, values and signatures are those of NVIDIA's cuBLAS documentation, section "Using the cuBLASLt API"
// (docs.nvidia.com/cuda/cublas/#using-the-cublaslt-api): the entries named in the comments from "cuBLASLt Datatypes
// Reference", the functions from "cuBLASLt API Reference". They are the same in cuBLAS 12 and 13;
// tests/gpu/cublaslt_header.cc compares them with the real header if available.
#ifndef JAXFERRY_CUDA_CUBLASLT_API_H_
#define JAXFERRY_CUDA_CUBLASLT_API_H_

#include <cuda_runtime_api.h>
#include <library_types.h>

#include <cstddef>
#include <cstdint>

namespace jaxferry::cuda::cublaslt {

// Pointers to the library's opaque structures.
struct Context;
struct MatmulDescriptor;
struct MatrixLayoutDescriptor;
struct PreferenceDescriptor;
using Handle = Context*;                         // cublasLtHandle_t
using MatmulDesc = MatmulDescriptor*;            // cublasLtMatmulDesc_t
using MatrixLayout = MatrixLayoutDescriptor*;    // cublasLtMatrixLayout_t
using MatmulPreference = PreferenceDescriptor*;  // cublasLtMatmulPreference_t

// cublasStatus_t
enum Status : int { kSuccess = 0 };

// cublasComputeType_t
enum ComputeType : int { kCompute32F = 68, kCompute32FFastTf32 = 77 };

// cublasOperation_t
enum Operation : int32_t { kOpN = 0, kOpT = 1 };

// cublasLtMatmulDescAttributes_t; both take a cublasOperation_t of 32 bits
enum MatmulDescAttribute : int { kDescTransA = 3, kDescTransB = 4 };

// cublasLtMatmulPreferenceAttributes_t: uint64_t bytes, uint32_t mask, uint32_t bytes
enum PreferenceAttribute : int {
  kPreferenceMaxWorkspaceBytes = 1,
  kPreferenceReductionSchemeMask = 3,
  kPreferenceMinAlignmentABytes = 5,
  kPreferenceMinAlignmentBBytes = 6,
  kPreferenceMinAlignmentCBytes = 7,
  kPreferenceMinAlignmentDBytes = 8,
};

// cublasLtReductionScheme_t
inline constexpr uint32_t kReductionSchemeNone = 0;

// cublasLtMatmulAlgo_t
struct MatmulAlgo {
  uint64_t data[8];
};

// cublasLtMatmulHeuristicResult_t
struct HeuristicResult {
  MatmulAlgo algo;
  size_t workspace_size;
  Status state;
  float waves_count;
  int reserved[4];
};

// The functions, named without the prefix "cublasLt".
struct Api {
  Status (*Create)(Handle* handle);
  Status (*MatmulDescCreate)(MatmulDesc* descriptor, ComputeType compute_type, cudaDataType scale_type);
  Status (*MatmulDescDestroy)(MatmulDesc descriptor);
  Status (*MatmulDescSetAttribute)(MatmulDesc descriptor, MatmulDescAttribute attribute, const void* value,
                                   size_t size);
  Status (*MatrixLayoutCreate)(MatrixLayout* layout, cudaDataType type, uint64_t rows, uint64_t columns,
                               int64_t leading_dimension);
  Status (*MatrixLayoutDestroy)(MatrixLayout layout);
  Status (*MatmulPreferenceCreate)(MatmulPreference* preference);
  Status (*MatmulPreferenceDestroy)(MatmulPreference preference);
  Status (*MatmulPreferenceSetAttribute)(MatmulPreference preference, PreferenceAttribute attribute, const void* value,
                                         size_t size);
  Status (*MatmulAlgoGetHeuristic)(Handle handle, MatmulDesc descriptor, MatrixLayout a, MatrixLayout b, MatrixLayout c,
                                   MatrixLayout d, MatmulPreference preference, int num_requested,
                                   HeuristicResult* results, int* num_results);
  Status (*Matmul)(Handle handle, MatmulDesc descriptor, const void* alpha, const void* a, MatrixLayout a_layout,
                   const void* b, MatrixLayout b_layout, const void* beta, const void* c, MatrixLayout c_layout,
                   void* d, MatrixLayout d_layout, const MatmulAlgo* algo, void* workspace, size_t workspace_size,
                   cudaStream_t stream);
  size_t (*GetVersion)();
};

// Opens the library on the first call: the one already loaded by JAX, else the one that the loader finds. Throws
// Failure if there is none.
const Api& Load();

}  // namespace jaxferry::cuda::cublaslt

#endif  // JAXFERRY_CUDA_CUBLASLT_API_H_
