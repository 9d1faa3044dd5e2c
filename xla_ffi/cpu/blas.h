// Products of row-major fp32 matrices by the Fortran sgemm that Python provides. No XLA types.
#ifndef JAXFERRY_CPU_BLAS_H_
#define JAXFERRY_CPU_BLAS_H_

#include <cstdint>

namespace jaxferry {

void SetBlas(void* sgemm);

bool HasBlas();

// A row-major matrix, or the transpose of one; the starts of stored rows lie `stride` elements apart.
struct Matrix {
  const float* data;
  int64_t stride;
  bool transposed;
};

// c[rows, columns] = a[rows, inner] @ b[inner, columns]; the rows of c lie `c_stride` elements apart. Each sum over
// `inner` is one sgemm's, unless it exceeds sgemm's 32-bit sizes.
void Multiply(const Matrix& a, const Matrix& b, float* c, int64_t c_stride, int64_t rows, int64_t columns,
              int64_t inner);

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_BLAS_H_
