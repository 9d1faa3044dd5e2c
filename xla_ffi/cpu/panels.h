// Cuts products into panels that fit into the scratch. No XLA types.
#ifndef JAXFERRY_CPU_PANELS_H_
#define JAXFERRY_CPU_PANELS_H_

#include <algorithm>
#include <cstdint>
#include <vector>

namespace jaxferry {

// Memory for an fp32 panel of `kNumItems` items, `item_size` numbers each: half of the scratch, since the contract has
// two alternating panels, or its own memory if that is too small. BLAS may round a column differently depending on the
// number of columns in its call (OpenBLAS does: its kernels have remainders, and threads share the columns). So panels
// have one size whatever the scratch, and results do not depend on it.
class Panel {
 public:
  Panel(void* scratch, int64_t scratch_bytes, int64_t item_size, int64_t num_items) {
    num_items_ = std::min(num_items, kNumItems);
    const int64_t size = item_size * num_items_;
    const bool fits = size <= scratch_bytes / 2 / static_cast<int64_t>(sizeof(float));
    if (!fits) own_.resize(size);
    data_ = fits ? static_cast<float*>(scratch) : own_.data();
  }

  float* data() const { return data_; }
  int64_t num_items() const { return num_items_; }

 private:
  // Products take about 5 % longer than with all columns at once; with 64 columns, twice as long for few rows.
  static constexpr int64_t kNumItems = 1024;

  std::vector<float> own_;
  float* data_;
  int64_t num_items_;
};

}  // namespace jaxferry

#endif  // JAXFERRY_CPU_PANELS_H_
