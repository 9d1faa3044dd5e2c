// The element types of parameters and gradients, without XLA's or CUDA's.
#ifndef JAXFERRY_COMMON_DTYPES_H_
#define JAXFERRY_COMMON_DTYPES_H_

#include <cstdint>

namespace jaxferry {

enum class Dtype { kFloat32, kBfloat16, kFloat16 };

// 8 bits, of moments of the host step alone: no other operation meets it.
constexpr Dtype kCode{3};

constexpr int64_t ItemSize(Dtype dtype) { return dtype == Dtype::kFloat32 ? 4 : dtype == kCode ? 1 : 2; }

// Advances a pointer by `size` elements.
inline const void* Skip(Dtype dtype, const void* data, int64_t size) {
  return static_cast<const char*>(data) + size * ItemSize(dtype);
}

inline void* Skip(Dtype dtype, void* data, int64_t size) { return static_cast<char*>(data) + size * ItemSize(dtype); }

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_DTYPES_H_
