#include "cuda/product.h"

#include <string>
#include <type_traits>
#include <utility>

#include "cuda/errors.h"

namespace jaxferry::cuda {

namespace {

// One buffer per stream and device, of the size that NVIDIA recommends for Hopper (cuBLAS, "cublasSetWorkspace").
constexpr uint64_t kWorkspaceBytes = uint64_t{32} << 20;
constexpr int64_t kLargestSize = (int64_t{1} << 31) - 1;

void CheckBlas(cublaslt::Status status, const char* what) {
  if (status != cublaslt::kSuccess) {
    throw Failure(std::string(what) + " failed: cuBLAS status " + std::to_string(static_cast<int>(status)));
  }
}

cudaDataType DataType(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return CUDA_R_16BF;
    case Dtype::kFloat16:
      return CUDA_R_16F;
    default:
      return CUDA_R_32F;
  }
}

// A cuBLASLt descriptor and the function that frees it.
template <typename Descriptor>
using Owned = std::unique_ptr<std::remove_pointer_t<Descriptor>, cublaslt::Status (*)(Descriptor)>;

// cuBLASLt is column-major: a row-major matrix [rows, columns] is its matrix [columns, rows].
Owned<cublaslt::MatrixLayout> MakeLayout(Dtype dtype, int64_t rows, int64_t columns, int64_t pitch) {
  const cublaslt::Api& api = cublaslt::Load();
  cublaslt::MatrixLayout layout = nullptr;
  CheckBlas(api.MatrixLayoutCreate(&layout, DataType(dtype), columns, rows, pitch), "describing a matrix");
  return {layout, api.MatrixLayoutDestroy};
}

Owned<cublaslt::MatrixLayout> LayoutOf(Dtype dtype, const Matrix& matrix, int64_t rows, int64_t columns) {
  return matrix.transpose ? MakeLayout(dtype, columns, rows, matrix.pitch)
                          : MakeLayout(dtype, rows, columns, matrix.pitch);
}

Owned<cublaslt::MatmulDesc> Describe(const Product& product) {
  const cublaslt::Api& api = cublaslt::Load();
  const auto compute = product.dtype == Dtype::kFloat32 ? cublaslt::kCompute32FFastTf32 : cublaslt::kCompute32F;
  cublaslt::MatmulDesc made = nullptr;
  CheckBlas(api.MatmulDescCreate(&made, compute, CUDA_R_32F), "describing a product");
  Owned<cublaslt::MatmulDesc> descriptor(made, api.MatmulDescDestroy);
  // Row-major c = a @ b is column-major c.T = b.T @ a.T, so b comes first.
  const int32_t first = product.b.transpose ? cublaslt::kOpT : cublaslt::kOpN;
  const int32_t second = product.a.transpose ? cublaslt::kOpT : cublaslt::kOpN;
  CheckBlas(api.MatmulDescSetAttribute(made, cublaslt::kDescTransA, &first, sizeof(first)), "describing a product");
  CheckBlas(api.MatmulDescSetAttribute(made, cublaslt::kDescTransB, &second, sizeof(second)), "describing a product");
  return descriptor;
}

Owned<cublaslt::MatmulPreference> MakePreference(uint32_t alignment) {
  const cublaslt::Api& api = cublaslt::Load();
  const char* what = "describing what algorithm to choose";
  cublaslt::MatmulPreference made = nullptr;
  CheckBlas(api.MatmulPreferenceCreate(&made), what);
  Owned<cublaslt::MatmulPreference> preference(made, api.MatmulPreferenceDestroy);
  const auto set = [&](cublaslt::PreferenceAttribute attribute, const auto& value) {
    CheckBlas(api.MatmulPreferenceSetAttribute(made, attribute, &value, sizeof(value)), what);
  };
  set(cublaslt::kPreferenceMaxWorkspaceBytes, kWorkspaceBytes);
  set(cublaslt::kPreferenceReductionSchemeMask, cublaslt::kReductionSchemeNone);
  set(cublaslt::kPreferenceMinAlignmentABytes, alignment);
  set(cublaslt::kPreferenceMinAlignmentBBytes, alignment);
  set(cublaslt::kPreferenceMinAlignmentCBytes, alignment);
  set(cublaslt::kPreferenceMinAlignmentDBytes, alignment);
  return preference;
}

// Returns the common alignment of all three matrices, at most sixteen bytes: with more, the algorithm would depend on
// addresses.
uint32_t AlignmentOf(const Product& product) {
  const auto addresses = reinterpret_cast<uintptr_t>(product.a.data) | reinterpret_cast<uintptr_t>(product.b.data) |
                         reinterpret_cast<uintptr_t>(product.c);
  uint32_t alignment = 16;
  while (addresses % alignment != 0) alignment /= 2;
  return alignment;
}

std::string Sizes(const Product& product) {
  return "m = " + std::to_string(product.m) + ", n = " + std::to_string(product.n) +
         ", k = " + std::to_string(product.k);
}

void ClearProduct(const Product& product, cudaStream_t stream) {
  const int64_t item = ItemSize(product.c_dtype);
  Check(cudaMemset2DAsync(product.c, product.c_pitch * item, 0, product.n * item, product.m, stream),
        "clearing an empty product");
}

}  // namespace

