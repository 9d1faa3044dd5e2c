#include "cpu/dha_matmul.h"

#include <algorithm>
#include <vector>

#include "cpu/blas.h"
#include "cpu/convert.h"
#include "cpu/panels.h"

namespace jaxferry {

namespace {

// A matrix in fp32: the original or a converted copy.
class Float32 {
 public:
  Float32(Dtype dtype, const void* data, int64_t size) : data_(static_cast<const float*>(data)) {
    if (dtype == Dtype::kFloat32) return;
    own_.resize(size);
    ToFloat32(dtype, data, own_.data(), size);
    data_ = own_.data();
  }

  const float* data() const { return data_; }

 private:
  std::vector<float> own_;
  const float* data_;
};

// Columns [start, start + size) of w[k, n], or rows of w[n, k], in fp32, as x's dtype rounds them.
Matrix LoadPanel(const Matmul& call, int64_t start, int64_t size, float* panel) {
  if (call.transpose) {
    ToFloat32Through(call.w_dtype, call.x_dtype, Skip(call.w_dtype, call.w, start * call.k), panel, size * call.k);
    return {panel, call.k, true};
  }
  for (int64_t row = 0; row < call.k; ++row) {
    const void* source = Skip(call.w_dtype, call.w, row * call.n + start);
    ToFloat32Through(call.w_dtype, call.x_dtype, source, panel + row * size, size);
  }
  return {panel, size, false};
}

void StorePanel(const Matmul& call, const std::vector<float>& product, int64_t start, int64_t size) {
  for (int64_t row = 0; row < call.m; ++row) {
    FromFloat32(call.y_dtype, product.data() + row * size, Skip(call.y_dtype, call.y, row * call.y_pitch + start), size);
  }
}

}  // namespace

void RunMatmul(const Matmul& call) {
  if (call.m == 0 || call.n == 0) return;
  float* y = static_cast<float*>(call.y);
  if (call.x_dtype == Dtype::kFloat32 && call.w_dtype == Dtype::kFloat32) {
    // No conversion or copy: on a CPU, host memory is device memory.
    const Matrix w = {static_cast<const float*>(call.w), call.transpose ? call.k : call.n, call.transpose};
    return Multiply({static_cast<const float*>(call.x), call.x_pitch, false}, w, y, call.y_pitch, call.m, call.n,
                    call.k);
  }
  const Float32 x(call.x_dtype, call.x, call.m * call.x_pitch);
  const Panel panel(call.scratch, call.scratch_bytes, call.k, call.n);
  const bool is_direct = call.y_dtype == Dtype::kFloat32;
  std::vector<float> product(is_direct ? 0 : call.m * std::min(panel.num_items(), call.n));
  for (int64_t start = 0; start < call.n; start += panel.num_items()) {
    const int64_t size = std::min(panel.num_items(), call.n - start);
    const Matrix w = LoadPanel(call, start, size, panel.data());
    float* place = is_direct ? y + start : product.data();
    Multiply({x.data(), call.x_pitch, false}, w, place, is_direct ? call.y_pitch : size, call.m, size, call.k);
    if (!is_direct) StorePanel(call, product, start, size);
  }
}

void RunMatmulGradient(const MatmulGradient& call) {
  // Computes left.T @ right by rows, which are contiguous in the destination.
  const int64_t rows = call.transpose ? call.n : call.k, columns = call.transpose ? call.k : call.n;
  if (rows == 0 || columns == 0) return;
  const int64_t left_pitch = call.transpose ? call.dy_pitch : call.x_pitch;
  const int64_t right_pitch = call.transpose ? call.x_pitch : call.dy_pitch;
  const Float32 left(call.dtype, call.transpose ? call.dy : call.x, call.m * left_pitch);
  const Float32 right(call.dtype, call.transpose ? call.x : call.dy, call.m * right_pitch);
  const Panel panel(call.scratch, call.scratch_bytes, columns, rows);
  for (int64_t start = 0; start < rows; start += panel.num_items()) {
    const int64_t size = std::min(panel.num_items(), rows - start) * columns;
    Multiply({left.data() + start, left_pitch, true}, {right.data(), right_pitch, false}, panel.data(), columns,
             size / columns, columns, call.m);
    if (call.round_to) RoundThrough(*call.round_to, panel.data(), size);
    void* destination = Skip(call.destination_dtype, call.destination, start * columns);
    if (call.accumulate) {
      Add(Dtype::kFloat32, panel.data(), call.destination_dtype, destination, size);
    } else {
      FromFloat32(call.destination_dtype, panel.data(), destination, size);
    }
  }
}

}  // namespace jaxferry
