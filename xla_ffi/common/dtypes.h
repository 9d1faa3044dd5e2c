// The element types of parameters and gradients, without XLA's or CUDA's.
#ifndef JAXFERRY_COMMON_DTYPES_H_
#define JAXFERRY_COMMON_DTYPES_H_

#include <cstdint>

namespace jaxferry {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

constexpr int64_t ItemSize(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : 2; }

constexpr const char* DtypeName(Dtype dtype) {
  switch (dtype) {
    case Dtype::kBfloat16:
      return "bfloat16";
    case Dtype::kFloat16:
      return "float16";
    default:
      return "float32";
  }
}

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_DTYPES_H_
