// Rows of a table by their indices. No XLA types.
#ifndef JAXFERRY_CPU_DHA_GATHER_H_
#define JAXFERRY_CPU_DHA_GATHER_H_

#include <algorithm>
#include <cstring>

#include "common/calls.h"

namespace jaxferry {

inline void FillWithNan(Dtype dtype, void* row, int64_t size) {
  switch (dtype) {
    case Dtype::kFloat32:
      std::fill_n(static_cast<uint32_t*>(row), size, uint32_t{0x7fc00000});
      break;
    case Dtype::kBfloat16:
      std::fill_n(static_cast<uint16_t*>(row), size, uint16_t{0x7fc0});
      break;
    case Dtype::kFloat16:
      std::fill_n(static_cast<uint16_t*>(row), size, uint16_t{0x7e00});
  }
}

inline void RunGather(const Gather& call) {
  const int64_t row_bytes = call.columns * ItemSize(call.dtype);
  if (row_bytes == 0) return;
  const char* table = static_cast<const char*>(call.table);
  char* result = static_cast<char*>(call.result);
  for (int64_t i = 0; i < call.num_indices; ++i, result += row_bytes) {
    const int64_t row = call.indices[i];
    if (row >= 0 && row < call.rows) {
      std::memcpy(result, table + row * row_bytes, row_bytes);
    } else {
      FillWithNan(call.dtype, result, call.columns);
    }
  }
}

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_DHA_GATHER_H_
