// cuBLASLt as its documentation describes it: matrices count columns first. It checks what it is asked for.
#include <cstdio>
#include <cstdlib>

#include "cuda/cublaslt_api.h"
#include "cuda/numbers.cuh"

namespace jaxferry::cuda::cublaslt {

struct Context {};
struct MatmulDescriptor {
  ComputeType compute_type;
  int32_t transposes[2] = {kOpN, kOpN};
};
struct MatrixLayoutDescriptor {
  cudaDataType type;
  uint64_t rows, columns;
  int64_t pitch;
};
struct PreferenceDescriptor {
  uint64_t workspace_bytes = 0;
  uint32_t reduction_schemes = ~0u, alignment = 256;
};

namespace {

constexpr Status kInvalidValue = static_cast<Status>(7);
constexpr size_t kWorkspaceBytes = 512;

float Read(const void* data, const MatrixLayoutDescriptor& layout, bool transpose, uint64_t row, uint64_t column) {
  const auto index = static_cast<int64_t>(transpose ? column + row * layout.pitch : row + column * layout.pitch);
  const Dtype dtype = layout.type == CUDA_R_32F    ? Dtype::kFloat32
                      : layout.type == CUDA_R_16BF ? Dtype::kBfloat16
                                                   : Dtype::kFloat16;
  return LoadNumber(data, dtype, index);
}

void Write(void* data, const MatrixLayoutDescriptor& layout, uint64_t row, uint64_t column, float value) {
  const Dtype dtype = layout.type == CUDA_R_32F    ? Dtype::kFloat32
                      : layout.type == CUDA_R_16BF ? Dtype::kBfloat16
                                                   : Dtype::kFloat16;
  StoreNumber(data, dtype, static_cast<int64_t>(row + column * layout.pitch), value);
}

struct Sizes {
  uint64_t m, n, k;
};

// Sizes of d[m, n] = op(a)[m, k] op(b)[k, n], or false where the matrices do not fit.
bool Fit(const MatmulDescriptor& descriptor, const MatrixLayoutDescriptor& a, const MatrixLayoutDescriptor& b,
         const MatrixLayoutDescriptor& d, Sizes* sizes) {
  for (const MatrixLayoutDescriptor* layout : {&a, &b, &d}) {
    if (layout->rows == 0 || layout->columns == 0 || layout->pitch < static_cast<int64_t>(layout->rows)) return false;
  }
  const bool transpose_a = descriptor.transposes[0] == kOpT;
  const bool transpose_b = descriptor.transposes[1] == kOpT;
  *sizes = {transpose_a ? a.columns : a.rows, transpose_b ? b.rows : b.columns, transpose_a ? a.rows : a.columns};
  const uint64_t k = transpose_b ? b.columns : b.rows;
  return sizes->k == k && d.rows == sizes->m && d.columns == sizes->n && a.type == b.type &&
         (a.type == CUDA_R_32F) == (descriptor.compute_type == kCompute32FFastTf32);
}

Status CreateContext(Handle* handle) {
  *handle = new Context;
  return kSuccess;
}
Status CreateDescriptor(MatmulDesc* descriptor, ComputeType compute_type, cudaDataType scale_type) {
  if (scale_type != CUDA_R_32F) return kInvalidValue;
  *descriptor = new MatmulDescriptor{compute_type};
  return kSuccess;
}
Status DestroyDescriptor(MatmulDesc descriptor) {
  delete descriptor;
  return kSuccess;
}
Status SetDescriptor(MatmulDesc descriptor, MatmulDescAttribute attribute, const void* value, size_t size) {
  if (size != sizeof(int32_t)) return kInvalidValue;
  descriptor->transposes[attribute == kDescTransB] = *static_cast<const int32_t*>(value);
  return kSuccess;
}
Status CreateLayout(MatrixLayout* layout, cudaDataType type, uint64_t rows, uint64_t columns, int64_t pitch) {
  *layout = new MatrixLayoutDescriptor{type, rows, columns, pitch};
  return kSuccess;
}
Status DestroyLayout(MatrixLayout layout) {
  delete layout;
  return kSuccess;
}
Status CreatePreference(MatmulPreference* preference) {
  *preference = new PreferenceDescriptor;
  return kSuccess;
}
Status DestroyPreference(MatmulPreference preference) {
  delete preference;
  return kSuccess;
}
Status SetPreference(MatmulPreference preference, PreferenceAttribute attribute, const void* value, size_t size) {
  if (size != (attribute == kPreferenceMaxWorkspaceBytes ? 8u : 4u)) return kInvalidValue;
  if (attribute == kPreferenceMaxWorkspaceBytes) {
    preference->workspace_bytes = *static_cast<const uint64_t*>(value);
  } else if (attribute == kPreferenceReductionSchemeMask) {
    preference->reduction_schemes = *static_cast<const uint32_t*>(value);
  } else {
    preference->alignment = *static_cast<const uint32_t*>(value);
  }
  return kSuccess;
}
Status Choose(Handle, MatmulDesc descriptor, MatrixLayout a, MatrixLayout b, MatrixLayout c, MatrixLayout d,
              MatmulPreference preference, int num_requested, HeuristicResult* results, int* num_results) {
  Sizes sizes;
  if (num_requested != 1 || c != d || !Fit(*descriptor, *a, *b, *d, &sizes)) return kInvalidValue;
  if (preference->workspace_bytes < kWorkspaceBytes || preference->reduction_schemes != 0) return kInvalidValue;
  *results = {};
  results->algo.data[0] = preference->alignment;
  results->workspace_size = kWorkspaceBytes;
  *num_results = 1;
  return kSuccess;
}
Status Multiply(Handle, MatmulDesc descriptor, const void* alpha, const void* a, MatrixLayout a_layout, const void* b,
                MatrixLayout b_layout, const void* beta, const void* c, MatrixLayout c_layout, void* d,
                MatrixLayout d_layout, const MatmulAlgo* algo, void* workspace, size_t workspace_size,
                cudaStream_t stream) {
  Sizes sizes;
  if (*static_cast<const float*>(alpha) != 1.0f || *static_cast<const float*>(beta) != 0.0f || c != d) {
    return kInvalidValue;
  }
  if (c_layout != d_layout || workspace == nullptr || workspace_size != kWorkspaceBytes) return kInvalidValue;
  for (const void* data : {a, b, static_cast<const void*>(d)}) {
    if (reinterpret_cast<uintptr_t>(data) % algo->data[0] != 0) return kInvalidValue;
  }
  const MatmulDescriptor asked = *descriptor;
  const MatrixLayoutDescriptor of_a = *a_layout, of_b = *b_layout, of_d = *d_layout;
  if (!Fit(asked, of_a, of_b, of_d, &sizes)) return kInvalidValue;
  emulation::Enqueue(stream, [=] {
    for (uint64_t column = 0; column < sizes.n; ++column) {
      for (uint64_t row = 0; row < sizes.m; ++row) {
        float sum = 0.0f;
        for (uint64_t i = 0; i < sizes.k; ++i) {
          sum += Read(a, of_a, asked.transposes[0] == kOpT, row, i) *
                 Read(b, of_b, asked.transposes[1] == kOpT, i, column);
        }
        Write(d, of_d, row, column, sum);
      }
    }
  });
  return kSuccess;
}

}  // namespace

const Api& Load() {
  static const Api api = {CreateContext, CreateDescriptor, DestroyDescriptor, SetDescriptor,
                          CreateLayout,  DestroyLayout,    CreatePreference,  DestroyPreference,
                          SetPreference, Choose,           Multiply,          nullptr};
  return api;
}

}  // namespace jaxferry::cuda::cublaslt
