// Sums of gradients in host memory, in place, shared by the threads of host steps. No XLA types.
#ifndef JAXFERRY_CPU_HOST_SUMS_H_
#define JAXFERRY_CPU_HOST_SUMS_H_

#include <cstdint>

#include "common/dtypes.h"

namespace jaxferry {

// destination = source, or += source: added in fp32, with subnormal numbers as zero, and rounded once.
void CastOnHost(Dtype from, const void* source, Dtype to, void* destination, int64_t size);
void AddOnHost(Dtype from, const void* source, Dtype to, void* destination, int64_t size);

void ClearOnHost(void* destination, int64_t num_bytes);

// Rows to add to a table, of which `table` holds the elements [start, stop), counted from the table's first one.
struct RowSum {
  Dtype from;
  const void* rows;
  const int32_t* indices;  // one for each of the rows; what lies outside [start, stop) is ignored
  int64_t num_rows;
  int64_t columns;
  Dtype to;
  void* table;
  int64_t start;
  int64_t stop;
};

// Adds the rows to each row of the table as they follow each other, in fp32, and rounds once; whatever the number of
// threads. `num_rows` is below 2^32.
void AddRowsOnHost(const RowSum& sum);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_HOST_SUMS_H_
