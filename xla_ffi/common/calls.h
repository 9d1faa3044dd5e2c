// Checked calls of the operations as plain pointers and sizes, for kernels without XLA types.
//
// Pointers into host vectors already include the call's offset. Sizes count elements unless named as bytes.
#ifndef JAXFERRY_COMMON_CALLS_H_
#define JAXFERRY_COMMON_CALLS_H_

#include <cstdint>
#include <optional>
#include <vector>

#include "common/dtypes.h"

namespace jaxferry {

// Rows of a table `[rows, columns]`; a row of NaN for an index outside [0, rows). The scratch has four bytes for each
// row of the table.
struct Gather {
  Dtype dtype;
  const void* table;
  const int32_t* indices;
  void* result;
  void* scratch;
  int64_t num_indices, rows, columns;
};

// Whether nothing uses the memory that a load fills: it may be used by any work so far; not by work since
// `ferry_vacate`; or by no work, since the caller has seen its last use end.
enum class Vacancy { kUnknown = 0, kNoted = 1, kSeen = 2 };

// y[m, n] = x[m, k] @ w, for w[k, n], or w[n, k] if transposed. A pitch counts elements between the starts of rows; what
// follows a row of x before the next are zeros, and what follows one of y is undefined.
struct Matmul {
  Dtype x_dtype, w_dtype, y_dtype;
  const void* x;
  const void* w;
  void* y;
  void* scratch;
  int64_t scratch_bytes, m, k, n, x_pitch, y_pitch;
  bool transpose;
};

// destination = (or, to accumulate, +=) x.T @ dy of shape [k, n], or dy.T @ x of shape [n, k] if transposed. Pitches as
// in a product: zeros follow rows of x and dy.
struct MatmulGradient {
  Dtype dtype, destination_dtype;
  const void* x;
  const void* dy;
  void* destination;
  void* scratch;
  int64_t scratch_bytes, m, k, n, x_pitch, dy_pitch;
  bool transpose, accumulate;
  std::optional<Dtype> round_to;
};

// destination = (or +=) gradient.
struct Store {
  Dtype dtype, destination_dtype;
  const void* gradient;
  void* destination;
  int64_t size;
  bool accumulate;
};

// Adds rows to a table `[rows, columns]`; ignores indices outside [0, rows).
struct RowStore {
  Dtype dtype, destination_dtype;
  const int32_t* indices;
  const void* added;
  void* destination;
  int64_t num_indices, rows, columns;
};

// A range of bytes to copy, or to add to the destination as numbers of dtype `add`, in fp32.
struct Copy {
  const void* source;
  void* destination;
  int64_t bytes;
  std::optional<Dtype> add;
};

// A range of bytes to wait for.
struct Range {
  const void* data;
  int64_t bytes;
};

using Copies = std::vector<Copy>;
using Ranges = std::vector<Range>;

inline Ranges RangesOf(int64_t count, const void* const* data, const int64_t* bytes) {
  Ranges ranges;
  for (int64_t i = 0; i < count; ++i) ranges.push_back({data[i], bytes[i]});
  return ranges;
}

}  // namespace jaxferry

#endif  // JAXFERRY_COMMON_CALLS_H_
