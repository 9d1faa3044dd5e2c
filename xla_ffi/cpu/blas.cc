#include "cpu/blas.h"

#include <algorithm>
#include <atomic>

namespace jaxferry {

namespace {

using Sgemm = void(const char* trans_a, const char* trans_b, const int* m, const int* n, const int* k,
                   const float* alpha, const float* a, const int* lda, const float* b, const int* ldb,
                   const float* beta, float* c, const int* ldc);

std::atomic<Sgemm*> sgemm{nullptr};

// The maximum size passed to sgemm: some BLAS count products of two sizes in 32 bits.
constexpr int64_t kLargest = int64_t{1} << 30;

// Returns the part of a matrix that starts at a row and a column.
const float* Part(const Matrix& matrix, int64_t row, int64_t column) {
  return matrix.data + (matrix.transposed ? column * matrix.stride + row : row * matrix.stride + column);
}

}  // namespace

void SetBlas(void* function) { sgemm.store(reinterpret_cast<Sgemm*>(function)); }

bool HasBlas() { return sgemm.load() != nullptr; }

void Multiply(const Matrix& a, const Matrix& b, float* c, int64_t c_stride, int64_t rows, int64_t columns,
              int64_t inner) {
  if (inner == 0) {
    for (int64_t row = 0; row < rows; ++row) std::fill_n(c + row * c_stride, columns, 0.0f);
    return;
  }
  // Row-major c = a @ b is column-major c.T = b.T @ a.T, where a row-major matrix is its own transpose.
  const char* trans_b = b.transposed ? "T" : "N";
  const char* trans_a = a.transposed ? "T" : "N";
  const int ldb = static_cast<int>(b.stride), lda = static_cast<int>(a.stride), ldc = static_cast<int>(c_stride);
  const float one = 1.0f;
  for (int64_t row = 0; row < rows; row += kLargest) {
    const int num_rows = static_cast<int>(std::min(kLargest, rows - row));
    for (int64_t column = 0; column < columns; column += kLargest) {
      const int num_columns = static_cast<int>(std::min(kLargest, columns - column));
      for (int64_t start = 0; start < inner; start += kLargest) {
        const int num_inner = static_cast<int>(std::min(kLargest, inner - start));
        const float beta = start == 0 ? 0.0f : 1.0f;
        sgemm.load()(trans_b, trans_a, &num_columns, &num_rows, &num_inner, &one, Part(b, start, column), &ldb,
                     Part(a, row, start), &lda, &beta, c + row * c_stride + column, &ldc);
      }
    }
  }
}

}  // namespace jaxferry
