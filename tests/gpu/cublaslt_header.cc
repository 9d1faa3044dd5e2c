// Compares our declarations of cuBLASLt with its real header; compiling is the test.
#include <cublasLt.h>

#include <cstddef>
#include <type_traits>

#include "cuda/cublaslt_api.h"

namespace lt = jaxferry::cuda::cublaslt;

// Whether a value is passed alike: both pointers, or numbers of one size and kind (enums are numbers).
template <typename A, typename B>
constexpr bool PassedAlike() {
  if constexpr (std::is_pointer_v<A> || std::is_pointer_v<B>) return std::is_pointer_v<A> && std::is_pointer_v<B>;
  return sizeof(A) == sizeof(B) && std::is_floating_point_v<A> == std::is_floating_point_v<B>;
}

template <typename A, typename B>
struct Alike : std::false_type {};

template <typename ResultA, typename... A, typename ResultB, typename... B>
struct Alike<ResultA (*)(A...), ResultB (*)(B...)> {
  static constexpr bool Compare() {
    if constexpr (sizeof...(A) != sizeof...(B)) {
      return false;
    } else {
      return PassedAlike<ResultA, ResultB>() && (PassedAlike<A, B>() && ...);
    }
  }
  static constexpr bool value = Compare();
};

#define CHECK_FUNCTION(name) \
  static_assert(Alike<decltype(lt::Api::name), decltype(&cublasLt##name)>::value, "cublasLt" #name)

CHECK_FUNCTION(Create);
CHECK_FUNCTION(MatmulDescCreate);
CHECK_FUNCTION(MatmulDescDestroy);
CHECK_FUNCTION(MatmulDescSetAttribute);
CHECK_FUNCTION(MatrixLayoutCreate);
CHECK_FUNCTION(MatrixLayoutDestroy);
CHECK_FUNCTION(MatmulPreferenceCreate);
CHECK_FUNCTION(MatmulPreferenceDestroy);
CHECK_FUNCTION(MatmulPreferenceSetAttribute);
CHECK_FUNCTION(MatmulAlgoGetHeuristic);
CHECK_FUNCTION(Matmul);
CHECK_FUNCTION(GetVersion);

#define CHECK_VALUE(ours, theirs) \
  static_assert(static_cast<long long>(lt::ours) == static_cast<long long>(theirs), #theirs)

CHECK_VALUE(kSuccess, CUBLAS_STATUS_SUCCESS);
CHECK_VALUE(kCompute32F, CUBLAS_COMPUTE_32F);
CHECK_VALUE(kCompute32FFastTf32, CUBLAS_COMPUTE_32F_FAST_TF32);
CHECK_VALUE(kOpN, CUBLAS_OP_N);
CHECK_VALUE(kOpT, CUBLAS_OP_T);
CHECK_VALUE(kDescTransA, CUBLASLT_MATMUL_DESC_TRANSA);
CHECK_VALUE(kDescTransB, CUBLASLT_MATMUL_DESC_TRANSB);
CHECK_VALUE(kPreferenceMaxWorkspaceBytes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES);
CHECK_VALUE(kPreferenceReductionSchemeMask, CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK);
CHECK_VALUE(kPreferenceMinAlignmentABytes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES);
CHECK_VALUE(kPreferenceMinAlignmentBBytes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES);
CHECK_VALUE(kPreferenceMinAlignmentCBytes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES);
CHECK_VALUE(kPreferenceMinAlignmentDBytes, CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES);
CHECK_VALUE(kReductionSchemeNone, CUBLASLT_REDUCTION_SCHEME_NONE);

using Theirs = cublasLtMatmulHeuristicResult_t;
static_assert(sizeof(lt::MatmulAlgo) == sizeof(cublasLtMatmulAlgo_t), "cublasLtMatmulAlgo_t");
static_assert(sizeof(lt::HeuristicResult) == sizeof(Theirs), "cublasLtMatmulHeuristicResult_t");
static_assert(offsetof(lt::HeuristicResult, algo) == offsetof(Theirs, algo), "algo");
static_assert(offsetof(lt::HeuristicResult, workspace_size) == offsetof(Theirs, workspaceSize), "workspaceSize");
static_assert(offsetof(lt::HeuristicResult, state) == offsetof(Theirs, state), "state");
static_assert(offsetof(lt::HeuristicResult, waves_count) == offsetof(Theirs, wavesCount), "wavesCount");
