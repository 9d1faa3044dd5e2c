#include <dlfcn.h>

#include <string>

#include "cuda/cublaslt_api.h"
#include "cuda/errors.h"

namespace jaxferry::cuda::cublaslt {

namespace {

void* OpenLibrary() {
  constexpr const char* kNames[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  for (const int flags : {RTLD_NOW | RTLD_NOLOAD, RTLD_NOW}) {
    for (const char* name : kNames) {
      if (void* library = dlopen(name, flags)) return library;
    }
  }
  throw Failure(
      "cuBLASLt cannot be opened (libcublasLt.so.13 or .12); install nvidia-cublas or name its folder in "
      "LD_LIBRARY_PATH");
}

template <typename Function>
void Find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr) throw Failure(std::string("cuBLASLt has no function ") + name);
}

Api Open() {
  void* library = OpenLibrary();
  Api api;
  Find(library, "cublasLtCreate", api.Create);
  Find(library, "cublasLtMatmulDescCreate", api.MatmulDescCreate);
  Find(library, "cublasLtMatmulDescDestroy", api.MatmulDescDestroy);
  Find(library, "cublasLtMatmulDescSetAttribute", api.MatmulDescSetAttribute);
  Find(library, "cublasLtMatrixLayoutCreate", api.MatrixLayoutCreate);
  Find(library, "cublasLtMatrixLayoutDestroy", api.MatrixLayoutDestroy);
  Find(library, "cublasLtMatmulPreferenceCreate", api.MatmulPreferenceCreate);
  Find(library, "cublasLtMatmulPreferenceDestroy", api.MatmulPreferenceDestroy);
  Find(library, "cublasLtMatmulPreferenceSetAttribute", api.MatmulPreferenceSetAttribute);
  Find(library, "cublasLtMatmulAlgoGetHeuristic", api.MatmulAlgoGetHeuristic);
  Find(library, "cublasLtMatmul", api.Matmul);
  Find(library, "cublasLtGetVersion", api.GetVersion);
  return api;
}

}  // namespace

const Api& Load() {
  static const Api api = Open();
  return api;
}

}  // namespace jaxferry::cuda::cublaslt