struct Multiplier::Plan {
  Plan(const Product& product, cublaslt::Handle handle)
      : descriptor(Describe(product)),
        b(LayoutOf(product.dtype, product.b, product.k, product.n)),
        a(LayoutOf(product.dtype, product.a, product.m, product.k)),
        c(MakeLayout(product.c_dtype, product.m, product.n, product.c_pitch)) {
    const auto preference = MakePreference(AlignmentOf(product));
    int num_results = 0;
    const auto status = cublaslt::Load().MatmulAlgoGetHeuristic(handle, descriptor.get(), b.get(), a.get(), c.get(),
                                                                c.get(), preference.get(), 1, &chosen, &num_results);
    if (status != cublaslt::kSuccess || num_results == 0 || chosen.state != cublaslt::kSuccess) {
      throw Failure("cuBLASLt has no algorithm for a product of " + Sizes(product) + " (status " +
                    std::to_string(static_cast<int>(status)) + ")");
    }
  }

  Owned<cublaslt::MatmulDesc> descriptor;
  Owned<cublaslt::MatrixLayout> b, a, c;
  cublaslt::HeuristicResult chosen = {};
};

const Multiplier::Plan* Multiplier::FindPlan(const Product& p) {
  if (p.m == 0 || p.n == 0 || p.k == 0) return nullptr;
  if (p.m > kLargestSize || p.n > kLargestSize || p.k > kLargestSize) {
    throw BadArgument("cuBLASLt counts rows and columns in 31 bits, got " + Sizes(p));
  }
  if (handle_ == nullptr) CheckBlas(cublaslt::Load().Create(&handle_), "starting cuBLASLt");
  const Key key(p.m, p.n, p.k, p.a.pitch, p.b.pitch, p.c_pitch, p.a.transpose, p.b.transpose, p.dtype, p.c_dtype,
                AlignmentOf(p));
  auto found = plans_.find(key);
  if (found == plans_.end()) found = plans_.emplace(key, std::make_shared<const Plan>(p, handle_)).first;
  return found->second.get();
}

void Multiplier::Prepare(const Product& product) {
  const Plan* plan = FindPlan(product);
  if (plan == nullptr || plan->chosen.workspace_size == 0 || spare_workspace_ != nullptr || !workspaces_.empty()) return;
  spare_workspace_ = std::make_unique<DeviceBuffer>(kWorkspaceBytes);
}

void* Multiplier::Workspace(const Plan& plan, cudaStream_t stream) {
  if (plan.chosen.workspace_size == 0) return nullptr;
  std::unique_ptr<DeviceBuffer>& workspace = workspaces_[stream];
  if (workspace == nullptr) workspace = std::move(spare_workspace_);
  if (workspace == nullptr) workspace = std::make_unique<DeviceBuffer>(kWorkspaceBytes);
  return workspace->data();
}

void Multiplier::Multiply(const Product& product, cudaStream_t stream) {
  const Plan* plan = FindPlan(product);
  if (plan == nullptr) {
    if (product.m != 0 && product.n != 0) ClearProduct(product, stream);
    return;
  }
  const float one = 1.0f;
  const float zero = 0.0f;
  CheckBlas(cublaslt::Load().Matmul(handle_, plan->descriptor.get(), &one, product.b.data, plan->b.get(),
                                    product.a.data, plan->a.get(), &zero, product.c, plan->c.get(), product.c,
                                    plan->c.get(), &plan->chosen.algo, Workspace(*plan, stream),
                                    plan->chosen.workspace_size, stream),
            "cublasLtMatmul");
}

}  // namespace jaxferry::cuda
